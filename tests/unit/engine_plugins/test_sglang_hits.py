"""Which prefixes can be restored, against their definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpool.engine_plugins.sglang.hits import lengths_of_all, lengths_of_trailing, run

PAGES = st.lists(st.booleans(), max_size=12)


@given(PAGES)
def test_lengths_of_all(there: list[bool]) -> None:
    found = lengths_of_all(np.array(there, bool))
    assert found == [n for n in range(1, len(there) + 1) if all(there[:n])]
    assert run(np.array(there, bool)) == len(found)


@given(PAGES, st.integers(0, 5))
def test_lengths_of_trailing(there: list[bool], trailing: int) -> None:
    window = max(1, trailing)
    assert lengths_of_trailing(np.array(there, bool), trailing) == [
        n for n in range(1, len(there) + 1) if all(there[max(0, n - window) : n])
    ]
