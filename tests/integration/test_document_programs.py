"""What the documents show in Python is done, each block by itself."""

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.types import NamespaceRecord
from tests.documents import DOCUMENTS, blocks
from tests.support.waiting import PATIENCE_S

KEYS = [i.to_bytes(16, "big") for i in range(1, 5)]
NEW_KEYS = [i.to_bytes(16, "big") for i in range(11, 15)]
LAYERS, WIDTH = 4, 1024

PROGRAMS = [
    pytest.param(block, id=block.where)
    for document in DOCUMENTS
    for block in blocks(document)
    if block.language == "python"
]


@pytest.fixture(scope="module")
def daemon(start_one: Any) -> Iterator[Any]:
    with start_one("--memory", "32MiB") as one:
        yield one


@pytest.fixture
def given(daemon: Any) -> Iterator[dict[str, Any]]:
    """What fragments say that they are given. The prompt of `keys` is in the pool, but for one that is to write it."""
    record = NamespaceRecord.simple("documents", block_bytes=LAYERS * WIDTH, block_tokens=16)
    with daemon.client(connect=True) as client:
        space = client.open(record)
        client.put(space, KEYS, [bytes(LAYERS * WIDTH)] * len(KEYS))
        yield {
            "client": client,
            "record": record,
            "keys": KEYS,
            "ns": space,
            "prefill": client,
            "space": space,
            "layers": [np.full((len(KEYS), WIDTH), number, np.uint8) for number in range(LAYERS)],
            "width": WIDTH,
        }


def run_block(block: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Run a block; the names that there are afterwards. Clients that it leaves open are closed."""
    names = {name: given[name] for name in block.said("given").split(", ") if name}
    if "prefill" in names:
        names["keys"] = NEW_KEYS
    code = compile("\n" * (block.line - 1) + block.text, str(block.document), "exec")
    loaded = set(sys.modules)
    try:
        exec(code, names)
    finally:
        for module in sys.modules.keys() - loaded:
            if module.partition(".")[0] == "mooncake":  # put in place of what others may import
                del sys.modules[module]
        for value in names.values():
            if isinstance(value, Client) and value is not given["client"]:
                value.close()
    return names


@pytest.mark.parametrize("block", PROGRAMS)
def test_python_in_documents_runs(
    block: Any, daemon: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOOL_SOCKET", daemon.socket)
    # They leave out how long a request may take, and a busy machine needs more than is usual.
    monkeypatch.setitem(Client.__init__.__kwdefaults__, "timeout_s", PATIENCE_S)
    before = daemon.stats().counters
    names = run_block(block, given)
    after = daemon.stats().counters
    # What it says happens to its names.
    if "hit" in names:
        assert names["hit"] == len(names["keys"]) and names["out"] == names["blocks"]
    if "n" in names:
        assert names["n"] == len(names["keys"])
    if "prefill" in names:
        block_bytes = b"".join(bytes([number]) * WIDTH for number in range(LAYERS))
        assert given["client"].get(given["space"], NEW_KEYS) == [block_bytes] * len(NEW_KEYS)
    assert after != before, "the daemon noticed nothing of it"
