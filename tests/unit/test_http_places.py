"""Who has a place at an HTTP listener: against a list that is searched anew each time."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvpool.http_listeners import OF_AN_ADDRESS, HttpSlots

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("connect"), st.sampled_from(["", "a", "b", "c"])),
        st.tuples(st.just("trust"), st.integers(0, 40)),
        st.tuples(st.just("leave"), st.integers(0, 40)),
    ),
    max_size=60,
)


class Model:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.here: list[tuple[int, str, bool]] = []  # connection, address, known; by age
        self.used: list[int] = []  # known ones by their last request

    def victim(self, address: str) -> int | None:
        if len(self.here) < self.limit:
            return None
        share = max(1, self.limit // OF_AN_ADDRESS)
        strangers = [(one, its) for one, its, known in self.here if not known]
        count = Counter(its for _, its in strangers if its)
        count[address] += bool(address)  # with the one that comes
        of_own = [one for one, its in strangers if its == address and count[its] > share]
        crowded = [one for one, its in strangers if count[its] > share and its != address]
        for found in (of_own, crowded, [one for one, _ in strangers]):
            if found:
                return found[0]
        return next((one for one in self.used if idle(one)), None)

    def trust(self, connection: int) -> None:
        self.here = [(one, its, known or one == connection) for one, its, known in self.here]
        if any(one == connection for one, _, _ in self.here):
            self.used = [*(each for each in self.used if each != connection), connection]

    def drop(self, connection: int) -> None:
        self.here = [each for each in self.here if each[0] != connection]
        self.used = [each for each in self.used if each != connection]


def idle(connection: int) -> bool:
    """Two of three have no request under way."""
    return connection % 3 != 0


@given(limit=st.integers(1, 12), steps=STEPS)
def test_places(limit: int, steps: list[tuple[str, object]]) -> None:
    places: HttpSlots[int] = HttpSlots(limit)
    model = Model(limit)
    for number, (step, what) in enumerate(steps):
        if step == "connect":
            assert isinstance(what, str)
            victim = places.displaced_by(what, idle)
            assert victim == model.victim(what)
            if victim is not None:
                places.leave(victim)
                model.drop(victim)
            if places.full:
                assert all(known and not idle(one) for one, _, known in model.here)
                continue
            places.admit(number, what)
            model.here.append((number, what, False))
        else:
            assert isinstance(what, int)
            if step == "leave":
                places.leave(what)
                model.drop(what)
            else:
                places.trust(what)
                model.trust(what)
        assert len(places) == len(model.here) <= limit


@given(limit=st.integers(1, 40), flood=st.integers(0, 200))
def test_one_address_may_fill_the_places_and_keeps_nobody_out(limit: int, flood: int) -> None:
    """Who has no more than its share loses nothing to the one with more."""
    places: HttpSlots[int] = HttpSlots(limit)
    few = [-1 - number for number in range(max(1, limit // OF_AN_ADDRESS))]

    def connect(number: int, address: str) -> int | None:
        victim = places.displaced_by(address, idle)
        if victim is not None:
            places.leave(victim)
        places.admit(number, address)
        return victim

    lost = [connect(number, "many") for number in range(flood)]
    assert not any(one is not None for one in lost[:limit]), "there was room"
    lost = [connect(number, "few") for number in few]
    lost += [connect(number, "many") for number in range(flood, flood + limit)]
    if limit > 1:
        assert not set(lost) & set(few)
