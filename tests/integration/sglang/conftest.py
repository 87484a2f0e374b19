"""Real SGLang: its engines in processes of their own, its HiCache controller and host pools in this one.

`tests/support/sglang_cpu` makes both run without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvpool.client import OperatorClient
from kvpool.telemetry.memory_stats import Counters
from tests.support import waiting
from tests.support.own_daemon import Daemon, run_daemon

ROOT = Path(__file__).resolve().parents[3]
CPU = ROOT / "tests/support/sglang_cpu"
PATIENCE_S = 120.0
until = partial(waiting.until, seconds=PATIENCE_S)
PAGE = 16
NEW = 12

os.environ.update(
    HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", PYTHONPATH=f"{CPU}{os.pathsep}{ROOT}", TQDM_DISABLE="1"
)
os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each engine would compile what we have changed


def _module(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# As Python does at its start in the engines' processes.
_module("kvpool_sglang_absent", CPU / "sitecustomize.py")

with warnings.catch_warnings():
    # SGLang and torch warn of their own deprecations, and of devices that are not here.
    warnings.simplefilter("ignore")
    _module("sglang_cpu", CPU / "sglang_cpu.py").register()
    RIG = _module("kvpool_sglang_rig", Path(__file__).with_name("rig.py"))

TINY = _module("tiny_models", ROOT / "bench/tiny_models.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SGLang warns of its own deprecations; they are not ours to fail on."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@dataclass
class Node:
    """A daemon of a cluster. What keeps the cluster starts no other in its place."""

    socket: str
    pid: int
    client: OperatorClient

    def counters(self) -> Counters:
        return self.client.stats().counters

    def settled(self) -> bool:
        """Whether the cluster's directory knows all that the node holds."""
        return bool(self.client.stats().cluster.directory.settled)


@contextmanager
def run_cluster(folder: Path, nodes: int) -> Iterator[list[Node]]:
    """Daemons with a real etcd and Redis, started by the environment that has what these need."""
    program = ROOT / "tests/integration/vllm/serve_cluster.py"
    process = subprocess.Popen(
        [str(ROOT / ".venv/bin/python"), str(program), str(folder), str(nodes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    with process, ExitStack() as stack:
        found = json.loads(process.stdout.readline())
        yield [
            Node(
                each["socket"],
                each["pid"],
                stack.enter_context(
                    OperatorClient(each["socket"], connect=True, timeout_s=PATIENCE_S)
                ),
            )
            for each in found
        ]


@dataclass
class Answer:
    """tokens: generated. cached: of the prompt, from any cache. storage: of these, from the pool."""

    tokens: list[int]
    cached: int
    storage: int


@dataclass
class Engine:
    """An SGLang engine in processes of its own. `folder` steers its backend (`steered_hicache.py`)."""

    process: subprocess.Popen[str]
    folder: Path
    log: Path

    def ready(self) -> None:
        """Wait until it can be asked."""
        assert self.receive() == {"runs": True}

    def ask(self, **request: Any) -> Any:
        self.send(**request)
        return self.receive()

    def send(self, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()

    def receive(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the engine has ended:\n{self.log.read_text()[-3000:]}"
        return json.loads(line)

    def generate(self, prompt: list[int], new: int = NEW, **more: Any) -> Answer:
        return Answer(**self.ask(prompt=prompt, new=new, more=more))

    def flush(self) -> None:
        """Forget its own caches, so that only the pool can hit."""
        self.ask(flush=True)


def backend_config(socket: str, **more: Any) -> dict[str, Any]:
    """`hicache_storage_backend_extra_config` as an operator writes it."""
    return {
        "backend_name": "kvpool",
        "module_path": "kvpool.engine_plugins.sglang",
        "class_name": "KvpoolHiCache",
        "interface_v1": 1,
        "prefetch_threshold": PAGE,
        "socket": socket,
        # A busy machine is no reason for a miss.
        "timeout_s": 60.0,
        **more,
    }


@contextmanager
def run_engine(
    model: Path,
    folder: Path,
    config: dict[str, Any] | None,
    environ: dict[str, str] | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine, that is starting; with HiCache and this backend when a config is given.

    environ: of its processes.
    """
    arguments: dict[str, Any] = {
        "model_path": str(model),
        "device": "cpu",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "disable_cuda_graph": True,
        "sleep_on_idle": True,  # else each takes a core for as long as it lives
        "max_total_tokens": 4096,
        "max_running_requests": 4,
        "page_size": PAGE,
        "random_seed": 0,
        "log_level": "info",
    }
    if config is not None:
        arguments |= {
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
            "hicache_write_policy": "write_through",
            "hicache_storage_prefetch_policy": "wait_complete",
            "hicache_storage_backend": "dynamic",
            "hicache_storage_backend_extra_config": json.dumps(config),
        }
    folder.mkdir(exist_ok=True)
    log = folder / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [
                *(sys.executable, str(Path(__file__).with_name("engine_process.py"))),
                json.dumps(arguments | options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "KVPOOL_TEST_STEERING": str(folder), **(environ or {})},
        ) as process,
    ):
        engine = Engine(process, folder, log)
        try:
            yield engine
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: TINY.make(kind, folder / kind)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with run_daemon(tmp_path_factory.mktemp("d")) as running:
        yield running


def hit(length: int) -> int:
    """Tokens that the pool gives of a prompt which it holds whole: the last one is always computed."""
    return (length - 1) // PAGE * PAGE


@pytest.fixture(scope="session")
def rig() -> ModuleType:
    """`rig.py`."""
    RIG.publish_arguments()
    return RIG


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """This module: tests are collected by path and cannot import it."""
    return sys.modules[__name__]
