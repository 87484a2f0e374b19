"""A small etcd v3 client on grpc.aio: calls with failover, leases, and the one place that maps errors.

All writes are idempotent, because a call that timed out is retried on the next
endpoint although it may have been done. So lease numbers are chosen here, and transactions compare.

One event loop, asyncio's or uvloop. gRPC's own threads and settings are shared by all clients of a
process; connections are not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

# Before gRPC is loaded: it would report every lost connection on stderr, which is counted and logged
# here, and warn at every fork of a process that never uses it in the child.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

from kvpool.errors import ConfigError, InvalidRequest, KvpoolError, NotAuthenticated, Unavailable
from kvpool.placement.etcd import rpc_pb2 as rpc
from kvpool.placement.etcd.settings import EtcdSettings
from kvpool.placement.outage import Outage

log = logging.getLogger("kvpool.placement")

MESSAGE_BYTES_MAX = 256 << 20  # a page of the largest values that etcd takes (1.5 MiB each)
PAGE_KEYS = 128
PAGE_RESTARTS_MAX = 5
ROUND_PAUSE_S = 0.1  # after all endpoints failed; grows with each round, to
ROUND_PAUSE_S_MAX = 1.0

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", 4 << 20),
    # A server that comes back is found within a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.min_reconnect_backoff_ms", 3000),  # in spite of its name: the connect timeout
    # A dead peer is found in seconds. etcd cuts clients that ping more often than every 5 s.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.enable_retries", 0),  # retries here go to another endpoint
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]

Metadata = tuple[tuple[str, str], ...]
Verdict = Literal["retry", "login", "no_login", "fail"]


class LeaseGone(Unavailable):
    """etcd does not know the lease (any more): keys bound to it are gone."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of etcd's API. `bidi`: a stream with one message each way."""

    path: str
    response: Any
    bidi: bool = False

    @property
    def name(self) -> str:
        """The last element of its path."""
        return self.path.rpartition("/")[2]


RANGE = Method("/etcdserverpb.KV/Range", rpc.RangeResponse)
TXN = Method("/etcdserverpb.KV/Txn", rpc.TxnResponse)
GRANT = Method("/etcdserverpb.Lease/LeaseGrant", rpc.LeaseGrantResponse)
REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", rpc.LeaseRevokeResponse)
KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", rpc.LeaseKeepAliveResponse, bidi=True)
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", rpc.AuthenticateResponse)
WATCH = Method("/etcdserverpb.Watch/Watch", rpc.WatchResponse)


class Snapshot(NamedTuple):
    """Key-values (`rpc.KeyValue`) as of one revision of one etcd cluster."""

    kvs: list[Any]
    revision: int
    cluster_id: int


class Refused(Exception):
    """An error of gRPC's or etcd's. Does not leave this package."""

    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details

    @classmethod
    def of(cls, error: grpc.aio.AioRpcError) -> Refused:
        return cls(error.code(), error.details() or "")


_TRANSIENT = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # also while a leader is elected: etcd holds calls meanwhile
    grpc.StatusCode.UNKNOWN,  # "context deadline exceeded": etcd's own, without quorum
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,  # a stream that was reset
}
# The last one: authentication was enabled meanwhile.
_STALE_TOKEN = ("invalid auth token", "revision of auth store is old", "user name is empty")
_NO_LOGIN = "authentication is not enabled"


def judge(refused: Refused) -> Verdict:
    """The reaction: another endpoint, a new token, continue without one, or give up."""
    code, details = refused.code, refused.details
    if any(text in details for text in _STALE_TOKEN):
        return "login"
    if _NO_LOGIN in details:
        return "no_login"
    if code in _TRANSIENT or "too many requests" in details:
        return "retry"
    return "fail"


_NOT_CONNECTED = re.compile(r"Failed to connect to remote host: ([A-Z][^:]+)$")


