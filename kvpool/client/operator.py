"""The operator client: for operators' tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from kvpool.client.client import Client
from kvpool.client.namespaces import RESET_S
from kvpool.decoding import finite
from kvpool.telemetry import node_stats
from kvpool.telemetry.node_stats import NodeStats
from kvpool.types import Keys, check_digest, pack_keys
from kvpool.wire import frame
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Located
from kvpool.wire.command import answer_of

EVICT_S = 60.0  # for all of a node's blocks


class OperatorRequests(ABC):
    """Operators' requests, whatever way they go: `OperatorClient` sends them to the daemon of this machine.

    May be called from any thread. Every method raises `Unavailable` when nobody answers, and `NotAuthenticated` if the
    caller is not accepted as an operator.
    """

    @abstractmethod
    def _ask(self, message: frame.Message, wait_s: float = 0.0) -> Any:
        """The answer, a `Done` or `Bytes`, of the node that is connected to, about this client's tenant.

        wait_s: extra time for it.
        """

    @abstractmethod
    def _ask_node(
        self, message: frame.Message, node: str, tenant: str = "", by: str = "", wait_s: float = 0.0
    ) -> Any:
        """The same of any node and tenant: see `ask_node`."""

    def _get(self, message: frame.Message, wait_s: float = 0.0) -> Any:
        return answer_of(message, self._ask(message, wait_s))

    def cluster(self) -> dict[str, Any]:
        """The cluster as this node sees it: nodes, namespaces, directory."""
        found: dict[str, Any] = self._get(operator_wire.Cluster(), RESET_S)
        return found

    def locate(self, keys: Keys, *, digest: bytes = b"") -> list[Located]:
        """Where blocks of this tenant are, as far as they are found.

        digest: of one namespace; all of the tenant's that are open on this node unless given.
        """
        message = operator_wire.Locate(pack_keys(keys), digest and check_digest(digest))
        found: list[Located] = self._get(message, RESET_S)
        return found

    def drain(self, node: str, *, wanted: bool = True) -> None:
        """Drain a node, or cancel that. See `cluster`."""
        self._ask(operator_wire.Drain(node, wanted), RESET_S)

    def clear(self, digest: bytes, *, fence: bool = False) -> int:
        """Start a new epoch of a namespace of this tenant; returns its number.

        fence: engines must reopen it before they continue; otherwise they continue in the new epoch.
        """
        return int(self._get(operator_wire.Clear(check_digest(digest), fence), RESET_S))

    def configure(
        self,
        digest: bytes,
        *,
        replicas: int | None = None,
        write: str | None = None,
        ttl_s: float | None = None,
        ssd_codec: str | None = None,
        dram_quota: float | None = None,
        ssd_quota: float | None = None,
        write_remote: str | None = None,
    ) -> None:
        """Change settings of a namespace of this tenant, for the whole cluster.

        See `open` for their meaning; `replicas` is at least 1. None: unchanged.

        dram_quota, ssd_quota: quota of each node's memory and disks: bytes (an int), or
            a share of the tenant's part (a float up to 1.0); 0: no quota.
        """
        if ttl_s is not None:
            ttl_s = finite(ttl_s, "ttl_s")
        if isinstance(dram_quota, float):
            dram_quota = finite(dram_quota, "dram_quota")
        if isinstance(ssd_quota, float):
            ssd_quota = finite(ssd_quota, "ssd_quota")
        message = operator_wire.Configure(
            check_digest(digest),
            replicas,
            write,
            ttl_s,
            ssd_codec,
            dram_quota,
            ssd_quota,
            write_remote,
        )
        self._ask(message, RESET_S)

    def evict(self, keys: Keys = b"", *, digest: bytes = b"", tier: str = "") -> int:
        """Evict blocks on this node: how many went, counted in each tier.

        keys: none for all. digest: of one namespace; empty: all of the tenant's. tier: "dram", "ssd", "device".
        """
        message = operator_wire.Evict(pack_keys(keys), digest and check_digest(digest), tier)
        return int(self._get(message, EVICT_S))

    def pin_blocks(self, keys: Keys, kind: str = "soft", *, digest: bytes = b"") -> int:
        """As `pin`, by an operator, in one namespace or all of the tenant's; returns how many blocks are there."""
        message = operator_wire.PinBlocks(pack_keys(keys), kind, digest and check_digest(digest))
        return int(self._get(message))

    def inspect(self, node: str = "") -> NodeStats:
        """The numbers of a node of the cluster, of all its tenants. Empty: of this one."""
        answer = self._ask_node(operator_wire.Inspect(), node)
        return node_stats.decode(answer.data)

    def ask_node(
        self,
        message: frame.Message,
        *,
        node: str = "",
        tenant: str = "",
        by: str = "",
        wait_s: float = 0.0,
    ) -> Any:
        """A node's answer to an operator's request: its number, or its decoded JSON, of the declared type.

        message: see `kvpool.wire`, "operator → daemon". node: empty for this one. tenant: whose blocks it is
        about; empty for this client's. by: on whose behalf. wait_s: extra time for the answer.
        """
        return answer_of(message, self._ask_node(message, node, tenant, by, wait_s))


class OperatorClient(OperatorRequests, Client):
    """A client that also sends operators' requests. A daemon may require the operator token for them.

    It connects to the operators' socket (`KVPOOL_OPERATOR_SOCKET`, else beside the daemon's) if it may, else to the
    clients' one, where only the operator token makes it an operator. Failures and threads are those of `Client`: every
    method here raises `Unavailable` when the daemon is unreachable, and `NotAuthenticated` if it does not accept the
    caller as an operator.
    """

    _is_operator = True

    def _ask(self, message: frame.Message, wait_s: float = 0.0) -> Any:
        return self._requests.ask(message, wait_s)

    def _ask_node(
        self, message: frame.Message, node: str, tenant: str = "", by: str = "", wait_s: float = 0.0
    ) -> Any:
        payload = frame.encode(message, 0)[frame.HEADER.size :]
        order = operator_wire.OnNode(node, payload, finite(wait_s, "wait_s"), tenant, by)
        return self._requests.ask(order, wait_s + RESET_S)
