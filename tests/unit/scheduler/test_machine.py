"""Whatever happens in whatever order, the scheduler's books are those of a plain model, and nobody is lost."""

import math
from dataclasses import dataclass, field, replace
from random import Random

import hypothesis.strategies as st
from hypothesis import settings as profile
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpool.scheduler.cluster import Cluster, Traffic
from kvpool.scheduler.decode import DecodeRule
from kvpool.scheduler.estimates import KindEstimates, LoadEstimate, StepEstimate
from kvpool.scheduler.index import PrefixIndex
from kvpool.scheduler.policies import make_policy
from kvpool.scheduler.scheduler import Scheduler, Settings
from kvpool.scheduler.values import Begun, DecodeOrder, Engine, Order, Request, Role

BLOCK, STEP, CAPACITY = 16, 64, 600
ROLES = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE, Role.BOTH]
RETRIES = 2
STEPS_MAX = 400


@dataclass(eq=False, repr=False)
class Known:
    """A request as the model has it. out: its orders, in order. reserved: memory; sent: whether used."""

    request: Request
    out: list[Order] = field(default_factory=list)
    rest: bool = True  # some of its prompt waits
    reserved: Engine | None = None
    sent: bool = False
    follows: bool = False
    computed_by: Engine | None = None
    done: int = 0
    failures: int = 0

    @property
    def needed(self) -> int:
        return self.request.tokens + self.request.output_tokens

    @property
    def computed(self) -> bool:
        return self.computed_by is not None

    @property
    def parked(self) -> bool:
        return self.computed and not self.sent

    def release(self) -> None:
        self.reserved, self.sent, self.follows = None, False, False


def uncached(order: Order) -> int:
    return order.end - min(order.estimate.cached * BLOCK, order.request.tokens - 1)