def _in_words(refused: Refused) -> str:
    """Why to try again, for people: what the network said, without gRPC's words around it."""
    if refused.code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return "it did not answer in time"
    # The end alone where it is the reason; a handshake's is in the middle, and all of it is told.
    if found := _NOT_CONNECTED.search(refused.details):
        return f"no connection ({found[1]})"
    return str(refused)


def to_error(refused: Refused, what: str) -> Exception:
    """kvpool's error for a refusal that no retry would change."""
    code, details = refused.code, refused.details
    if "lease not found" in details:
        return LeaseGone(f"{what}: etcd does not know the lease; it ended or was revoked")
    if "database space exceeded" in details:
        return Unavailable(
            f"{what}: etcd's database is full and takes no writes. Compact its history and defragment "
            "it (etcdctl compact REVISION; etcdctl defrag), then `etcdctl alarm disarm`; to keep it "
            "from filling, run etcd with --auto-compaction-retention=1h"
        )
    if "user name is empty" in details:
        return NotAuthenticated(
            f"{what}: etcd has authentication on; give a user (etcd://USER@HOST) and a password"
        )
    if "authentication failed" in details:
        return NotAuthenticated(f"{what}: etcd does not accept the user or the password")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return NotAuthenticated(
            f"{what}: etcd does not let this user; grant its role readwrite on the prefix /kvpool/"
        )
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return NotAuthenticated(f"{what}: etcd refused us: {details}")
    if code is grpc.StatusCode.INVALID_ARGUMENT or "larger than max" in details:
        return InvalidRequest(f"{what}: etcd refused it: {details}")
    return Unavailable(f"{what}: etcd answered {refused}")


