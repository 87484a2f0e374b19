"""`adapter_params` of LMCache's adapter; and that its package is light until it is used."""

import json
import subprocess
import sys

import pytest

from kvpool.engine_plugins.lmcache.settings import Settings
from kvpool.errors import ConfigError


def test_nothing_has_to_be_given():
    assert Settings.from_given({}) == Settings()


def test_what_is_given_counts():
    given = {"socket": "/run/kvpool.sock", "lease_s": 20, "workers": 4, "epoch": "7", "token": None}
    settings = Settings.from_given(json.loads(json.dumps(given)))
    assert {name: getattr(settings, name) for name in given} == given
    assert isinstance(settings.lease_s, float)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"sockets": "/x"}, "no setting 'sockets'; known settings are epoch, lease_s"),
        ({"lease_s": 0}, "more than 0 seconds"),
        ({"lease_s": float("inf")}, "finite"),
        ({"wait_s": -1}, "at least 0 seconds"),
        ({"request_timeout_s": "1"}, "must be a number"),
        ({"workers": 0}, "at least 1 and at most 16"),
        ({"workers": 1.5}, "whole number"),
        ({"workers": True}, "must be a number"),
        ({"tasks_max": 1 << 20}, "at most 65536"),
        ({"replicas": -1}, "at least 0"),
        ({"socket": 7}, "must be a string"),
        ({"tenant": None}, "must be a string"),
    ],
)
def test_what_is_wrong_is_named(params, said):
    with pytest.raises(ConfigError, match=said):
        Settings.from_given(params)


def test_importing_the_package_imports_no_engine():
    code = (
        "import sys, kvpool.engine_plugins.lmcache as package\n"
        "print({'lmcache', 'torch', 'numpy'} & sys.modules.keys() or 'none', hasattr(package, 'other'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["none", "False"]
