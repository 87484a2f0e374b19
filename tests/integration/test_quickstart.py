"""What the documents show is done: their Python, and `docs/quickstart.md` as far as it goes without vLLM.

The commands are taken from the document. They are changed only by the tables `swaps` below: hosts become loopback, and
ports some that are free. `pip install` is left out, since all of it is installed; `ssh` and `scp` reach folders.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvpool.client import Client
from kvpool.types import NamespaceRecord
from tests.support.servers.etcd import free_port
from tests.support.servers.find import find_server
from tests.support.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


DOCS: Any = _load("documents")
TERMINALS: Any = _load("terminals")
KEYS = [i.to_bytes(16, "big") for i in range(1, 5)]
NEW_KEYS = [i.to_bytes(16, "big") for i in range(11, 15)]
LAYERS, WIDTH = 4, 1024
QUICKSTART = ROOT / "docs" / "quickstart.md"

PROGRAMS = [
    pytest.param(block, id=block.where)
    for document in DOCS.DOCUMENTS
    for block in DOCS.blocks(document)
    if block.language == "python"
]


# ---- Python --------------------------------------------------------------------------------------


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


# ---- one node ------------------------------------------------------------------------------------


def typed(blocks: list[Any], *, left_out: tuple[str, ...] = ("pip install",)) -> list[Any]:
    """The commands of console blocks, each with its block, in order."""
    found = [
        (block, command.text)
        for block in blocks
        if block.language == "console"
        for command in DOCS.commands(block)
        if not command.text.startswith(left_out)
    ]
    assert found
    return found


def test_one_node(folder: Path) -> None:
    programs = TERMINALS.make_programs(folder / "bin", {})
    host = TERMINALS.Host(folder / "host", programs, {}, {"KVPOOL_MEMORY": "32MiB"})
    shutil.copy(ROOT / "README.md", host.folder)
    blocks = DOCS.section(QUICKSTART, "One node, with vLLM")
    with TERMINALS.closing(host):
        for _, command in typed(
            blocks, left_out=("pip install", "vllm ", "python -m sglang", "curl ")
        ):
            if command == "kvpool serve":
                host.start(command).wait_said(" ready: ", PATIENCE_S)
                continue
            said = host.run(command)
        # The last one is `kvpool status`.
        assert "put " in said and "segment " in said and "32 MiB" in said
        request = json.loads((host.folder / "request.json").read_text())
        assert request["prompt"] == (ROOT / "README.md").read_text()[:6000]


# ---- two nodes -----------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_two_nodes(folder: Path, until: Any) -> None:
    etcd, redis, peers = free_port(), free_port(), free_port()
    swaps = {
        "http://10.0.0.5:2379": f"http://127.0.0.1:{etcd}",
        "etcd://10.0.0.5:2379": f"etcd://127.0.0.1:{etcd}",
        "redis://10.0.0.5:6379": f"redis://127.0.0.1:{redis}",
        "--bind 10.0.0.5 --port 6379": f"--bind 127.0.0.1 --port {redis}",
        "tcp://10.0.0.5:7070": f"tcp://127.0.0.1:{free_port()}",
        "tcp://10.0.0.6:7070": f"tcp://127.0.0.1:{free_port()}",
        # Its port for other members has a default, which another test may have taken.
        "etcd --data-dir": (
            f"etcd --listen-peer-urls http://127.0.0.1:{peers} --initial-cluster default=http://127.0.0.1:{peers} "
            f"--initial-advertise-peer-urls http://127.0.0.1:{peers} --data-dir"
        ),
    }
    servers = {name: find_server(name) for name in ("etcd", "redis-server")}
    programs = TERMINALS.make_programs(
        folder / "bin", {**servers, "ssh": TERMINALS.SSH, "scp": TERMINALS.SCP}
    )
    hosts = {
        name: TERMINALS.Host(folder / name, programs, swaps, {"KVPOOL_MEMORY": "32MiB"})
        for name in ("host-a", "host-b")
    }
    ports = {"etcd": etcd, "redis-server": redis}
    polled = []
    with TERMINALS.closing(*hosts.values()):
        for block in DOCS.section(QUICKSTART, "Two nodes"):
            host = hosts.get(block.said("on"))
            if block.language == "python":
                (host.folder / "block.py").write_text(block.text)
                host.run("python3 block.py")
                continue
            for text in (command.text for command in DOCS.commands(block)):
                program = text.split()[0]
                if program == "pip":
                    continue
                if program in ports:
                    host.start(text).wait_until(TERMINALS.listens(ports[program]), PATIENCE_S)
                elif text.startswith("kvpool serve"):
                    host.start(text).wait_said(" ready: ", PATIENCE_S)
                elif text.startswith(tuple(SHOWN)):
                    # Others hear of a node, and the directory of a block, a moment later.
                    until(partial(shows, host, text), what=f"{text} shows what it should")
                    polled.append(text)
                else:
                    host.run(text)
        assert len(polled) == len(SHOWN)
        assert not (hosts["host-b"].folder / "certs" / "ca.key").exists()
        # As the text says, what is known there can be loaded there.
        with Client(hosts["host-b"].socket, connect=True) as client:
            record = NamespaceRecord.simple("quickstart", block_bytes=65536, block_tokens=16)
            keys = [(7).to_bytes(16, "big")]
            assert client.pull(client.open(record), keys, wait_s=10.0) == 1
    assert set(swaps) == hosts["host-a"].swapped | hosts["host-b"].swapped


SHOWN = {"kvpool nodes": (" host-a ", " host-b "), "kvpool locate": (" host-a ",)}


def shows(host: Any, command: str) -> bool:
    """Whether a command of `SHOWN` shows it. `kvpool locate` fails while it does not."""
    try:
        said = host.run(command)
    except AssertionError:
        return False
    wanted = next(words for begin, words in SHOWN.items() if command.startswith(begin))
    return all(word in said for word in wanted)
