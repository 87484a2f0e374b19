"""What operators type: digests and block keys."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvpool.cli.naming import block_key, full_digest, known_digests
from kvpool.errors import InvalidRequest
from tests.support.stats import node_stats
from tests.unit.cli.answers import CLUSTER, DIGEST, ENTRY, STATS

digests = st.text("0123456789abcdef", min_size=32, max_size=32)


@given(
    known=st.sets(digests, min_size=1, max_size=6),
    length=st.integers(4, 32),
    upper=st.booleans(),
    data=st.data(),
)
def test_a_unique_beginning_of_a_digest_is_enough(known, length, upper, data):
    digest = data.draw(st.sampled_from(sorted(known)))
    text = digest[:length].upper() if upper else digest[:length]
    alike = [one for one in known if one[:length] == digest[:length]]
    if len(alike) == 1:
        assert full_digest(text, known).hex() == digest
    else:
        with pytest.raises(InvalidRequest, match="give more digits"):
            full_digest(text, known)


def test_beginnings_that_several_have():
    known = [f"abcd{n}" + "0" * 27 for n in range(8)]
    with pytest.raises(InvalidRequest, match=r"^abcd is the beginning of .* and 3 more: give more"):
        full_digest("abcd", known)
    assert full_digest("abcd7", known).hex() == known[7]


def test_whole_digests_need_not_be_known():
    assert full_digest("AB" * 16, []) == b"\xab" * 16


@pytest.mark.parametrize("text", ["", "abc", "xyzw", "0x12", "ab cd", "a" * 33, "٣٣٣٣", "abcd\n"])
def test_what_is_no_digest(text):
    with pytest.raises(InvalidRequest, match=r"4 to 32 hex digits .*kvpool namespaces"):
        full_digest(text, ["a" * 32])


def test_a_digest_that_nobody_knows():
    with pytest.raises(InvalidRequest, match="no namespace of this tenant begins with beef"):
        full_digest("beef", ["a" * 32])


def test_a_tenant_names_its_own_namespaces_only():
    foreign = ENTRY | {"tenant": "blue", "digest": "e" * 32}
    there = ENTRY | {"digest": "d" * 32}
    known = CLUSTER | {"namespaces": [foreign, there]}
    assert known_digests(known, node_stats(**STATS), "red") == {DIGEST, "d" * 32}


@given(st.binary(min_size=16, max_size=16))
def test_block_keys(key):
    assert block_key(key.hex()) == block_key(key.hex().upper()) == key


@pytest.mark.parametrize("text", ["", "00" * 15, "00" * 17, "0g" * 16, " " * 32, "00 " * 10 + "00"])
def test_what_is_no_block_key(text):
    with pytest.raises(InvalidRequest, match="32 hex digits"):
        block_key(text)
