"""The cluster as the gateway sees it: asked when somebody wants to know, all nodes at a time. Event loop only.

What many ask for is asked for once: an answer is good for a moment. A node that does not answer in time is named,
and the others' answers come all the same.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from kvpool.admin.daemon_link import Daemon
from kvpool.admin.problems import Refused
from kvpool.errors import KvpoolError, ProtocolError
from kvpool.placement.records import NamespaceEntry, NamespaceSettings, NodeRecord
from kvpool.telemetry.node_stats import NodeStats
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire

log = logging.getLogger("kvpool.admin")

NODE_S = 2.0  # for one node's answer
VIEW_FRESH_S = 0.25
STATS_FRESH_S = 1.0
FOLLOW_S = 0.02  # between two looks at our own node
TOGETHER_MAX = 64  # nodes that are asked at a time

T = TypeVar("T")


class View(msgspec.Struct, frozen=True):
    """What `kvpool.wire.operator.Cluster` is answered with."""

    cluster: str
    node: str
    incarnation: str
    standing: str
    state: str
    nodes: tuple[NodeRecord, ...]
    drains: tuple[str, ...]
    namespaces: tuple[NamespaceEntry, ...]

    def names(self) -> list[str]:
        """All nodes that can be asked, sorted; a node that is alone is no record's."""
        return sorted({self.node, *(record.node for record in self.nodes)})

    def namespace(self, tenant: str, digest: str) -> NamespaceEntry | None:
        """What the cluster has agreed on for a namespace."""
        entries = (
            each for each in self.namespaces if (each.tenant, each.digest) == (tenant, digest)
        )
        return next(entries, None)


class Answers(msgspec.Struct, Generic[T], frozen=True):
    """The answers of nodes."""

    nodes: dict[str, T] = {}
    unreachable: Annotated[
        dict[str, str], msgspec.Meta(description="Nodes that did not answer, and why.")
    ] = {}


class Fresh(Generic[T]):
    """A value that is good for `seconds`; those who want it meanwhile wait for one and the same question."""

    def __init__(
        self, find: Callable[[], Coroutine[Any, Any, T]], seconds: float, clock: Callable[[], float]
    ) -> None:
        self._find = find
        self._seconds = seconds
        self._clock = clock
        self._task: asyncio.Task[T] | None = None
        self._began = 0.0

    async def get(self) -> T:
        """One that was asked for lately. Raises what finding it does."""
        return await self._since(self._clock() - self._seconds)

    async def now(self) -> T:
        """One that was asked for after this call. There is one question at a time, whoever asks."""
        return await self._since(self._clock())

    async def _since(self, moment: float) -> T:
        while True:
            task = self._task
            if task is not None and self._began >= moment and not _failed(task):
                return await asyncio.shield(task)
            if task is None or task.done():
                self._task = asyncio.get_running_loop().create_task(self._find())
                self._task.add_done_callback(_failed)  # known, also when nobody waits any more
                self._began = max(self._clock(), moment)
            else:
                await asyncio.wait((task,))

    def forget(self) -> None:
        """Something has been changed."""
        self._began = -math.inf


def check(stats: NodeStats) -> None:
    """Raises `ProtocolError` for what cannot be shown."""
    try:
        for tenant in stats.tenants.values():
            for namespace in tenant.namespaces.values():
                msgspec.convert(namespace.settings, NamespaceSettings)
    except msgspec.ValidationError as error:
        raise ProtocolError(
            f"the settings of a namespace are of another version: {error}"
        ) from None


def _failed(task: asyncio.Task[Any]) -> bool:
    """Return whether a task has failed. asyncio takes its exception as known then."""
    return task.done() and (task.cancelled() or task.exception() is not None)


class Cluster:
    """See the module. clock: monotonic."""

    def __init__(self, daemon: Daemon, clock: Callable[[], float]) -> None:
        self.daemon = daemon
        self.clock = clock
        self._view = Fresh(self._ask_view, VIEW_FRESH_S, clock)
        self._stats = Fresh(self._ask_stats, STATS_FRESH_S, clock)

    async def view(self) -> View:
        return await self._view.get()

    async def stats(self) -> Answers[NodeStats]:
        """What `Inspect` says on each node."""
        return await self._stats.get()

    async def consult(
        self, decide: Callable[[View, Answers[NodeStats]], T], *, now: bool = False
    ) -> T:
        """What follows from what is known; from what is known now, where something is about to be changed.

        decide: raises what it refuses with. What it does not find may be new: it is asked once more.
        """
        if not now:
            try:
                return decide(await self.view(), await self.stats())
            except Refused as error:
                if error.status != 404:
                    raise
        view = await self._view.now()
        return decide(view, await self._stats.now())

    async def follow(self, node: str, tenant: str, digest: str) -> None:
        """A node has changed a namespace: wait until our own node knows, for `NODE_S` at most.

        Without this the answer to a change, made at another node, might show what was before. The change is made
        whatever comes of this.
        """
        deadline = self.clock() + NODE_S
        try:
            if node == (await self.view()).node:
                return
            while True:
                theirs = await self.daemon.get(
                    operator_wire.Cluster(), View, node=node, within_s=NODE_S
                )
                ours = await self._view.now()
                if ours.namespace(tenant, digest) == theirs.namespace(tenant, digest):
                    return
                if self.clock() >= deadline:
                    return
                await asyncio.sleep(FOLLOW_S)
        except KvpoolError as error:
            log.info("a change of namespace %s may be shown late: %s", digest, error)

    def changed(self) -> None:
        """Somebody has changed something: what was heard before is old."""
        self._view.forget()
        self._stats.forget()

    async def ask_each(
        self,
        nodes: Iterable[str],
        ask: Callable[[str], Awaitable[T]],
        *,
        one_at_least: bool = False,
    ) -> Answers[T]:
        """All of them at a time, each within what `ask` allows. one_at_least: raises an error if none answers."""
        found: Answers[T] = Answers()
        errors: list[KvpoolError] = []
        gate = asyncio.Semaphore(TOGETHER_MAX)

        async def one(node: str) -> None:
            async with gate:
                try:
                    found.nodes[node] = await ask(node)
                except KvpoolError as error:
                    errors.append(error)
                    found.unreachable[node] = str(error)

        await asyncio.gather(*(one(node) for node in nodes))
        if one_at_least and errors and not found.nodes:
            raise errors[0]
        return found

    async def get_each(
        self,
        nodes: Iterable[str],
        message: frame.Message,
        kind: Any = None,
        *,
        one_at_least: bool = False,
        **more: Any,
    ) -> Answers[Any]:
        """The same question to each of these nodes: see `Daemon.get`."""

        async def ask(node: str) -> Any:
            return await self.daemon.get(message, kind, node=node, within_s=NODE_S, **more)

        return await self.ask_each(nodes, ask, one_at_least=one_at_least)

    async def _ask_view(self) -> View:
        view: View = await self.daemon.get(operator_wire.Cluster(), View)
        return view

    async def _ask_stats(self) -> Answers[NodeStats]:
        view = await self.view()
        return await self.stats_of(view.names())

    async def stats_of(self, nodes: Iterable[str]) -> Answers[NodeStats]:
        """What `Inspect` says on each of these now."""

        async def ask(node: str) -> NodeStats:
            stats: NodeStats = await self.daemon.get(
                operator_wire.Inspect(), NodeStats, node=node, within_s=NODE_S
            )
            check(stats)
            return stats

        return await self.ask_each(nodes, ask)
