"""The description is whole, and the gateway keeps to it: schemathesis asks what the description allows and what it does not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvpool.types import NamespaceRecord
from tests.integration.cluster.conftest import key

EXAMPLES = 12


def test_what_is_described_is_what_there_is(gate):
    document = gate.get("/openapi.json")
    assert document["openapi"] == "3.1.0"
    names = [about["operationId"] for path in document["paths"].values() for about in path.values()]
    assert len(names) == len(set(names)) >= 35
    for path, methods in document["paths"].items():
        for method, about in methods.items():
            assert about["summary"] and about["tags"] and about["responses"]
            named = {each["name"] for each in about["parameters"] if each["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path)), path
            if path not in {"/healthz", "/readyz"}:
                assert "401" in about["responses"], path
            assert ("requestBody" in about) <= (method in {"post", "put", "patch"})
    text = str(document)
    wanted = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert wanted <= set(document["components"]["schemas"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_found_by_schemathesis(gate, two, tmp_path):
    seat = two.seat("a", NamespaceRecord.simple("m", block_bytes=256, block_tokens=16))
    seat.client.put(seat.ns, [key(1)], [bytes(256)])
    program = str(Path(sys.executable).with_name("st"))
    done = subprocess.run(
        [
            *(program, "run", f"http://localhost:{gate.port}/openapi.json"),
            *("--header", f"Authorization: Bearer {gate.token}"),
            *("--seed", "7", "--generation-deterministic", "--max-examples", str(EXAMPLES)),
            # A stream does not end.
            *("--exclude-path", "/v1/events"),
            # The gateway's own node would leave the cluster.
            *("--exclude-path", "/v1/operator/drain"),
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance"),
            *("--phases", "examples,coverage,fuzzing", "--no-color", "--request-timeout", "20"),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
