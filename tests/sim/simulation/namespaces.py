"""Namespaces as the world knows them: whose they are, their prompts, and what was ever put in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvpool.daemon.core.blocks import NamespaceState
from kvpool.daemon.core.node import Node
from kvpool.errors import Unavailable
from kvpool.placement.records import EPOCH_MAX
from kvpool.types import DEFAULT_TENANT, NamespaceRecord, PartKind, PartSpec

if TYPE_CHECKING:
    from tests.sim.simulation.nodes import Life
    from tests.sim.simulation.world import World

TOLD_S = 0.5  # after a put, until every node can find it


class SimulatedNamespace:
    """One namespace of one tenant. Those of all tenants have the same fields and the same keys, and other bytes.

    chains: its prompts. modest: see `TenantPlan`.
    """

    def __init__(
        self,
        world: World,
        tenant: str,
        record: NamespaceRecord,
        chains: Sequence[Sequence[bytes]],
        *,
        modest: bool = False,
    ) -> None:
        self.tenant = tenant
        self.record = record
        self.parts: Sequence[PartSpec] = record.parts
        self.digest = record.digest()
        self.chains = chains
        self.modest = modest
        self.name = f"{tenant}/{self.digest[:4].hex()}"
        self.ended = False  # a client has asked for another epoch
        self._world = world
        # Whose bytes they are: no two namespaces of two tenants have the same.
        self._bytes_of = self.digest if tenant == DEFAULT_TENANT else tenant.encode() + self.digest
        self._put: dict[tuple[int, int, bytes], float] = {}
        self._tried: dict[tuple[int, int], set[bytes]] = {}  # by epoch and part
        self._kept: dict[Life, dict[tuple[int, int, bytes], None]] = {}

    def block(self, epoch: int, key: bytes, part: int, nbytes: int) -> tuple[bytes, bytes]:
        """(bytes, checksum) of a block of it."""
        return self._world.contents.block(self._bytes_of, epoch, key, part, nbytes)

    # ---- what was put ------------------------------------------------------------------------------------

    def stored(self, life: Life, epoch: int, part: int, keys: Iterable[bytes]) -> None:
        """These were committed somewhere, or were there already."""
        for key in keys:
            self._put.setdefault((epoch, part, key), self._world.now())
            if self.modest:
                self._kept.setdefault(life, {})[epoch, part, key] = None

    def committing(self, epoch: int, part: int, keys: Iterable[bytes]) -> None:
        """These may be committed somewhere from now on."""
        self._tried.setdefault((epoch, part), set()).update(keys)

    def ever(self, keys: Sequence[bytes]) -> int:
        """How many of these anybody can have, of one epoch, if all that was ever put is still there."""
        parts = range(len(self.parts))
        epochs = {epoch for epoch, _ in self._tried}
        return max(
            (self.usable(keys, [self._tried.get((e, p), set()) for p in parts]) for e in epochs),
            default=0,
        )

    def expected(self, keys: Sequence[bytes]) -> int:
        """How many of these must be found, where nothing ever goes wrong or away."""
        world, plan = self._world, self._world.plan
        if world.beside_what_stays or world.disturbed(self.tenant):
            return 0
        if not (plan.quiet and (plan.roomy or self.modest)):
            return 0
        before = self._world.now() - TOLD_S
        epoch = self.epoch()
        there = [
            {
                key
                for (e, p, key), at in self._put.items()
                if (e, p) == (epoch, part) and at < before
            }
            for part in range(len(self.parts))
        ]
        return self.usable(keys, there)

    def lost_by(self, life: Life) -> str:
        """Whether a node has given up what was put there, of a tenant that has room for all of it."""
        if self._world.disturbed(self.tenant):
            return ""
        epoch = self.epoch()
        held = {
            (table.part, key)
            for state in self.states(life.server.node)
            for table in state.tables
            for key in table.blocks
        }
        for e, part, key in self._kept.get(life, ()):
            name = (self.tenant, part, key)
            if e == epoch and (part, key) not in held and name not in self._world.reported:
                return f"block {key[:4].hex()}, part {part} of {self.name}"
        return ""

    async def delete(self) -> None:
        """As one that nobody has used for long; some have it open, and were away or not for all of that time."""
        if self._world.cluster.out_of_reach(""):
            raise Unavailable("nobody deletes anything while the membership is away")
        self.ended = True
        if await self._world.cluster.delete((self.tenant, self.digest.hex()), EPOCH_MAX):
            self._world.note(f"{self.name} is deleted")
            self._world.count("namespaces deleted")

    # ---- what there is ---------------------------------------------------------------------------------------

    def epoch(self) -> int:
        """Its epoch; -1 before it was opened."""
        entry = self._world.cluster.view.namespaces.get((self.tenant, self.digest.hex()))
        return -1 if entry is None else entry.epoch

    def epoch_known_to(self, life: Life) -> int:
        """By that node's view of the cluster; -1 before any."""
        entry = life.membership.view.namespaces.get((self.tenant, self.digest.hex()))
        return -1 if entry is None else entry.epoch

    def states(self, node: Node) -> Iterator[NamespaceState]:
        """It in some rules' books, in its present epoch there; nothing where it is not known."""
        tenant = node.tenants.get(self.tenant)
        if tenant is not None:
            yield from (one for one in tenant.namespaces.values() if one.base == self.digest)

    def usable(self, chain: Sequence[bytes], there: Sequence[set[bytes]]) -> int:
        """The longest prefix that an engine could use: the rule as it is written, tried for each length."""
        for n in range(len(chain), 0, -1):
            if all(
                n % spec.stride == 0 and keys.issuperset(self._needed(chain[:n], part))
                for part, (spec, keys) in enumerate(zip(self.parts, there, strict=True))
            ):
                return n
        return 0

    def _needed(self, prefix: Sequence[bytes], part: int) -> Sequence[bytes]:
        spec = self.parts[part]
        slots = prefix[spec.stride - 1 :: spec.stride]
        return slots[-spec.window_blocks :] if spec.kind is PartKind.WINDOW else slots

    def held(self, rules: Iterable[Node]) -> list[set[bytes]]:
        """The keys of each part that can be found by these rules, taken together."""
        there: list[set[bytes]] = [set() for _ in self.parts]
        for node in rules:
            node.settle()
            for state in self.states(node):
                for table in state.tables:
                    there[table.part].update(table.blocks)
        return there
