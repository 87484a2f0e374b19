"""TransferQueue's own storage on Mooncake, unchanged, over a daemon: what one process puts another reads."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import clean_environ
from tests.support.waiting import PATIENCE_S

pytestmark = [pytest.mark.transferqueue, pytest.mark.slow]
if importlib.util.find_spec("transfer_queue") is None:
    pytest.skip("needs TransferQueue (make sglang-venv)", allow_module_level=True)

PROGRAM = Path(__file__).with_name("transferqueue_process.py")
NO_SPACE, INVALID, MISSING, AWAY = -200, -600, -704, -900
TENSORS = ("float32", "bfloat16", "int64", "bool", "scalar", "not contiguous", "of chunks")
OBJECTS = ("text", "number", "bytes", "array", "tree")
KEYS = [f"{kind}/{number}" for kind in TENSORS + OBJECTS for number in range(3)]


class Process:
    """See `transferqueue_process.py`."""

    def __init__(self, socket: str, folder: Path) -> None:
        self.log = folder / "log"
        # Without the first, Ray would start a cluster for a question of TransferQueue's; the others are what tests of
        # SGLang in the same process may have set.
        environ = clean_environ(
            folder, KVPOOL_SOCKET=socket, RAY_ENABLE_AUTO_CONNECT="0", PYTHONPATH=""
        )
        with self.log.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM)],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
            )

    def ask(self, do: str, **request: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, **request}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the process has ended:\n{self.log.read_text()[-4000:]}"
        return json.loads(line)

    def done(self, do: str, **request: Any) -> Any:
        """The answer, which is no error."""
        answer = self.ask(do, **request)
        assert "error" not in answer, answer["error"]
        return answer

    def refused(self, code: int, do: str, **request: Any) -> str:
        """What TransferQueue says when the store has given this code for all that failed."""
        error = str(self.ask(do, **request)["error"])
        assert f"error codes [{code}" in error, error
        return error


Run = Callable[[str], AbstractContextManager[Process]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Processes over the daemon of a socket."""

    @contextmanager
    def begin(socket: str) -> Iterator[Process]:
        process = Process(socket, tmp_path_factory.mktemp("transferqueue"))
        with process.process as running:
            yield process
            assert running.stdin is not None
            running.stdin.close()
            assert running.wait(PATIENCE_S) == 0, process.log.read_text()[-4000:]

    return begin


@pytest.fixture(scope="module")
def writer(pool: Any, run: Run) -> Iterator[Process]:
    with run(pool.socket) as process:
        yield process


@pytest.fixture(scope="module")
def reader(pool: Any, run: Run) -> Iterator[Process]:
    with run(pool.socket) as process:
        yield process


@pytest.fixture(scope="module")
def pool(start_one: Any) -> Iterator[Any]:
    with start_one("--memory", "256MiB") as daemon:
        yield daemon


def test_what_one_process_puts_another_reads(writer: Process, reader: Process) -> None:
    for seed in (1, 2, 3):  # versions, each in the place of the one before
        meta = writer.done("put", keys=KEYS, seed=seed)["meta"]
        assert reader.done("get", keys=KEYS, seed=seed, meta=meta)["same"] == [True] * len(KEYS)
    older = reader.done("get", keys=KEYS[:3], seed=2, meta=meta[:3])
    assert older["same"] == [False] * 3, "the comparison tells versions apart"


def test_batches_that_several_threads_put_and_get(writer: Process, reader: Process) -> None:
    keys = [f"float32/many/{n}" for n in range(900)] + [f"text/many/{n}" for n in range(450)]
    meta = writer.done("put", keys=keys, seed=1)["meta"]
    for process in (reader, writer):
        assert all(process.done("get", keys=keys, seed=1, meta=meta)["same"])


def test_what_is_cleared_is_missing_and_all_else_stays(writer: Process, reader: Process) -> None:
    kept, gone = ([f"{kind}/{which}" for kind in TENSORS + OBJECTS] for which in ("kept", "gone"))
    kept_meta, gone_meta = (writer.done("put", keys=keys, seed=1)["meta"] for keys in (kept, gone))
    reader.done("clear", keys=[*gone, "text/never put"])
    assert all(writer.done("get", keys=kept, seed=1, meta=kept_meta)["same"])
    for process, first, end in ((writer, 0, len(TENSORS)), (reader, len(TENSORS), len(gone))):
        asked = gone[first:end]
        said = process.refused(MISSING, "get", keys=asked, seed=1, meta=gone_meta[first:end])
        assert all(key in said for key in asked)
    meta = writer.done("put", keys=gone, seed=2)["meta"]
    assert all(reader.done("get", keys=gone, seed=2, meta=meta)["same"])


def test_what_is_wrong_or_missing_fails_alone(writer: Process, reader: Process) -> None:
    key = "float32/beside wrong ones"
    said = writer.refused(INVALID, "put", keys=["empty/0", key], seed=1)  # so does the wheel
    assert "empty/0" in said and key not in said
    assert key in reader.refused(INVALID, "get_as", keys=[key], shape=[3, 4])
    said = reader.refused(MISSING, "get_as", keys=[key, "float32/never put"], shape=[3, 5])
    assert "float32/never put" in said and key not in said
    assert reader.done("get", keys=[key], seed=1, meta=[None])["same"] == [True]


def test_a_queue_whose_rows_are_in_the_pool(writer: Process, reader: Process) -> None:
    queue = writer.done("serve")["queue"]
    for process in (writer, reader):
        process.done("join", queue=queue)
    writer.done("queue_put", seed=1)
    same = reader.done("queue_get", seed=1)["same"]
    assert same == {"logits": True, "response": True, "reward": True, "prompt": True}
    one = {"keys": ["0@logits"], "shape": [4, 50]}  # the first row's place in the storage
    reader.done("get_as", **one)
    writer.done("queue_clear")
    reader.refused(MISSING, "get_as", **one)


def test_a_full_pool_refuses_what_it_could_not_keep(start: Any, run: Run) -> None:
    """TransferQueue has each object pinned: there is no other copy of it."""
    daemon = start()
    with run(daemon.socket) as process:
        stored: list[str] = []
        for key in [f"mebibyte/{number}" for number in range(32)]:
            if "error" in process.ask("put", keys=[key], seed=1):
                break
            stored.append(key)
        process.refused(NO_SPACE, "put", keys=["mebibyte/more"], seed=1)
        assert len(stored) > 2
        got = process.done("get", keys=stored, seed=1, meta=[None] * len(stored))
        assert got["same"] == [True] * len(stored)
        process.done("clear", keys=stored)
        process.done("put", keys=["mebibyte/more"], seed=1)


def test_a_daemon_that_dies_is_an_error_and_the_next_one_is_used(start: Any, run: Run) -> None:
    daemon = start()
    keys = ["float32/0", "text/0"]
    with run(daemon.socket) as process:
        meta = process.done("put", keys=keys, seed=1)["meta"]
        daemon.kill()
        process.refused(AWAY, "put", keys=keys, seed=2)
        process.refused(AWAY, "get", keys=keys, seed=1, meta=meta)
        start()
        process.refused(MISSING, "get", keys=keys, seed=1, meta=meta)
        meta = process.done("put", keys=keys, seed=3)["meta"]
        assert process.done("get", keys=keys, seed=3, meta=meta)["same"] == [True, True]
