"""The command line: what it prints, what it returns, and that errors are one line."""

import io
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvpool import __version__, cli
from kvpool.config import SETTINGS
from kvpool.daemon.blocks import Counters
from kvpool.errors import ConfigError
from kvpool.status import _COUNTERS, duration, show, size_text

STATS = {
    "node": "host-7",
    "incarnation": "abc123",
    "uptime_s": 90_061.5,
    "clients": 1,
    "connections": 12,
    "refused_connections": 0,
    "leases": 3,
    "counters": dict.fromkeys(Counters.__slots__, 0)
    | {"committed": 1500, "committed_bytes": 3 << 29, "match_keys": 10, "match_hits": 7},
    "tenants": {
        "red": {
            "segment_bytes": 4 << 30,
            "blocks": 1400,
            "hard_pinned_bytes": 1 << 20,
            "soft_pinned_bytes": 0,
            "granted_bytes": 0,
            "space": {
                "size": 4 << 30,
                "slab_bytes": 16 << 20,
                "slabs": 256,
                "slabs_unassigned": 64,
                "bytes_unassigned": 1 << 30,
                "bytes_used": 3 << 29,
                "classes": [
                    {
                        "stride": 1 << 20,
                        "extents": 192,
                        "slots_used": 1400,
                        "slots_free": 1672,
                        "bytes_used": 1400 << 20,
                        "bytes_free": 1672 << 20,
                        "bytes_lost": 0,
                    }
                ],
            },
            "namespaces": {
                "0123456789abcdef0123456789abcdef": {
                    "fields": {"model": "llama [8b]", "tp_size": 2, "dtype": "bf16", "seed": "0"},
                    "blocks": [700, 700],
                    "part_bytes": [1 << 20, 1 << 20],
                }
            },
        }
    },
    "movers": [
        {
            "pid": 77,
            "alive": True,
            "restarts": 0,
            "orders": 1,
            "loans": 2,
            "listening": ["tcp://a:1"],
        },
        {"pid": None, "alive": False, "restarts": 3, "orders": 0, "loans": 0, "listening": []},
    ],
    "peers": [
        {
            "url": "tcp://peer:7070",
            "available": False,
            "asked": 10,
            "failures": 2,
            "checksum_mismatches": 1,
            "blocks": 100,
            "bytes": 100 << 20,
            "seconds": 0.5,
            "last_error": "connection [refused]",
        }
    ],
}


def shown(stats: dict, tenant: str = "red", width: int = 120) -> str:
    out = io.StringIO()
    show(stats, tenant, Console(file=out, width=width, highlight=False))
    return out.getvalue()


def line_with(text: str, word: str) -> str:
    return next(line for line in text.splitlines() if word in line)


def test_what_an_operator_sees():
    text = shown(STATS)
    assert text.startswith(
        "node host-7  incarnation abc123, up 1 d 1 h, 1 client on 12 connections\n"
    )
    assert line_with(text, "segment").split()[1:] == ["4", "GiB", "100%"]
    assert "38%" in line_with(text, "in use")
    assert "1,400 block parts" in text
    assert "never evicted" in text
    assert line_with(text, "1,672").split() == [
        "1",
        "MiB",
        "1,400",
        "1,672",
        "1.4",
        "GiB",
        "1.6",
        "GiB",
        "0",
        "B",
    ]
    namespace = line_with(text, "0123456789ab")
    assert "model=llama [8b], tp_size=2, dtype=bf16, and 1 more" in namespace
    assert "7 of 10 blocks asked for" in text
    assert "1,500 blocks stored, 1.5 GiB" in text
    assert line_with(text, "77").split()[:5] == ["77", "running", "1", "2", "0"]
    assert "down" in text
    peer = line_with(text, "tcp://peer:7070")
    assert "left alone" in peer
    assert "200 MiB/s" in peer
    assert "connection [refused]" in peer


def test_trouble_is_shown_when_there_is_any():
    quiet = shown(STATS)
    assert "checksum mismatches" not in quiet
    assert "refused, pool full" not in quiet
    loud = shown(STATS | {"counters": {"checksum_mismatches": 3, "refused_full": 4}})
    assert "3 blocks dropped" in loud
    assert "4 puts" in line_with(loud, "refused, pool full")
    assert "2 connections refused" in shown(STATS | {"refused_connections": 2})


