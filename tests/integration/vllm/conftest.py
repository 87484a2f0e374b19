"""Real engines and a real daemon. Engines run inside the test process, one at a time.

vLLM keeps process-wide state, so at most one engine lives at any moment: tests that start engines
of their own are in modules apart from those that share one.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

os.environ.update(
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    PYTHONPATH=str(Path(__file__).resolve().parents[2] / "support/vllm_start"),
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
)
os.environ.pop("PYTHONHASHSEED", None)

from kvpool.client import OperatorClient
from kvpool.engine_plugins.vllm.layout.pages import HostPages
from tests.support import waiting
from tests.support.own_daemon import ANSWER_S, Daemon, run_daemon

with warnings.catch_warnings():
    # vLLM and torch warn of their own deprecations as they are imported.
    warnings.simplefilter("ignore")
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.config import KVTransferConfig
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry
    from vllm.platforms.cpu import CpuPlatform

# Of each kind of model it imports vLLM in another process, lest this one initialize CUDA.
registry._run_in_subprocess = lambda inspect: inspect()
# Each engine looks for the same kernels in all modules, half of its start.
CpuPlatform.register_triton_kernel_overrides = staticmethod(
    cache(CpuPlatform.register_triton_kernel_overrides)
)

ROOT = Path(__file__).resolve().parents[3]
BLOCK = 32
SHARDS = 2
"""Parts of a block: the tiny models have two KV heads."""
NEW = 40
LENGTHS = (700, 333, 64)
PATIENCE_S = 180.0
until = partial(waiting.until, seconds=PATIENCE_S)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM warns of its own deprecations; they are not ours to fail on."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            item.add_marker(pytest.mark.timeout(240))


def _tiny_models() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_models", ROOT / "bench/tiny_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = _tiny_models()


def prompts(seed: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    return [TINY.prompt(100 * seed + i, length) for i, length in enumerate(lengths)]


@dataclass
class Node(Daemon):
    """A daemon of a cluster. `process` is the one that keeps the cluster, not its own."""

    pid: int

    def kill(self) -> None:
        """SIGKILL to its control process; who keeps the cluster has yet to end the others."""
        os.kill(self.pid, signal.SIGKILL)
        until(lambda: not runs(self.pid), f"process {self.pid} has ended")

    @property
    def workers(self) -> list[int]:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]

    def spans(self, trace: str) -> list[dict[str, Any]]:
        """Of a trace, what the nodes of a traced cluster have exported."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("spans\n")
        self.process.stdin.flush()
        return [one for one in json.loads(self.process.stdout.readline()) if one["trace"] == trace]

    def settled(self) -> bool:
        """Whether the cluster's directory knows all that the node holds."""
        return bool(self.client.stats().cluster.directory.settled)


