"""What the roster says of models follows the catalog's engines."""

from dataclasses import replace
from typing import Any

from kvpool.router.engines.engine_roster import EngineRoster
from kvpool.router.upstream.specs import EngineSpec


class Catalog:
    def __init__(self, *specs: EngineSpec) -> None:
        self.engines = {spec.name: spec for spec in specs}


def engine(name: str, **more: Any) -> EngineSpec:
    return EngineSpec(f"http://{name}:1", name=name, **more)


def roster_of(catalog: Catalog) -> EngineRoster:
    nothing: Any = None
    return EngineRoster(nothing, nothing, catalog, nothing, nothing, nothing)


def test_engines_by_model():
    catalog = Catalog(
        engine("a", model="m", models=("m", "lora"), kind="big", max_len=100),
        engine("b", model="m", models=("m",), kind="big", max_len=200),
        engine("c", model="n", kind="small"),
        engine("d"),
    )
    roster = roster_of(catalog)
    assert roster.models.names() == ("m", "lora", "n")
    assert roster.models.lengths() == {"m": 200, "lora": 100, "n": 0}
    assert roster.models.among("m") == (frozenset({"big"}), None)
    assert roster.models.among("lora") == (frozenset({"big"}), frozenset({"a"}))
    for unknown in ("other", ""):
        assert roster.models.longest(unknown) == 0
        assert roster.models.among(unknown) == (frozenset(), None)


def test_every_change_of_an_engine_counts():
    first = engine("a", model="m", models=("m",), kind="big", max_len=100)
    catalog = Catalog(first)
    roster = roster_of(catalog)
    assert (roster.models.names(), roster.models.longest("m"), roster.models.longest("n")) == (
        ("m",),
        100,
        0,
    )
    catalog.engines["a"] = replace(first, models=("m", "n"), max_len=300)
    assert (roster.models.names(), roster.models.longest("m"), roster.models.longest("n")) == (
        ("m", "n"),
        300,
        300,
    )
    catalog.engines["b"] = engine("b", model="n", kind="big", max_len=400)
    assert roster.models.longest("n") == 400
    assert roster.models.among("m") == (frozenset({"big"}), frozenset({"a"}))
    del catalog.engines["a"]
    assert (roster.models.names(), roster.models.longest("m"), roster.models.longest("n")) == (
        ("n",),
        0,
        400,
    )
