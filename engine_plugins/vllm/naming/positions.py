"""How a model in memory turns positions into rotations, as a fact of its KV.

An engine may choose rotations by more than the model's configuration: vLLM takes the long or the short factors of LongRoPE
by the longest prompt that it allows. So the modules are asked for the rotations themselves, and whether they scale queries by
their positions, which vLLM decides for Llama 4 by that prompt or by the generation config. Positions without either
are covered by other facts: learned ones are weights, slopes (ALiBi) and windows follow from the configuration.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

POSITIONS = (1, 2, 3, 4, 8, 16, 32, 64)
"""Positions that are looked at: small enough that a table has all of them, whatever its length."""
TEMPERATURE = "attn_temperature_tuning"
_ROTARY = re.compile(r"rotary|rope|cos_sin|inv_freq|freqs", re.IGNORECASE)


def rotations(models: Iterable[Module], dtype: torch.dtype) -> list[str]:
    """Return a digest for each different rotation in the models, and `TEMPERATURE` if they scale queries; sorted.

    dtype: in which the models compute.
    """
    modules = {id(each): each for model in models for each in _with_kv(model)}
    found = {_digest(each, tables, dtype) for each in modules.values() if (tables := _tables(each))}
    if any(getattr(each, TEMPERATURE, False) for each in modules.values()):
        found.add(TEMPERATURE)
    return sorted(found)


def _with_kv(module: Module) -> Iterator[Module]:
    """Yield modules without those of towers for media, which vLLM leaves out if it is told to serve text only."""
    yield module
    language = getattr(module, "_language_model_names", None)
    towers = getattr(module, "_tower_model_names", ())
    # vLLM may mark modules that are no direct children.
    inside = module.named_modules(remove_duplicate=False) if language else module.named_children()
    for name, each in inside:
        if each is not module and (name in language if language else name not in towers):
            yield from _with_kv(each)


def _tables(module: Any) -> list[Tensor]:
    """Return what a rotary module has computed at its start; empty for other modules."""
    buffers = dict(module.named_buffers(recurse=False))
    names = [name for name in module._non_persistent_buffers_set if name in buffers]
    if not _ROTARY.search(" ".join([type(module).__name__, *names])):
        return []
    tables = [
        buffers[name]
        for name in sorted(names)
        if (buffers[name].is_floating_point() or buffers[name].is_complex()) and buffers[name].dim()
    ]
    frequencies = [each for each in tables if each.dim() == 1]
    return frequencies if frequencies and _is_trained(module) else tables


def _is_trained(module: Module) -> bool:
    """Return whether tables may come from the module's own weights, of which each rank has some heads (FoPE)."""
    return next(module.parameters(recurse=False), None) is not None


def _digest(module: Any, tables: list[Tensor], dtype: torch.dtype) -> str:
    import torch

    total = hashlib.sha256()
    with torch.no_grad():
        try:
            values = tables if _is_trained(module) else _rotated(module, tables)
        except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError, IndexError):
            # It takes other arguments, as those of vision towers do.
            values = [_rows(table) for table in tables]
        for each in values:
            # Kernels differ in the precision of their tables; what they compute with these is rounded to `dtype`.
            real = torch.view_as_real(each) if each.is_complex() else each
            total.update((real.to(dtype) + 0.0).contiguous().view(torch.uint8).cpu().numpy())
    return total.hexdigest()[:32]


def _rotated(module: Any, tables: list[Tensor]) -> list[Tensor]:
    """Return unit vectors turned as the module turns queries and keys, at each of the positions."""
    import torch

    rotate = getattr(module, "forward_native", module)
    table = tables[0]
    # One of two dimensions that are turned together is 1, the other 0, whether these are neighbours or half the width
    # apart: the result is the table's values, without an error of rounding.
    each = torch.arange(module.head_size, device=table.device) % module.rotary_dim
    first = (each % 2 == 0) ^ (each >= module.rotary_dim // 2)
    found = []
    # Some tables are twice as long as the positions.
    for position in _within(min(len(each) for each in tables) // 2):
        at = torch.tensor([position], device=table.device)
        for unit in (first, ~first):
            turned = unit.to(table.dtype).unsqueeze(0)
            found += [each.flatten() for each in rotate(at, turned.clone(), turned.clone())]
    return found


def _rows(table: Tensor) -> Tensor:
    """Return a table's rows at the positions, or the whole of what is no table of positions."""
    return table if table.dim() == 1 else table[_within(len(table))]


def _within(length: int) -> list[int]:
    return [position for position in POSITIONS if position < length]
