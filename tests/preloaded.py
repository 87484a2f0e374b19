"""kvpool's programs, started from an interpreter that has imported already what they need.

The tests start some thousand of them, and an interpreter with numpy, typer and the rest takes longer to start than
most of what it is started for. So `subprocess` is changed here for such commands alone: `python -m kvpool.cli ...`
becomes a fork of an interpreter that waits, one for each worker of the tests. It is a process of its own all the
same, and a child of who asked: with its own arguments, environment, folder, stdin, stdout and stderr, signals, and
end. What differs is its command line in /proc, and that it shares memory with the others until it writes to it.

Commands with other flags, or that are started in any unusual way (in a session of their own, with descriptors to
inherit, from a function that runs before), are started as ever; so are all children of the programs themselves.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

MODULES = {"kvpool.cli", "tests.support.patient_router", "tests.support.stub_engine"}
FLAGS = {"-Walways::ResourceWarning"}
# What they import, in part only when they run. Of the command line not the verbs, which register themselves.
IMPORTED = (
    *("typer.main", "rich.console", "rich.table", "rich.progress", "rich.markup", "uvloop"),
    *("csv", "importlib.metadata", "importlib.resources", "zipfile"),
    *(
        "kvpool.cli.base",
        "kvpool.cli.settings_command",
        "kvpool.client",
        "kvpool.daemon.server.server",
        "kvpool.daemon.workers.gateway",
    ),
    *(
        "kvpool.cli.render.jobs",
        "kvpool.cli.render.node",
        "kvpool.cli.render.cluster",
        "kvpool.cli.render.top",
    ),
)
# These are looked for: not every environment of the tests has them.
IMPORTED_IF_THERE = (
    "pydantic",
    "typer._adapters",
    "kvpool.router.command",
    "tests.support.stub_engine",
)
# What an interpreter reads only once, when it begins.
EARLY = ("PYTHON", "LD_", "LC_", "LANG", "MALLOC_", "OMP_", "OPENBLAS_", "TZ")
REQUEST_BYTES_MAX = 200_000
START_S = 60.0
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def install() -> None:
    """Start them so from now on. Where the kernel or `subprocess` is another one, nothing changes."""
    usual = subprocess.Popen._execute_child  # type: ignore[attr-defined]
    signature = inspect.signature(usual)

    @functools.wraps(usual)
    def execute_child(*given: Any, **more: Any) -> None:
        call = signature.bind(*given, **more).arguments
        if _can_be_forked(call):
            _fork(call)
        else:
            usual(*given, **more)

    if sys.platform == "linux" and _PLAIN.keys() <= signature.parameters.keys():
        subprocess.Popen._execute_child = execute_child  # type: ignore[attr-defined]


# The arguments of `_execute_child` that have to be as they usually are.
_PLAIN: dict[str, Any] = {
    "executable": None,
    "preexec_fn": None,
    "close_fds": True,
    "pass_fds": (),
    "shell": False,
    "restore_signals": True,
    "gid": None,
    "gids": None,
    "uid": None,
    "umask": -1,
    "start_new_session": False,
    "process_group": -1,
}
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def _can_be_forked(call: Mapping[str, Any]) -> bool:
    if isinstance(call["args"], (str, bytes, os.PathLike)):
        return False
    command = list(map(os.fspath, call["args"]))
    if not command or command[0] != sys.executable:
        return False
    flags, module, _ = _parts(command)
    if module not in MODULES or not set(flags) <= FLAGS:
        return False
    environ = os.environ if call["env"] is None else call["env"]
    return _early(environ) == _early(os.environ) and all(
        call[name] == usual for name, usual in _PLAIN.items()
    )


def _parts(command: Sequence[str]) -> tuple[tuple[str, ...], str, list[str]]:
    """The interpreter's flags, the module, and its arguments."""
    if "-m" not in command[:-1]:
        return (), "", []
    at = command.index("-m")
    return tuple(command[1:at]), command[at + 1], list(command[at + 2 :])


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(EARLY)}


def _fork(call: Mapping[str, Any]) -> None:
    """What `_execute_child` does: a child, whose ends of the pipes are closed here."""
    popen = call["self"]
    flags, module, arguments = _parts(list(map(os.fspath, call["args"])))
    environ = dict(os.environ if call["env"] is None else call["env"])
    folder = os.fspath(call["cwd"]) if call["cwd"] is not None else os.getcwd()
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    request = json.dumps([module, arguments, environ, folder, ignored]).encode()
    own = (call["p2cread"], call["c2pwrite"], call["errwrite"])
    standard = [number if end == -1 else end for number, end in enumerate(own)]  # or this process's
    popen.pid = _waiting(flags).fork(request, standard)
    popen._child_created = True
    popen._close_pipe_fds(*(call[name] for name in _PIPES))


class _Waiting:
    """The interpreter that is forked. Thread-safe. It ends when its socket is closed, at the latest with this process."""

    def __init__(self, flags: Sequence[str]) -> None:
        self._lock = threading.Lock()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, *flags, __file__, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        self._sock.settimeout(START_S)
        assert self._sock.recv(16) == b"ready", "it says on stderr why it did not start"
        atexit.register(self._end)

    def _end(self) -> None:
        self._sock.close()
        self._process.wait()

    def fork(self, request: bytes, standard: Sequence[int]) -> int:
        """The child's pid. It is a child of this process: its parent ends, and this one takes orphans just then."""
        with self._lock:
            _take_orphans(True)
            try:
                fds = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", standard))]
                self._sock.sendmsg([request], fds)
                answer = self._sock.recv(16)
                assert answer, "it has ended, and says on stderr why"
                return int(answer)
            finally:
                _take_orphans(False)


@functools.cache
def _waiting(flags: Sequence[str]) -> _Waiting:
    return _Waiting(flags)


def _take_orphans(wanted: bool) -> None:
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def _wait(sock: socket.socket) -> tuple[str, list[str]]:
    """Fork for each request. Returns in the children alone: the module to run and its arguments."""
    sock.send(b"ready")
    while True:
        request, fds, _, _ = socket.recv_fds(sock, REQUEST_BYTES_MAX, 3)
        if not request:
            os._exit(0)
        told, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            child = os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            break
        os.waitpid(middle, 0)  # now the child has its new parent
        sock.send(os.read(told, 16))
        for fd in (*fds, told, tell):
            os.close(fd)
    sock.close()
    os.close(told)
    os.close(tell)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    for fd in fds:
        os.close(fd)
    module, arguments, environ, folder, ignored = json.loads(request)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    _open_standard()
    return module, arguments


def _open_standard() -> None:
    """As the interpreter does when it begins."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        old = getattr(sys, name)
        line = name == "stderr" or os.isatty(number)
        new = open(  # noqa: SIM115  (for as long as the process lives)
            number,
            mode,
            buffering=1 if line and mode == "w" else -1,
            encoding=old.encoding,
            errors=old.errors,
            closefd=False,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it ends it
    for name in IMPORTED:
        import_module(name)
    for name in IMPORTED_IF_THERE:
        try:
            import_module(name)
        except ImportError:
            pass
    if pydantic := sys.modules.get("pydantic"):
        pydantic.TypeAdapter(int)  # the first one looks through all packages for plugins
    gc.collect()
    gc.freeze()
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    module, arguments = _wait(sock)
    sys.argv = [module, *arguments]
    sys.path[0] = ""
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