def runs(pid: int) -> bool:
    """Whether there is such a process; a zombie does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@contextmanager
def run_cluster(folder: Path, nodes: int, *, traced: bool = False) -> Iterator[list[Node]]:
    """Daemons on nodes a, b, ... with a real etcd and Redis, started by the other environment.

    traced: see `Node.spans`.
    """
    program = Path(__file__).with_name("serve_cluster.py")
    process = subprocess.Popen(
        [
            *(str(ROOT / ".venv/bin/python"), str(program), str(folder), str(nodes)),
            *(["traced"] if traced else []),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process, ExitStack() as stack:
        found = json.loads(process.stdout.readline())
        yield [
            Node(
                each["socket"],
                process,
                stack.enter_context(
                    OperatorClient(each["socket"], connect=True, timeout_s=ANSWER_S)
                ),
                each["pid"],
            )
            for each in found
        ]


@dataclass
class Output:
    tokens: list[int]
    cached: int


@dataclass
class Engine:
    """A vLLM engine in this process, and its two connector halves."""

    llm: Any

    def __post_init__(self) -> None:
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.idle_free = self.pool.get_num_free_blocks()

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    @property
    def worker(self) -> Any:
        """The worker half of the only rank."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._worker

    @property
    def half(self) -> Any:
        """The scheduler half of the connector."""
        return self.connector._scheduler

    @property
    def lookups(self) -> Any:
        """The scheduler half's lookups in the pool."""
        return self.half._lookups

    @property
    def pulls(self) -> Any:
        """What the scheduler half asks of other nodes, or None where it asks nothing."""
        return self.lookups._pulls

    @property
    def namespace(self) -> Any:
        """The namespace that the connector reads and writes."""
        return self.half.entered.namespace

    def generate(
        self, asked: list[list[int]], new: int = NEW, params: dict[str, Any] | None = None
    ) -> list[Output]:
        """params: the requests' `kv_transfer_params`."""
        extra = {"kv_transfer_params": params} if params else None
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=each) for each in asked],
            SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, extra_args=extra),
            use_tqdm=False,
        )
        return [Output(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]

    def drain(self) -> None:
        """Step until every save and load has been reported, counted and given back."""
        while self.connector is not None and self.connector.has_pending_push_work():
            self.llm.llm_engine.step()  # of the core alone, metrics would be lost

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that only the pool can hit."""
        self.drain()
        assert self.llm.reset_prefix_cache()

    def metric(self, name: str) -> float:
        found = [
            metric for metric in self.llm.get_metrics() if metric.name == f"vllm:kvpool_{name}"
        ]
        assert len(found) == 1, name
        return float(found[0].value)

    def assert_nothing_held(self, daemon: Daemon) -> None:
        self.drain()
        assert self.pool.get_num_free_blocks() == self.idle_free
        assert self.half.pins == 0
        # Releases are one-way, over other connections than this question.
        until(lambda: daemon.leases() == 0, "no lease is held")


def engine_options(
    daemon: Daemon | str | None = None, extra: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """How tests run vLLM's engines; with a connector when a daemon (or the path of its socket) is given."""
    if daemon is not None:
        path = daemon if isinstance(daemon, str) else daemon.socket
        options["kv_transfer_config"] = KVTransferConfig(
            kv_connector="KvpoolConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_module_path=options.pop("kv_connector_module_path", None),
            kv_connector_extra_config={
                "socket": path,
                # The defaults are for schedulers and daemons that have a core: a busy machine would make misses of
                # lookups, and fail loads and saves.
                "lookup_timeout_s": 30.0,
                "request_timeout_s": 30.0,
                "lease_s": 60.0,
                # Tiny models compute short prompts sooner than they load them, sometimes.
                "prefill_tokens_per_s": 1e-3,
                **(extra or {}),
            },
        )
    return {
        # Which tokens are computed together depends on hits and on when loads arrive, and the last bits of the KV on
        # that. In bfloat16 these decide between two tokens on some processors, without a pool too.
        "dtype": "float32",
        "block_size": BLOCK,
        "enforce_eager": True,
        "kv_cache_memory_bytes": 128 << 20,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "disable_log_stats": False,
        "seed": 0,
        **options,
    }


@contextmanager
def run_engine(
    model: Path,
    daemon: Daemon | str | None = None,
    extra: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[Engine]:
    """An engine in this process, with `engine_options`."""
    with imports_are_no_garbage():
        try:
            llm = LLM(model=str(model), **engine_options(daemon, extra, **options))
            try:
                engine = Engine(llm)
                if daemon is not None:
                    wait_until_settled(engine)
                yield engine
            finally:
                llm.llm_engine.engine_core.shutdown()
                del llm
        finally:  # the next engine would take over the groups of one that could not start
            cleanup_dist_env_and_memory()


@contextmanager
def imports_are_no_garbage() -> Iterator[None]:
    """Collect what engines left, and leave all else out of the collections until the end.

    vLLM collects eight times in an engine's life, and thaws what was frozen at its end. A million objects
    of modules would be looked at each time, which took longer than all that an engine does in a test.
    """
    gc.collect()
    gc.freeze()
    with patch.object(gc, "freeze"), patch.object(gc, "unfreeze"):
        yield


@contextmanager
def zeroed_store(
    engine: Engine, piece: Callable[[int], slice] = lambda _: slice(None)
) -> Iterator[None]:
    """Every slot that the engine's lookups find is overwritten with zeros before it is loaded.

    piece: which bytes of a slot of so many; default: all.
    """

    def zero(_keys: bytes, lease: Any) -> None:
        if lease is not None:
            for slots in lease.slots.values():
                slots.table[slots.rows, piece(slots.nbytes)] = 0

    with lookups_seen(engine, zero):
        yield


@contextmanager
def lookups_seen(
    engine: Engine, see: Callable[[bytes, Any], None], **instead: Any
) -> Iterator[None]:
    """Call `see` with the keys and the lease, or None, of each lookup, which is made with the options `instead`."""
    client = engine.half._shared.client
    acquire = client.acquire

    def acquire_and_see(ns: Any, keys: bytes, **options: Any) -> Any:
        lease = acquire(ns, keys, **{**options, **instead})
        see(keys, lease)
        return lease

    client.acquire = acquire_and_see
    try:
        yield
    finally:
        client.acquire = acquire


@contextmanager
def loads_through(
    engine: Engine, between: Callable[..., None], *, joined: bool = True
) -> Iterator[None]:
    """Call `between` in the place of each load's copies, with what makes them and its arguments.

    joined: with each group's copies, of which the lease has been joined, else with those of a whole load, before.
    """
    half, name = engine.worker, "_copy_group" if joined else "_copy_in"
    copy = getattr(half, name)
    setattr(half, name, partial(between, copy))
    try:
        yield
    finally:
        delattr(half, name)


def copies_through(
    monkeypatch: pytest.MonkeyPatch, name: str, between: Callable[..., None]
) -> None:
    """Call `between` in the place of copies of the engine's blocks, with what makes them and its arguments.

    name: of the copy, `to_slots` or `from_slots` of `HostPages`.
    """
    copy = getattr(HostPages, name)
    monkeypatch.setattr(HostPages, name, lambda *arguments: between(copy, *arguments))


def layers_of(pages: Any) -> list[Any]:
    """The layers that pages copy from and to: a row of each layer's is a block."""
    return list(pages._layers)


def fail_loads(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    meanwhile: Callable[[Any], None] = lambda job: None,
) -> list[tuple[Any, ...]]:
    """Make every load fail, with anything in its blocks, after `meanwhile`; gives the list that the tries go into."""
    tries: list[tuple[Any, ...]] = []

    def fail(job: Any, pages: Any, *rest: Any) -> None:
        tries.append((job, pages, *rest))
        for group, mine in zip(job.groups, pages, strict=True):
            for part in mine.parts:
                for layer in layers_of(part.pages):
                    layer[part.rows(np.asarray(group.block_ids, np.int64))] = 0
        meanwhile(job)
        raise error

    monkeypatch.setattr(engine.worker, "_copy_in", fail)
    return tries


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: TINY.make(kind, folder / kind)


@pytest.fixture(scope="session")
def llama(models: Callable[[str], Path]) -> Path:
    return models("llama")


@pytest.fixture(scope="session")
def gemma(models: Callable[[str], Path]) -> Path:
    return models("gemma")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with run_daemon(tmp_path_factory.mktemp("d")) as running:
        yield running


@pytest.fixture
def asked() -> list[list[int]]:
    return prompts(1)


@pytest.fixture(scope="session")
def oracle(models: Callable[[str], Path]) -> Callable[..., list[list[int]]]:
    """Tokens of an engine without a connector. Call it while no other engine lives."""
    known: dict[Any, list[list[int]]] = {}

    def ask(kind: str, given: list[list[int]], new: int = NEW, **options: Any) -> list[list[int]]:
        key = (kind, repr(given), new, repr(options))
        if key not in known:
            with run_engine(models(kind), **options) as engine:
                known[key] = [output.tokens for output in engine.generate(given, new)]
        return known[key]

    return ask


def wait_until_settled(engine: Engine) -> None:
    """Until the engine has heard whether its node is alone, or that its daemon does not answer.

    Else requests wait to hear whether others have their blocks, are computed in other company than the
    oracle's, and the last bits differ.
    """
    pulls = engine.pulls
    if pulls is not None and pulls._namespace is not None:
        until(pulls._namespace.done, "the engine knows whether its node is alone")


def hit(length: int) -> int:
    """Tokens that the pool gives of a prompt which it holds whole: all but one are no use."""
    return (length - 1) // BLOCK * BLOCK


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """This module: tests are collected by path and cannot import it."""
    return sys.modules[__name__]
