"""Which folders for blocks would fill the root file system."""

import os

from kvpool.daemon.server.server import on_root


def test_folders_on_the_root_file_system_and_those_that_would_be_there(tmp_path):
    elsewhere = "/proc/self"
    assert os.stat(elsewhere).st_dev != tmp_path.stat().st_dev
    paths = [
        str(tmp_path),
        str(tmp_path / "to be made"),
        str(tmp_path / "missing" / "folder"),
        elsewhere,
    ]
    assert on_root(paths, root=str(tmp_path)) == paths[:2]