def test_a_fresh_daemon_has_little_to_show():
    mine = STATS["tenants"]["red"]
    empty = mine | {
        "namespaces": {},
        "hard_pinned_bytes": 0,
        "space": mine["space"] | {"classes": [], "bytes_used": 0},
    }
    text = shown(STATS | {"tenants": {"red": empty}, "peers": []})
    for word in ("Namespaces", "Slots", "Peers", "pinned"):
        assert word not in text


@pytest.mark.parametrize("width", [40, 80, 300])
def test_any_width_of_terminal(width):
    text = shown(STATS, width=width)
    assert max(map(len, text.splitlines())) <= width
    assert "host-7" in text


def test_every_counter_that_is_shown_exists():
    shown_keys = {key for _, entries, _ in _COUNTERS for key, _ in entries}
    assert shown_keys <= set(Counters.__slots__)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (150.4 * 1024, "150 KiB"),
        (1 << 20, "1 MiB"),
        (5 << 40, "5 TiB"),
        (3 << 60, "3072 PiB"),
    ],
)
def test_sizes_for_people(nbytes, text):
    assert size_text(nbytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.9, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (3725, "1 h 2 min"), (172_800, "2 d 0 h")],
)
def test_times_for_people(seconds, text):
    assert duration(seconds) == text


# ---- the commands --------------------------------------------------------------------------------------


def test_version():
    assert CliRunner().invoke(cli.app, ["version"]).output == f"{__version__}\n"


def test_help_names_the_commands():
    text = CliRunner().invoke(cli.app, ["--help"]).output
    for command in ("serve", "status", "version"):
        assert command in text


def test_status_without_a_daemon(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "kvpool.cli", "status", "--socket", str(tmp_path / "no.sock")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == cli.EXIT_ERROR
    assert done.stdout == ""
    assert done.stderr.startswith("kvpool: no kvpool daemon answers at")
    assert "kvpool serve" in done.stderr
    assert done.stderr.count("\n") == 1


def test_serve_with_a_wrong_setting(tmp_path):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvpool.cli",
            "serve",
            "--policy",
            "astrology",
            "--memory",
            "16MiB",
            "--socket",
            str(tmp_path / "s"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == cli.EXIT_ERROR
    assert "astrology" in done.stderr
    assert done.stderr.startswith("kvpool: ")
    assert done.stderr.count("\n") == 1


def test_flags_are_settings(monkeypatch):
    """Each flag of `serve` sets the setting of its name."""
    seen = {}

    def run(config, ready):
        seen["config"] = config

    monkeypatch.setattr("kvpool.daemon.server.serve", run)
    args = (
        "serve --socket /s --memory 1MiB --policy lru --listen tcp://a:1 --listen tcp://b:2"
        " --peer tcp://c:3 --movers 2 --data-dir /d --node n"
    )
    result = CliRunner().invoke(cli.app, args.split())
    assert result.exit_code == 0, result.output
    config = seen["config"]
    assert (config.socket, config.memory, config.policy) == ("/s", 1 << 20, "lru")
    assert config.listen == ("tcp://a:1", "tcp://b:2")
    assert config.peers == ("tcp://c:3",)
    assert (config.movers, config.data_dir, config.node) == (2, "/d", "n")
    assert set(vars(type(config))["__slots__"]) == set(SETTINGS)


def test_errors_are_one_line_and_a_status(monkeypatch, capsys):
    def fail():
        raise ConfigError("memory = 'x': give bytes")

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 1
    assert capsys.readouterr().err == "kvpool: memory = 'x': give bytes\n"


def test_the_entry_point(repo_root: Path):
    project = tomllib.loads((repo_root / "pyproject.toml").read_text())
    assert project["project"]["scripts"]["kvpool"] == "kvpool.cli:main"


def test_the_client_imports_nothing_heavy():
    """An engine's process gets neither torch nor the daemon, an event loop or a terminal library."""
    code = "import sys, kvpool.client; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    for heavy in ("torch", "vllm", "uvloop", "asyncio", "rich", "typer", "kvpool.daemon.server"):
        assert heavy not in loaded, heavy
    assert not any(name.startswith(("kvpool.transfer", "kvpool.daemon")) for name in loaded)
