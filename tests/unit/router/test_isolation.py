"""Isolation: the salt of a request follows from its tenant's region, and all else of its body stays."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.router.http.bodies import BadRequest, Body, Kind, parse, prompt_only, segment
from kvpool.router.http.isolation import Isolation

SECRET = b"a secret of the routers"
REGIONS = {"red": "shop", "blue": "shop", "green": "shop2"}


def body(**fields: Any) -> Body:
    raw = json.dumps({"model": "m", "prompt": [1, 2, 3]} | fields).encode()
    return parse(Kind.COMPLETIONS, raw, ["m"])


def salt_of(tenant: str, own: Any = None) -> Any:
    made = Isolation(SECRET, REGIONS).salted(
        body(**{} if own is None else {"cache_salt": own}), tenant
    )
    said = json.loads(made.raw)
    assert said == made.value, "the engine reads what the router hashes"
    return said["cache_salt"]


def test_a_region_is_shared_and_a_tenant_is_alone() -> None:
    assert salt_of("red") == salt_of("blue")
    alone = {
        salt_of(tenant) for tenant in ("red", "green", "gold", "silver", "", "shop", "region shop")
    }
    assert len(alone) == 7


def test_a_tenants_name_is_no_region() -> None:
    regions = {"red": "tenant gold", "blue": "gold"}
    isolation = Isolation(SECRET, regions)
    salts = {
        isolation.salted(body(), tenant).value["cache_salt"] for tenant in ("red", "blue", "gold")
    }
    assert len(salts) == 3


def test_the_salt_by_its_formula() -> None:
    expected = hmac.new(SECRET, b"region shop\0mine", hashlib.sha256).hexdigest()
    assert salt_of("red", "mine") == expected
    expected = hmac.new(SECRET, b"tenant gold\0", hashlib.sha256).hexdigest()
    assert salt_of("gold") == expected


@pytest.mark.parametrize("kind", [kind for kind in Kind if not kind.has_tokens])
def test_paths_whose_caches_engines_do_not_salt_are_refused(kind: Kind) -> None:
    raw = json.dumps({"model": "m", "input": "x", "messages": []}).encode()
    with pytest.raises(BadRequest, match="isolated"):
        Isolation(SECRET, REGIONS).salted(parse(kind, raw, ["m"]), "red")


@given(st.text(max_size=20), st.text(max_size=20), st.text(min_size=1, max_size=20))
def test_no_choice_of_a_salt_reaches_another_region(one: str, other: str, own: str) -> None:
    """The client's salt is all that a tenant can choose."""
    isolation = Isolation(SECRET, {})
    sent = {"cache_salt": own}
    first = isolation.salted(body(**sent), one).value["cache_salt"]
    second = isolation.salted(body(), other).value["cache_salt"]
    same = f"tenant {one}\0{own}" == f"tenant {other}\0"
    assert (first == second) == same
    assert not same or one != other, "names of tenants have no NUL"


@pytest.mark.parametrize("wrong", ["", 7, 0, [], ["x"], {}, True, False, 1.5])
def test_what_an_engine_might_not_take_for_a_salt_is_refused(wrong: Any) -> None:
    with pytest.raises(BadRequest, match="cache_salt must be a text"):
        salt_of("red", wrong)


def test_a_salt_that_is_given_twice_is_replaced() -> None:
    raw = b'{"model":"m","cache_salt":"x","prompt":[1],"cache_salt":"y"}'
    made = Isolation(SECRET, {}).salted(parse(Kind.COMPLETIONS, raw, ["m"]), "red")
    assert json.loads(made.raw)["cache_salt"] == made.value["cache_salt"]
    assert made.raw.startswith(raw[:-1])


def test_names_of_media_are_a_regions_own() -> None:
    isolation = Isolation(SECRET, REGIONS)
    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": None, "uuid": "photo"},
        {"type": "image_url", "image_url": {"url": "data:x"}},
        "a text",
    ]
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": parts}]
    raw = json.dumps({"model": "m", "messages": messages}).encode()
    seen = {}
    for tenant in ("red", "blue", "gold"):
        made = isolation.salted(parse(Kind.CHAT, raw, ["m"]), tenant)
        said = json.loads(made.raw)
        assert said == made.value
        first, (text, named, plain, word) = said["messages"][0], said["messages"][1]["content"]
        assert (first, text, plain, word) == (messages[0], parts[0], parts[2], parts[3])
        assert named | {"uuid": "photo"} == parts[1]
        seen[tenant] = named["uuid"]
        assert named["uuid"] != said["cache_salt"]
    assert seen["red"] == seen["blue"] != seen["gold"]
    raw = json.dumps({"model": "m", "messages": [{"content": [{"uuid": 7}]}]}).encode()
    with pytest.raises(BadRequest, match="uuid"):
        isolation.salted(parse(Kind.CHAT, raw, ["m"]), "red")


@pytest.mark.parametrize("name", ["kv_transfer_params", "ec_transfer_params"])
def test_what_leads_past_the_prefix_cache_is_refused(name: str) -> None:
    isolation = Isolation(SECRET, {})
    with pytest.raises(BadRequest, match=name):
        isolation.salted(body(**{name: {"remote_block_ids": [1]}}), "red")
    assert isolation.salted(body(**{name: None}), "red").value["cache_salt"]


def test_all_that_is_sent_has_it() -> None:
    made = Isolation(SECRET, {}).salted(body(), "red")
    salt = made.value["cache_salt"]
    for sent in (made.raw, prompt_only(made), segment(made, [1, 2])):
        assert json.loads(sent)["cache_salt"] == salt
