"""Real etcd members on loopback, in a private folder: started, killed, paused, restarted, stopped.

What tests want to know behind the client's back goes over etcd's own JSON gateway.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import json
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvpool.errors import Unavailable
from tests.support.servers.certificates import Certificates
from tests.support.servers.find import find_server
from tests.support.signals import send
from tests.support.waiting import PATIENCE_S

STARTS_MAX = 5  # with other ports each time: another process may have taken one meanwhile
PORTS = range(20000, 32000)  # below those that the kernel gives to outgoing connections


_given: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has now, and that no outgoing connection will be given.

    No process of this user is given the same one as long as this process lives: tests run beside others.
    """
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many such ports, one after the other."""
    for _ in range(1000):
        first = random.choice(PORTS[: len(PORTS) - count + 1])
        if all(_claimed(port) for port in range(first, first + count)):
            return first
    raise Unavailable(f"no free port between {PORTS.start} and {PORTS.stop}")


def _claimed(port: int) -> bool:
    """Whether it is this process's from now on."""
    if port in _given:
        return False
    with socket.socket() as probe:
        try:
            fcntl.lockf(_claims(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    _given.add(port)
    return True


@functools.cache
def _claims() -> int:
    """A file with a byte for each port, which is locked by the process that was given the port."""
    path = Path(tempfile.gettempdir()) / f"kvpool-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


class Member:
    """One etcd process. Its data and its ports stay the same over restarts."""

    def __init__(self, name: str, folder: Path, scheme: str) -> None:
        self.name = name
        self.folder = folder
        self.scheme = scheme
        self.client_port = free_port()
        self.peer_port = free_port()
        self.command: list[str] = []
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.client_port}"

    @property
    def peer_url(self) -> str:
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self) -> None:
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def pause(self) -> None:
        """SIGSTOP: it holds its connections and answers nothing."""
        assert self.process is not None
        send(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """Ask it to end, paused or not. Idempotent; see `wait`."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()

    def wait(self) -> None:
        """Wait for its end after `terminate`; kill it when that takes too long. Idempotent."""
        if self.process is None:
            return
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def log_tail(self) -> str:
        path = self.folder / f"{self.name}.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""


class Etcd:
    """A cluster of `members`, ready when the `with` block begins, and stopped when it ends.

    tls: serve clients over TLS with these certificates; with `client_auth` only clients that show one
        which the authority has signed. quota_bytes: size at which the database counts as full.
    arguments: more flags for each member.
    One thread. Starting raises `Unavailable` with the end of a member's log when it does not come up.
    """

    def __init__(
        self,
        folder: Path,
        *,
        members: int = 1,
        tls: Certificates | None = None,
        client_auth: bool = False,
        quota_bytes: int | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.tls = tls
        self.members: list[Member] = []
        self._count = members
        self._client_auth = client_auth
        self._quota_bytes = quota_bytes
        self._arguments = arguments
        self._context = None if tls is None else tls.client_context()

    # ---- life -----------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        program = find_server("etcd")
        for attempt in range(STARTS_MAX):
            self._make_members(program, self.folder / f"start-{attempt}")
            try:
                for member in self.members:
                    member.start()
                self.wait_ready()
            except Unavailable as error:
                self.close()
                if attempt == STARTS_MAX - 1 or "address already in use" not in str(error):
                    raise
            except BaseException:
                self.close()
                raise
            else:
                return self
        raise AssertionError("unreachable: the last start returns or raises")

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop all members. Idempotent; the folder is the caller's."""
        for member in self.members:
            member.terminate()
        for member in self.members:
            member.wait()

    def _make_members(self, program: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        scheme = "http" if self.tls is None else "https"
        self.members = [Member(f"m{n}", folder, scheme) for n in range(self._count)]
        cluster = ",".join(f"{m.name}={m.peer_url}" for m in self.members)
        for member in self.members:
            client_url = f"{scheme}://{member.endpoint}"
            flags = {
                "name": member.name,
                "data-dir": str(folder / member.name),
                "listen-client-urls": client_url,
                "advertise-client-urls": client_url,
                "listen-peer-urls": member.peer_url,
                "initial-advertise-peer-urls": member.peer_url,
                "initial-cluster": cluster,
                "initial-cluster-state": "new",
                "logger": "zap",
            }
            if self.tls is not None:
                flags["cert-file"] = str(self.tls.server_cert)
                flags["key-file"] = str(self.tls.server_key)
                if self._client_auth:
                    flags["client-cert-auth"] = "true"
                    flags["trusted-ca-file"] = str(self.tls.ca)
            if self._quota_bytes is not None:
                flags["quota-backend-bytes"] = str(self._quota_bytes)
            member.command = [program, *(f"--{k}={v}" for k, v in flags.items())]
            member.command += self._arguments

    def wait_ready(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until all members that run know a leader. Raises `Unavailable`."""
        deadline = time.monotonic() + timeout_s
        for member in self.members:
            while member.process is not None and not self._leader_as_seen_by(member):
                if not member.alive or time.monotonic() > deadline:
                    raise Unavailable(f"etcd {member.name} did not start: {member.log_tail()}")
                time.sleep(0.05)

    def restart(self, index: int) -> None:
        """Start a killed member again on its data and ports; returns when it knows a leader."""
        self.members[index].start()
        self.wait_ready()

    # ---- what is asked of it --------------------------------------------------------------------------

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(member.endpoint for member in self.members)

    @property
    def url(self) -> str:
        """As `kvpool serve --join` takes it, without a user."""
        return f"{'etcd' if self.tls is None else 'etcds'}://{','.join(self.endpoints)}"

    def leader(self, timeout_s: float = PATIENCE_S) -> int:
        """The index of the member that leads, according to itself."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for index, member in enumerate(self.members):
                if member.alive:
                    status = self._status(member)
                    if status and status.get("leader") == status["header"]["member_id"]:
                        return index
            time.sleep(0.05)
        raise Unavailable(f"no etcd member leads after {timeout_s} s")

    def post(
        self, path: str, body: dict[str, Any], index: int = 0, token: str = ""
    ) -> dict[str, Any]:
        """One request to a member's JSON gateway, `/v3/` + path. Raises `Unavailable` on any refusal."""
        return self._post(self.members[index], path, body, token=token)

    def get(self, key: str) -> bytes | None:
        """What is stored under a key."""
        answer = self.post("kv/range", {"key": _b64(key)})
        kvs = answer.get("kvs", [])
        return base64.b64decode(kvs[0].get("value", "")) if kvs else None

    def keys(self, prefix: str) -> list[str]:
        """All keys that begin with `prefix`, in order."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        answer = self.post(
            "kv/range", {"key": _b64(prefix), "range_end": _b64(end), "keys_only": True}
        )
        return [base64.b64decode(kv["key"]).decode() for kv in answer.get("kvs", [])]

    def put(self, key: str, value: bytes) -> None:
        self.post("kv/put", {"key": _b64(key), "value": base64.b64encode(value).decode()})

    def delete(self, key: str) -> int:
        """Delete one key; how many there were."""
        return int(self.post("kv/deleterange", {"key": _b64(key)}).get("deleted", 0))

    def lease_of(self, key: str) -> int:
        """The lease a key is bound to; 0: none, or no such key."""
        kvs = self.post("kv/range", {"key": _b64(key)}).get("kvs", [])
        return int(kvs[0].get("lease", 0)) if kvs else 0

    def revoke(self, lease: int) -> None:
        self.post("lease/revoke", {"ID": str(lease)})

    def revision(self) -> int:
        return int(self.post("maintenance/status", {})["header"]["revision"])

    def compact(self, revision: int | None = None) -> None:
        """Forget all history before `revision`; by default, all of it."""
        at = self.revision() if revision is None else revision
        self.post("kv/compaction", {"revision": str(at), "physical": True})

    def disarm(self) -> None:
        """Free the space of forgotten history and clear the alarm that the database is full."""
        for index in range(len(self.members)):
            self.post("maintenance/defragment", {}, index)
        for alarm in self.post("maintenance/alarm", {"action": "GET"}).get("alarms", []):
            self.post("maintenance/alarm", {"action": "DEACTIVATE", **alarm})

    def enable_auth(self, user: str, password: str, prefix: str) -> None:
        """Demand passwords from now on; `user` may read and write below `prefix`, `root` all."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        span = {"permType": "READWRITE", "key": _b64(prefix), "range_end": _b64(end)}
        for name in ("root", user):
            self.post("auth/user/add", {"name": name, "password": password})
            self.post("auth/role/add", {"name": name})
            self.post("auth/user/grant", {"user": name, "role": name})
        self.post("auth/role/grant", {"name": user, "perm": span})
        self.post("auth/enable", {})

    def _status(self, member: Member) -> dict[str, Any] | None:
        try:
            return self._post(member, "maintenance/status", {}, 1.0)
        except Unavailable:
            return None

    def _leader_as_seen_by(self, member: Member) -> bool:
        status = self._status(member)
        return status is not None and status.get("leader", "0") != "0"

    def _post(
        self,
        member: Member,
        path: str,
        body: dict[str, Any],
        timeout_s: float = PATIENCE_S,
        token: str = "",
    ) -> dict[str, Any]:
        url = f"{member.scheme}://{member.endpoint}/v3/{path}"
        request = urllib.request.Request(url, json.dumps(body).encode())
        if token:
            request.add_header("Authorization", token)
        handler = urllib.request.HTTPSHandler(context=self._context)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), handler)
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                found: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode(errors="replace")
            raise Unavailable(f"etcd {member.name} refused {path}: {said}") from None
        except (OSError, ValueError) as error:
            raise Unavailable(f"etcd {member.name} did not answer {path}: {error}") from None
        return found


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
