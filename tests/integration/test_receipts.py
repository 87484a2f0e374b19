"""What tenants are told that they used, against what the daemon's counters say, over a restart and a kill."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from kvpool.cli import verbs
from kvpool.types import NamespaceRecord

NBYTES, TOKENS = 4096, 16
RECORD = NamespaceRecord.simple("model", block_bytes=NBYTES, block_tokens=TOKENS)
CONFIG = """
[tenants.default]
memory = "2MiB"
[tenants.red]
memory = "2MiB"
token = "the red tenant's own secret"
"""


def use(daemon: Any, tenant: str, first: int, request: str = "") -> Any:
    """Puts and reads by one tenant, some of which evict others; what the daemon has counted of it since it started."""
    token = "the red tenant's own secret" if tenant == "red" else None
    with daemon.client(tenant=tenant, token=token) as client:
        ns = client.open(RECORD)
        for at in range(first, first + 10):
            keys = [(at * 100 + number).to_bytes(16, "big") for number in range(100)]
            client.put(ns, keys, bytes(100 * NBYTES), request=request)
            assert all(client.get(ns, keys[:60], request=request))
        return client.stats().tenants[tenant].traffic


def receipts(daemon: Any, *args: str) -> str:
    result = CliRunner().invoke(verbs.app, ["receipts", "--socket", str(daemon.socket), *args])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_export_is_what_the_daemons_counted_over_restarts(start: Any, tmp_path: Path) -> None:
    def begin() -> Any:
        return start("--data-dir", str(tmp_path / "data"), config=CONFIG)

    daemon = begin()
    lives = [{name: use(daemon, name, 0) for name in ("default", "red")}]
    assert daemon.stop() == 0
    daemon = begin()
    lives.append({"red": use(daemon, "red", 50)})
    with daemon.client() as client:
        killed = client.stats().incarnation
    daemon.kill()
    daemon = begin()
    lives.append({"default": use(daemon, "default", 90, "chatcmpl-q-1")})

    lines = [
        json.loads(line) for line in receipts(daemon, "--periods", "--format", "jsonl").splitlines()
    ]
    assert [each for each in lines if each["open"]], "what goes on is there too"
    incarnations = list(dict.fromkeys(each["incarnation"] for each in lines))
    if killed not in incarnations:  # no minute has ended in that life
        incarnations.insert(1, killed)
    assert incarnations[1] == killed
    assert len(incarnations) == 3
    table = list(csv.DictReader(io.StringIO(receipts(daemon, "--periods", "--format", "csv"))))
    for incarnation, life in zip(incarnations, lives, strict=True):
        for tenant, counted in life.items():
            mine = {"incarnation": incarnation, "tenant": tenant}
            rows = [row for row in table if mine.items() <= row.items()]
            wanted = {
                "reads_dram_nbytes": counted.read_bytes,
                "reads_dram_tokens": counted.read_bytes // NBYTES * TOKENS,
                "written_nbytes": counted.put_bytes,
                "written_tokens": counted.put_bytes // NBYTES * TOKENS,
            }
            found = {name: sum(int(row[name]) for row in rows) for name in wanted}
            if incarnation == killed:  # without what was open then
                assert all(found[name] <= most for name, most in wanted.items())
                continue
            assert found == wanted
            assert sum(float(row["kept_byte_s_dram"]) for row in rows) > 0
            own = [each for each in lines if mine.items() <= each.items()]
            assert sum(each["written"]["nbytes"] for each in own) == counted.put_bytes
    totals = list(csv.DictReader(io.StringIO(receipts(daemon, "--format", "csv"))))
    for tenant in ("default", "red"):
        told = sum(int(row["written_nbytes"]) for row in totals if row["tenant"] == tenant)
        assert told == sum(int(r["written_nbytes"]) for r in table if r["tenant"] == tenant)
    (receipt,) = json.loads(receipts(daemon, "--request", "q-1", "--format", "json"))["items"]
    life = lives[-1]["default"]
    assert receipt["reads"]["dram"]["nbytes"] == life.read_bytes
    assert receipt["written"]["nbytes"] == life.put_bytes
    only_red = csv.DictReader(io.StringIO(receipts(daemon, "--tenant", "red", "--format", "csv")))
    assert {row["tenant"] for row in only_red} == {"red"}
    assert "read tokens" in receipts(daemon)
    assert "1,000" not in receipts(daemon, "--since", "2100-01-01T00:00:00Z")
