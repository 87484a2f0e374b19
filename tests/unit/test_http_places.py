"""Who has a place at an HTTP listener: against a list that is searched anew each time."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvpool.http_listeners import OF_AN_ADDRESS, Places

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
        strangers = [(one, its) for one, its, known in self.here if not known]
        of_it = [one for one, its in strangers if its == address]
        if address and len(of_it) >= max(1, self.limit // OF_AN_ADDRESS):
            return of_it[0]
        if len(self.here) < self.limit:
            return None
        if strangers:
            return strangers[0][0]
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
    places: Places[int] = Places(limit)
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
        strangers = Counter(its for _, its, known in model.here if its and not known)
        assert all(n <= max(1, limit // OF_AN_ADDRESS) for n in strangers.values())