class Machine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(["kvpool", "mooncake-global", "dynamo"]),
        segment_s=st.sampled_from([0.0, 1.0]),
        ahead=st.sampled_from([0.0, 0.5]),
        follows_max=st.sampled_from([0, 1, 4]),
        pull_bytes_s=st.sampled_from([1e12, 1e4]),
    )
    def begin(
        self, policy: str, segment_s: float, ahead: float, follows_max: int, pull_bytes_s: float
    ) -> None:
        loads = {"dram": LoadEstimate(0.0, 1e12), "peer": LoadEstimate(0.0, pull_bytes_s)}
        steps = StepEstimate((0.0, 0.01, 0.0)), StepEstimate((0.01, 0.001, 0.0))
        kinds = {"k": KindEstimates(*steps, loads, STEP, BLOCK, 1000)}
        nodes = {f"dram:{number}": f"{number}" for number in range(100)}
        self.index = PrefixIndex()
        self.joined, self.follows_max = 0, follows_max
        self.policy = policy
        engines = [self.engine(role) for role in ROLES]
        self.engines = {engine.name: engine for engine in engines}
        self.resting: set[str] = set()
        self.settings = Settings(
            segment_s=segment_s, retries_max=RETRIES, decode=DecodeRule(ahead=ahead)
        )
        self.cluster = Cluster(kinds, nodes, Traffic())
        self.scheduler = self.anew()
        self.known: dict[int, Known] = {}
        self.now, self.count = 0.0, 0

    def anew(self) -> Scheduler:
        return Scheduler(
            list(self.engines.values()),
            self.cluster,
            self.index,
            make_policy(self.policy),
            Random(0),
            self.settings,
        )

    def engine(self, role: Role) -> Engine:
        name = f"{self.joined}"
        self.joined += 1
        self.index.join(f"gpu:{name}", pool=False)
        self.index.join(f"dram:{name}", pool=True)
        tiers = (f"dram:{name}",)
        return Engine(
            name, name, role, "k", f"gpu:{name}", tiers, CAPACITY, follows_max=self.follows_max
        )

    @rule(
        tokens=st.integers(1, 500),
        chain=st.integers(0, 3),
        priority=st.integers(0, 1),
        tenant=st.sampled_from(["", "a", "b"]),
        whole=st.booleans(),
        patience_s=st.sampled_from([math.inf, math.inf, 60.0]),
    )
    def submit(
        self,
        tokens: int,
        chain: int,
        priority: int,
        tenant: str,
        whole: bool,
        patience_s: float,
    ) -> None:
        ident = self.count = self.count + 1
        keys = [(chain, n) for n in range(tokens // BLOCK)] + [(ident, 0)] * (tokens % BLOCK > 0)
        request = Request(ident, keys, tokens, 10, self.now, None, priority, tenant)
        deadline_s = self.now + patience_s
        request = replace(request, whole=whole and tokens < 100, deadline_s=deadline_s)
        refused = self.scheduler.submit(request, self.now)
        if refused is None:
            self.known[ident] = Known(request)
        else:
            in_service = [e for e in self.engines.values() if e.name not in self.resting]
            alone = Role.DECODE if request.whole else Role.PREFILL
            lacking = not all(
                any(role in e.role for e in in_service) for role in (alone, Role.DECODE)
            )
            assert refused.code == ("no_engine" if lacking else "deadline")

    @rule(seconds=st.floats(0.0, 5.0))
    def poll(self, seconds: float) -> None:
        self.now += seconds
        for order in self.scheduler.poll(self.now):
            known = self.known[order.request.ident]
            if isinstance(order, DecodeOrder):
                assert known.parked
                assert order.engine.name not in self.resting
                assert Role.DECODE in order.engine.role
                known.reserved, known.sent = order.engine, True
                continue
            engine = order.estimate.engine
            assert self.engines[engine.name] is engine
            assert engine.name not in self.resting
            assert known.rest
            known.out.append(order)
            known.rest = not order.last
            if (
                order.decode is None
            ):  # it goes on with its prompt, and decodes where there is an engine again
                in_service = [e for e in self.engines.values() if e.name not in self.resting]
                assert not any(Role.DECODE in engine.role for engine in in_service)
            if known.sent:
                assert order.decode is known.reserved
                assert not order.whole
                assert not order.follow
            known.reserved = order.decode
            assert not (order.whole and order.follow)
            if order.whole:
                assert order.last
                assert order.decode is engine
            if known.request.whole:
                assert order.whole
            if order.whole or order.follow:
                known.sent, known.follows = True, order.follow

    def pick(self, data: st.DataObject, found: list[Known]) -> Known | None:
        idents = [known.request.ident for known in found]
        return self.known[data.draw(st.sampled_from(idents))] if idents else None

    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        known = self.pick(data, [k for k in self.known.values() if k.out])
        if known is not None:
            self.compute_one(known)

    def compute_one(self, known: Known) -> None:
        order = known.out.pop(0)
        engine, known.done = order.estimate.engine, order.end
        done = len(order.request.keys) if order.last else order.end // BLOCK
        for holder in (engine.gpu, *engine.tiers):
            self.index.add(holder, order.request.keys[:done])
        self.scheduler.computed(engine, order.request.ident, self.now)
        if order.last:
            known.computed_by, known.follows = engine, False

    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        known = self.pick(data, [k for k in self.known.values() if k.computed and k.sent])
        if known is not None:
            self.scheduler.finished(known.request.ident)
            del self.known[known.request.ident]

    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        ident = data.draw(st.integers(0, self.count))
        self.scheduler.abandoned(ident, self.now)
        self.known.pop(ident, None)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        known = self.pick(data, [k for k in self.known.values() if k.out])
        if known is not None:
            engine = known.out[-1].estimate.engine
            again = self.scheduler.failed(engine, known.request.ident, self.now)
            assert again == self.failed(known, engine)

    def failed(self, known: Known, engine: Engine) -> bool:
        """In the model: its orders there are void."""
        mine = [order for order in known.out if order.estimate.engine is engine]
        known.out = [order for order in known.out if order.estimate.engine is not engine]
        if mine[-1].whole:
            known.release()
        known.rest = True
        return self.again(known)

    def again(self, known: Known) -> bool:
        known.failures += 1
        if known.failures > RETRIES:
            del self.known[known.request.ident]
        return known.failures <= RETRIES

    @rule(data=st.data())
    def decode_fails(self, data: st.DataObject) -> None:
        known = self.pick(data, [k for k in self.known.values() if k.sent])
        if known is not None:
            self.decode_failed(known)

    def decode_failed(self, known: Known) -> None:
        again = self.scheduler.decode_failed(known.request.ident, self.now)
        whole = [order for order in known.out if order.whole]
        if whole:
            assert again == self.failed(known, whole[0].estimate.engine)
        else:
            known.release()
            if known.request.whole:
                known.computed_by, known.rest, known.done = None, True, 0
            assert again == self.again(known)

    @rule(data=st.data(), dies=st.booleans())
    @precondition(lambda self: len(getattr(self, "engines", ())) > 1)
    def leave(self, data: st.DataObject, dies: bool) -> None:
        engine = self.engines.pop(data.draw(st.sampled_from(sorted(self.engines))))
        self.resting.discard(engine.name)
        if dies:
            self.index.leave(engine.gpu)
            self.index.leave(engine.tiers[0])
        left = self.scheduler.leave(engine.name, self.now)
        concerned = [
            known
            for known in list(self.known.values())
            if any(order.estimate.engine is engine for order in known.out)
        ]
        again = {known.request.ident: self.failed(known, engine) for known in concerned}
        assert set(left.queued) == {ident for ident, more in again.items() if more}
        assert set(left.given_up) == {i for i, more in again.items() if not more}
        there = [k for k in self.known.values() if k.reserved is engine]
        assert set(left.decoding) == {k.request.ident for k in there if k.sent}
        for known in there:
            if not known.sent:
                known.release()
            elif data.draw(st.booleans()):
                self.decode_failed(known)
            else:
                self.scheduler.abandoned(known.request.ident, self.now)
                del self.known[known.request.ident]

    @rule(role=st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]))
    @precondition(lambda self: len(getattr(self, "engines", ())) < 8)
    def join(self, role: Role) -> None:
        engine = self.engine(role)
        self.engines[engine.name] = engine
        self.scheduler.join(engine, self.now)

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        if name in self.resting:
            self.resting.remove(name)
            self.scheduler.undrain(name, self.now)
            return
        self.resting.add(name)
        self.scheduler.drain(name, self.now)
        self.unreserve(self.engines[name])

    def unreserve(self, engine: Engine) -> None:
        for known in self.known.values():
            if known.reserved is engine and not known.sent:
                known.release()

    @rule(data=st.data(), role=st.sampled_from([Role.PREFILL, Role.DECODE, Role.BOTH]))
    def set_role(self, data: st.DataObject, role: Role) -> None:
        name = data.draw(st.sampled_from(sorted(self.engines)))
        self.scheduler.set_role(name, role, self.now)
        if Role.DECODE not in role:
            self.unreserve(self.engines[name])

    @rule()
    def hand_over(self) -> None:
        """Another scheduler goes on with all of it. What was reserved and not used is reserved again when needed."""
        fresh = (
            Engine(
                e.name,
                e.node,
                e.role,
                e.kind,
                e.gpu,
                e.tiers,
                CAPACITY,
                follows_max=self.follows_max,
            )
            for e in self.engines.values()
        )
        self.engines = {engine.name: engine for engine in fresh}
        self.scheduler = self.anew()
        for name in sorted(self.resting):
            self.scheduler.drain(name, self.now)
        for known in self.known.values():
            if not known.sent:
                known.release()
            known.out = [self.of_this(order) for order in known.out]
            known.reserved = known.reserved and self.engines[known.reserved.name]
            by = known.computed_by
            begun = Begun(
                known.out,
                known.done,
                # It may have left meanwhile.
                None if by is None else self.engines.get(by.name, by),
                known.reserved,
                known.follows,
                known.failures,
            )
            self.scheduler.adopt(known.request, begun, self.now)

    def of_this(self, order: Order) -> Order:
        """The same in engines of the present scheduler."""
        estimate = order.estimate._replace(engine=self.engines[order.estimate.engine.name])
        decode = order.decode and self.engines.get(order.decode.name, order.decode)
        return replace(order, estimate=estimate, decode=decode)

    @rule(seconds=st.floats(0.0, 100.0))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        expected = {
            ident
            for ident, known in self.known.items()
            if known.request.deadline_s <= self.now and (known.rest or known.parked)
        }
        assert set(self.scheduler.expired(self.now)) == expected
        for ident in expected:
            del self.known[ident]

    @invariant()
    def books_are_right(self) -> None:
        if not hasattr(self, "known"):
            return
        known = self.known.values()
        for engine in self.engines.values():
            out = [o for k in known for o in k.out if o.estimate.engine is engine]
            here = [k for k in known if k.reserved is engine]
            assert engine.prefills == len(out)
            assert engine.queued_tokens == sum(map(uncached, out))
            assert engine.decodes == len(here)
            assert engine.context_tokens == sum(k.needed for k in here)
            assert engine.held_tokens == sum(k.needed for k in here if k.sent)
            assert engine.follows == sum(k.follows for k in here)
            assert engine.follows <= engine.follows_max
            drained = not out and not here
            assert self.scheduler.engines[engine.name].idle == drained
        assert self.scheduler.waiting == sum(k.rest for k in known)
        assert self.scheduler.parked == sum(k.parked for k in known)

    def teardown(self) -> None:
        """With enough engines in service, and time, every request comes to its end."""
        if not hasattr(self, "known"):
            return
        for name in sorted(self.resting):
            self.scheduler.undrain(name, self.now)
        self.resting.clear()
        for role in (Role.PREFILL, Role.DECODE):
            self.join(role)
        for _ in range(STEPS_MAX):
            if not self.known:
                break
            self.poll(0.5)
            for known in list(self.known.values()):
                if known.out:
                    self.compute_one(known)
                elif known.computed and known.sent:
                    self.scheduler.finished(known.request.ident)
                    del self.known[known.request.ident]
            self.books_are_right()
        assert not self.known, "some wait for ever"
        assert self.scheduler.wake_at() == math.inf


Machine.TestCase.settings = profile(max_examples=100, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
