"""Follows a prefix in etcd indefinitely: over lost connections, dead servers, compaction.

A follower reads everything, as of one revision, and then receives each change after it, in order. When
a stream ends it continues at the next endpoint with the revision after the last change that it has seen;
so nothing is missed and nothing comes twice. Only if etcd has compacted the revisions in between, or its
data was replaced, everything is read again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn, Protocol

import grpc

from kvpool.errors import KvpoolError, Unavailable
from kvpool.placement.etcd import rpc_pb2 as rpc
from kvpool.placement.etcd.client import (
    WATCH,
    EtcdClient,
    Metadata,
    Refused,
    judge,
    prefix_end,
    to_error,
)

log = logging.getLogger("kvpool.placement")

PROBE_S = 1.0  # how often a silent stream is asked for a sign of life
SILENCE_S = 3.0  # without any, it is considered dead
PAUSE_S, PAUSE_S_MAX = 0.1, 1.0  # between attempts; grows with each failure in a row


class Sink(Protocol):
    """Receives changes. Called on the event loop; quick."""

    def heard(self) -> None:
        """The server has given a sign of life; comes before `reset` and `changed` of the same message."""

    def reset(self, kvs: list[Any], revision: int) -> None:
        """All records (`rpc.KeyValue`); any others are gone."""

    def changed(self, events: list[Any], revision: int) -> None:
        """These changes (`rpc.Event`) followed, in this order."""


class _Forgotten(Exception):
    """The next changes are not available: read everything again."""


class Follower:
    """One watch. `run` is its life; cancel it to end it.

    open: there is a stream that the server has confirmed. revision: of the last change passed to the
    sink. streams, resets: how often a stream was opened and everything was read.
    """

    def __init__(self, client: EtcdClient, prefix: bytes, sink: Sink) -> None:
        self._client = client
        self._prefix = prefix
        self._sink = sink
        self._cluster_id = 0
        self.open = False
        self.revision = 0  # also: nothing has been read yet
        self.streams = 0
        self.resets = 0

    async def read(self, deadline_s: float | None = None) -> None:
        """Read everything and pass it to the sink. Raises as the client's calls."""
        kvs, revision, cluster_id = await self._client.range(self._prefix, deadline_s)
        self.revision, self._cluster_id = revision, cluster_id
        self.resets += 1
        self._sink.heard()
        self._sink.reset(kvs, revision)

    async def run(self) -> None:
        """Follow until cancelled. Errors are logged and retried."""
        failures = 0
        while True:
            endpoint = self._client.endpoint
            try:
                if not self.revision:
                    await self.read()
                await self._stream(endpoint)
            except _Forgotten as error:
                log.info("the watch on etcd cannot continue, all records are read again: %s", error)
                self.open, self.revision = False, 0
                await asyncio.sleep(PAUSE_S)
                continue
            except KvpoolError as error:
                self._client.outage.failed(WATCH.name, error)
                # Once per outage; etcd may be unavailable for long.
                level = logging.WARNING if self.open or not failures else logging.DEBUG
                log.log(level, "the watch on etcd at %s ended: %s", endpoint, error)
            failures = 1 if self.open else failures + 1
            self.open = False
            self._client.give_up(endpoint)
            await asyncio.sleep(min(PAUSE_S * failures, PAUSE_S_MAX))

    async def _stream(self, endpoint: str) -> None:
        """One stream, from `revision` on, until it fails; always raises."""
        metadata: Metadata = ()
        try:
            metadata = await self._client.metadata(self._client.settings.try_s)
            call = self._client.channel(endpoint).stream_stream(
                WATCH.path,
                request_serializer=rpc.WatchRequest.SerializeToString,
                response_deserializer=rpc.WatchResponse.FromString,
            )(metadata=metadata)
            prober = asyncio.ensure_future(_probe(call))
            try:
                await self._receive(call)
            finally:
                prober.cancel()
                call.cancel()
                await asyncio.gather(prober, return_exceptions=True)
        except grpc.aio.AioRpcError as error:
            refused = Refused.of(error)
        except Refused as error:
            refused = error
        except TimeoutError:
            raise Unavailable(f"no response for {SILENCE_S:g} s") from None
        if judge(refused) == "login":
            self._client.forget_token(metadata)
        raise to_error(refused, f"watching {self._prefix.decode()}")

    async def _receive(self, call: Any) -> NoReturn:
        create = rpc.WatchCreateRequest(
            key=self._prefix, range_end=prefix_end(self._prefix), start_revision=self.revision + 1
        )
        async with asyncio.timeout(SILENCE_S):
            await call.write(rpc.WatchRequest(create_request=create))
        while True:
            async with asyncio.timeout(SILENCE_S):
                message = await call.read()
            if message is grpc.aio.EOF:
                raise Refused(await call.code(), await call.details() or "")
            self._take(message)

    def _take(self, message: Any) -> None:
        header = message.header
        if message.compact_revision:
            raise _Forgotten(f"history before revision {message.compact_revision} is compacted")
        if message.canceled:
            raise Refused(grpc.StatusCode.UNKNOWN, message.cancel_reason or "the watch was ended")
        if message.created:
            # An etcd that lost its data, or a member that is behind, would wait silently
            # for a revision that means something else by then.
            if header.revision < self.revision or header.cluster_id != self._cluster_id:
                raise _Forgotten(
                    f"etcd is at revision {header.revision}, before the last one seen, {self.revision}"
                )
            self.open = True
            self.streams += 1
            self._client.outage.succeeded(WATCH.name)
            log.info(
                "watching %s in etcd, from revision %d on", self._prefix.decode(), self.revision
            )
        self._sink.heard()
        if message.events:
            # Not the header's: that of a probe's answer may be ahead of changes still to be sent
            # (etcd before 3.4.25 and 3.5.8).
            self.revision = message.events[-1].kv.mod_revision
            self._sink.changed(list(message.events), self.revision)


async def _probe(call: Any) -> None:
    """Ask for signs of life until the stream ends. Its reader handles the end."""
    probe = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
    try:
        while not call.done():
            await asyncio.sleep(PROBE_S)
            await call.write(probe)
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        pass
