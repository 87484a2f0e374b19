"""The command line's documents are made of its help, and the help says what it has to."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool.cli import base, verbs
from kvpool.errors import KvpoolError
from tests.support.imports import modules_after

NO_JSON = {  # and why
    "kvpool serve": "runs until it is stopped",
    "kvpool router": "the same",
    "kvpool receipts": "has --format json, beside others",
}


@pytest.fixture(scope="module")
def script(repo_root: Path) -> dict:
    return runpy.run_path(str(repo_root / "scripts" / "reference.py"))


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_the_man_page_is_well_formed(script) -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tascii", "-ww"],
        input=script["man_page"](),
        capture_output=True,
        text=True,
        check=True,
    )
    # Lines that cannot be filled evenly are no fault.
    warnings = [w for w in done.stderr.splitlines() if "cannot adjust line" not in w]
    assert [w for w in warnings if "cannot break line" not in w] == []
    assert "--unused-s TIME" in re.sub(r"\x1b\[\d+m|.\x08", "", done.stdout)


def test_every_verb_has_an_example_and_json(script) -> None:
    verbs = list(script["verbs"]())
    assert len(verbs) > 30
    for verb in verbs:
        assert verb.text, verb.path
        assert verb.examples, f"{verb.path} has no example"
        assert all(each.startswith(verb.path) for each in verb.examples), verb.path
        names = {option.names.split()[0] for option in verb.options}
        # What certs, secrets and tokens make are files; the numbers of sim and plan go to a file, too.
        own = verb.path.split()[1] in {"certs", "secret", "token", "audit"} or verb.path in NO_JSON
        assert own or "--json" in names, f"{verb.path} has no --json"


def test_no_text_of_the_help_is_taken_for_markup(script) -> None:
    """What stands in brackets would vanish from the screen."""
    for verb in script["verbs"]():
        for text in (*verb.text, *(each.help for each in (*verb.arguments, *verb.options))):
            assert not re.search(r"(?<!\\)\[[a-z/]", text), (verb.path, text)


def test_exit_statuses_are_in_the_help() -> None:
    said = " ".join(CliRunner().invoke(verbs.app, ["--help"]).output.split())
    assert "Exit status: 0 success;" in said
    for status in base.EXIT_STATUSES:
        assert re.search(rf"[:;] {status} ", said), status


def every_error(root: type[KvpoolError] = KvpoolError) -> set[type[KvpoolError]]:
    return {root}.union(*map(every_error, root.__subclasses__()))


def test_every_error_has_its_exit_status() -> None:
    kinds = {kind for kind in every_error() if kind.__module__ == "kvpool.errors"}
    found = {kind.__name__: base.exit_status(kind("x")) for kind in kinds}
    others = {name: status for name, status in found.items() if status != base.EXIT_ERROR}
    assert others == {"Unavailable": 3, "Declined": 3, "NotAuthenticated": 4}


def test_the_help_loads_nothing_heavy() -> None:
    loaded = modules_after("import kvpool.cli.verbs")
    for heavy in (
        "numpy",
        "asyncio",
        "uvloop",
        "aiohttp",
        "msgspec",
        "rich.live",
        "urllib.request",
    ):
        assert heavy not in loaded, heavy
    assert not any(name.startswith(("kvpool.daemon", "kvpool.cli.render")) for name in loaded)


# ---- what asks nobody ------------------------------------------------------------------------------


def test_a_configuration_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text('memory = "1GiB"\ncluster_secret = "0123456789abcdef0123456789abcdef"\n')
    file.chmod(0o600)
    file.chmod(0o600)
    done = kvpool("config", "check", str(file), KVPOOL_TRANSFER_WORKERS="3")
    assert (done.returncode, done.stderr) == (0, "")
    assert f'\n# from {file}\nmemory = "1GiB"\n' in done.stdout
    assert "\n# from KVPOOL_TRANSFER_WORKERS\ntransfer_workers = 3\n" in done.stdout
    assert '\n# cluster_secret = "***"  # a secret, not shown\n' in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if str(file) not in line) <= 80
    again = tmp_path / "again.toml"
    again.write_text(done.stdout)
    taken = json.loads(kvpool("config", "check", str(again), "--json").stdout)
    found = json.loads(kvpool("config", "check", str(file), "--json").stdout)
    assert found["memory"] == {"value": 1 << 30, "source": str(file)}
    assert taken["transfer_workers"] == {"value": 3, "source": str(again)}
    assert taken["memory"]["value"] == found["memory"]["value"]
    assert "0123456789abcdef" not in done.stdout
    done = kvpool("config", "check", str(file), KVPOOL_TRANSFER_WORKERS="many")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"kvpool: KVPOOL_TRANSFER_WORKERS[^\n]+\n", done.stderr)


def test_a_wrong_command_line_is_a_usage_error() -> None:
    for words in (
        ("job", "start", "evict", "--nope"),
        ("nope",),
        ("job", "start", "warm"),
        ("job", "show"),
    ):
        assert kvpool(*words).returncode == base.EXIT_USAGE, words


# ---- completion ------------------------------------------------------------------------------------


def kvpool(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", "from kvpool.cli import main; main()", *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    program = tmp_path / "kvpool"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvpool.cli "$@"\n')
    program.chmod(0o755)
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    script = kvpool("--show-completion", "bash", **named).stdout
    ask = (
        'COMP_WORDS=(kvpool {}); COMP_CWORD=1; _kvpool_completion kvpool; echo "${{COMPREPLY[@]}}"'
    )
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", f"{script}\n{ask.format('nam')}"],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "namespaces"
