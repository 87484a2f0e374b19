"""What vLLM does not hand to its plugins, from the functions of vLLM that are calling them.

A connector is given layers without the model that they are in, a tier excerpts of its engine's configuration. The functions
that call them have both. Nothing else of the process is looked at.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.nn import Module

DEPTH = 3
"""How far from its runner a model is: `runner.model`, `runner.drafter.model`, `runner.drafter.model.runnable`."""


def callers() -> Iterator[Mapping[str, Any]]:
    """Yield the local names of the functions that are being executed in this thread, the innermost first."""
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        yield outer.f_locals
        frame = outer


def models_with(layers: Collection[Module]) -> list[Module]:
    """Return the whole models, target and draft, that hold these layers: those of the model runner that is calling.

    A layer that none of its models holds stands for itself. Empty if the runner, or its models, are not found.
    """
    wanted = {id(layer) for layer in layers}
    found: list[Module] = []
    for names in callers():
        held = [(module, set(map(id, module.modules()))) for module in _held(names)]
        # A runner may also name a part of a model: the whole has more modules.
        for module, inside in sorted(held, key=lambda one: -len(one[1])):
            if wanted & inside:
                found.append(module)
                wanted -= inside
        if not wanted:
            return found
    return [*found, *(layer for layer in layers if id(layer) in wanted)] if found else []


def _held(names: Mapping[str, Any]) -> list[Module]:
    """Return the modules that the object whose method it is refers to, directly or through others."""
    from types import ModuleType

    from torch.nn import Module

    modules: dict[int, Module] = {}
    seen: set[int] = set()
    near = [names["self"]] if "self" in names else []
    for _ in range(DEPTH):
        further = []
        for one in near:
            for each in list(getattr(one, "__dict__", {}).values()):
                if id(each) in seen or isinstance(each, (type, ModuleType)):
                    continue
                seen.add(id(each))
                if isinstance(each, Module):
                    modules[id(each)] = each
                else:
                    further.append(each)
        near = further
    return list(modules.values())