class EtcdClient:
    """One client of an etcd cluster. Close it on the loop that it was used on.

    Raises, from every call: `Unavailable` when no endpoint did it within the deadline (it may have been
    done), `NotAuthenticated`, `LeaseGone`, and `InvalidRequest` for requests that etcd rejects. The
    constructor raises `ConfigError` for certificates that cannot be read.

    outage: what etcd does not do that it is asked, by the name of the call.
    """

    def __init__(
        self, settings: EtcdSettings, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.settings = settings
        self.outage = Outage("etcd", log, clock)
        self._credentials = _credentials(settings)
        self._channels: dict[str, grpc.aio.Channel] = {}
        # A random one, so that the clients of a cluster do not all use the first.
        self._at = secrets.randbelow(len(settings.endpoints))
        self.token = ""
        self._login = bool(settings.user)
        self._closed = False

    # ---- calls ----------------------------------------------------------------------------------------

    async def range(self, prefix: bytes, deadline_s: float | None = None) -> Snapshot:
        """All that is below `prefix`."""
        for _ in range(PAGE_RESTARTS_MAX):
            snapshot = await self._pages(prefix, deadline_s)
            if snapshot is not None:
                return snapshot
        raise Unavailable(
            f"reading {prefix.decode()} from etcd: its history is compacted faster than it can be read"
        )

    async def _pages(self, prefix: bytes, deadline_s: float | None) -> Snapshot | None:
        """None: compacted between two pages."""
        kvs: list[Any] = []
        key, end, revision = prefix, prefix_end(prefix), 0
        while True:
            request = rpc.RangeRequest(key=key, range_end=end, limit=PAGE_KEYS, revision=revision)
            try:
                answer = await self._call(RANGE, request, "reading", deadline_s)
            except _Compacted:
                return None
            revision = revision or answer.header.revision
            kvs += answer.kvs
            if not answer.more:
                return Snapshot(kvs, revision, answer.header.cluster_id)
            key = answer.kvs[-1].key + b"\0"

    async def txn(
        self,
        compares: Sequence[Any],
        success: Sequence[Any],
        failure: Sequence[Any],
        what: str,
        deadline_s: float | None = None,
    ) -> Any:
        """`rpc.TxnResponse`. `what` is for error messages: the purpose of the transaction."""
        request = rpc.TxnRequest(compare=compares, success=success, failure=failure)
        return await self._call(TXN, request, what, deadline_s)

    async def grant(self, ttl_s: int, deadline_s: float | None = None) -> int:
        """A new lease; its number."""
        lease = secrets.randbits(62) + 1
        request = rpc.LeaseGrantRequest(TTL=ttl_s, ID=lease)
        try:
            await self._call(GRANT, request, "getting a lease", deadline_s)
        except _LeaseExists:  # an earlier try got it; the number is unique
            pass
        return lease

    async def keep_alive(self, lease: int, deadline_s: float | None = None) -> bool:
        """Renew a lease. False: etcd reports that it is gone."""
        request = rpc.LeaseKeepAliveRequest(ID=lease)
        answer = await self._call(KEEP_ALIVE, request, "keeping the lease", deadline_s)
        return bool(answer.TTL > 0)

    async def revoke(self, lease: int, deadline_s: float | None = None) -> None:
        """End a lease and delete the keys bound to it. Idempotent."""
        try:
            await self._call(REVOKE, rpc.LeaseRevokeRequest(ID=lease), "ending a lease", deadline_s)
        except LeaseGone:
            pass

    async def close(self) -> None:
        """Close all connections; calls under way end. Idempotent."""
        self._closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    # ---- endpoints, tries and tokens ------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The endpoint of the next call."""
        return self.settings.endpoints[self._at]

    def give_up(self, endpoint: str) -> None:
        """It failed: switch to the next one, unless another call has done so meanwhile."""
        if endpoint == self.endpoint:
            self._at = (self._at + 1) % len(self.settings.endpoints)

    def channel(self, endpoint: str) -> grpc.aio.Channel:
        if self._closed:
            raise Unavailable("the etcd client is closed")
        if endpoint not in self._channels:
            if self._credentials is None:
                made = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
            else:
                made = grpc.aio.secure_channel(endpoint, self._credentials, options=CHANNEL_OPTIONS)
            self._channels[endpoint] = made
        return self._channels[endpoint]

    async def metadata(self, timeout_s: float) -> Metadata:
        """The metadata of every call. Logs in if necessary; raises `Refused` or kvpool's errors."""
        # Without this a member that is cut off from the others answers from outdated state.
        leader = ("hasleader", "true")
        if not self._login:
            return (leader,)
        if not self.token:
            request = rpc.AuthenticateRequest(
                name=self.settings.user, password=self.settings.password
            )
            endpoint = self.endpoint
            try:
                answer = await self._try(endpoint, AUTHENTICATE, request, timeout_s, (leader,))
            except Refused as refused:
                if judge(refused) != "no_login":
                    raise
                self._login = False
                return (leader,)
            self.token = answer.token
        return (leader, ("token", self.token))

    def forget_token(self, used: Metadata) -> None:
        """The metadata of a call was refused: log in again, unless another call has done so meanwhile."""
        self._login = True
        if ("token", self.token) in used:
            self.token = ""

    async def _call(self, method: Method, request: Any, what: str, deadline_s: float | None) -> Any:
        try:
            answer = await self._call_somewhere(method, request, what, deadline_s)
        except (LeaseGone, _Compacted, _LeaseExists):  # answers, to callers that expect them
            self.outage.succeeded(method.name)
            raise
        except KvpoolError as error:
            self.outage.failed(method.name, error)
            raise
        self.outage.succeeded(method.name)
        return answer

    async def _call_somewhere(
        self, method: Method, request: Any, what: str, deadline_s: float | None
    ) -> Any:
        seconds = self.settings.call_s if deadline_s is None else deadline_s
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        count = len(self.settings.endpoints)
        tries, logins, last = 0, 0, "no answer"
        while (left := deadline - loop.time()) > 0:
            # Later tries wait longer, so that a slow cluster does not just get more requests.
            timeout_s = min(left, self.settings.try_s * (1 + tries // (2 * count)))
            endpoint = self.endpoint
            metadata: Metadata = ()
            try:
                metadata = await self.metadata(timeout_s)
                return await self._try(endpoint, method, request, timeout_s, metadata)
            except Refused as refused:
                verdict = judge(refused)
                if verdict == "login" and self.settings.user and logins == 0:
                    logins += 1
                    self.forget_token(metadata)
                    continue
                if verdict != "retry":
                    raise _special(refused) or to_error(refused, what) from None
                last = f"{endpoint}: {_in_words(refused)}"
            self.give_up(endpoint)
            tries += 1
            if tries % count == 0:
                pause_s = min(ROUND_PAUSE_S * (tries // count), ROUND_PAUSE_S_MAX)
                await asyncio.sleep(min(pause_s, max(0.0, deadline - loop.time())))
        raise Unavailable(
            f"{what}: etcd ({', '.join(self.settings.endpoints)}) did not complete it within {seconds:g} s; last "
            f"error: {last}"
        )

    async def _try(
        self,
        endpoint: str,
        method: Method,
        request: Any,
        timeout_s: float,
        metadata: Metadata,
    ) -> Any:
        """One request to one endpoint. Raises `Refused`."""
        channel = self.channel(endpoint)
        make = channel.stream_stream if method.bidi else channel.unary_unary
        stub = make(
            method.path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=method.response.FromString,
        )
        try:
            if not method.bidi:
                return await stub(request, timeout=timeout_s, metadata=metadata)
            call = stub(timeout=timeout_s, metadata=metadata)
            try:
                await call.write(request)
                answer = await call.read()
                if answer is grpc.aio.EOF:
                    raise Refused(await call.code(), await call.details() or "")
                return answer
            finally:
                call.cancel()
        except grpc.aio.AioRpcError as error:
            raise Refused.of(error) from None


class _Compacted(Unavailable):
    """The requested revision is compacted."""


class _LeaseExists(Unavailable):
    """A lease of this number has been granted."""


def _special(refused: Refused) -> Exception | None:
    """Refusals that the caller within this module handles."""
    if "required revision has been compacted" in refused.details:
        return _Compacted(refused.details)
    if "lease already exists" in refused.details:
        return _LeaseExists(refused.details)
    return None


def _credentials(settings: EtcdSettings) -> grpc.ChannelCredentials | None:
    if not settings.tls:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(settings.ca),
        private_key=_read(settings.key),
        certificate_chain=_read(settings.cert),
    )


def _read(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the certificate file {path} for etcd cannot be read: {error}") from None


# ---- building blocks of requests ------------------------------------------------------------------------


def prefix_end(prefix: bytes) -> bytes:
    """The first key after all that begin with `prefix`. Its last byte is a slash in all uses."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def absent(key: bytes) -> Any:
    """Compare: there is no such key."""
    return rpc.Compare(
        result=rpc.Compare.EQUAL, target=rpc.Compare.CREATE, key=key, create_revision=0
    )


def unchanged(key: bytes, mod_revision: int) -> Any:
    """The key is as it was at that revision; 0: absent."""
    return rpc.Compare(
        result=rpc.Compare.EQUAL, target=rpc.Compare.MOD, key=key, mod_revision=mod_revision
    )


def bound_to(key: bytes, lease: int) -> Any:
    """Compare: the key is bound to the lease."""
    return rpc.Compare(result=rpc.Compare.EQUAL, target=rpc.Compare.LEASE, key=key, lease=lease)


def read(key: bytes) -> Any:
    """Operation: read a key."""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def put(key: bytes, value: bytes, lease: int = 0) -> Any:
    """Operation: write a key, bound to a lease if there is one."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> Any:
    """Operation: delete a key."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


def found(response: Any, index: int) -> Any | None:
    """The key-value that the `index`th operation, a `read`, has found."""
    kvs = response.responses[index].response_range.kvs
    return kvs[0] if kvs else None
