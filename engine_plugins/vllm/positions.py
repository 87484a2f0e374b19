"""How a model in memory turns positions into rotations, as a fact of its KV.

An engine may choose rotations by more than the model's configuration: vLLM takes the long or the short factors of LongRoPE
by the longest prompt that it allows. So the modules are asked for the rotations themselves. Positions without rotations
are covered by other facts: learned ones are weights, slopes (ALiBi) and windows follow from the configuration.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.nn import Module

POSITIONS = (1, 2, 3, 4, 8, 16, 32, 64, 100, 128, 256, 512, 1024)
"""Those that are looked at, where a table has them: few enough that tables of all lengths do."""
_ROTARY = re.compile(r"rotary|rope|cos_sin|inv_freq|freqs", re.IGNORECASE)


def rotations(models: Iterable[Module], dtype: torch.dtype) -> list[str]:
    """Return a digest for each different rotation in the models, sorted. dtype: in which they compute."""
    modules = {id(each): each for model in models for each in model.modules()}
    found = {_digest(each, tables, dtype) for each in modules.values() if (tables := _tables(each))}
    return sorted(found)


def _tables(module: Any) -> list[Tensor]:
    """Return what a rotary module has computed at its start; empty for other modules."""
    buffers = dict(module.named_buffers(recurse=False))
    names = [name for name in module._non_persistent_buffers_set if name in buffers]
    if not _ROTARY.search(" ".join([type(module).__name__, *names])):
        return []
    return [
        buffers[name]
        for name in sorted(names)
        if (buffers[name].is_floating_point() or buffers[name].is_complex()) and buffers[name].dim()
    ]


def _digest(module: Any, tables: list[Tensor], dtype: torch.dtype) -> str:
    import torch

    total = hashlib.sha256()
    with torch.no_grad():
        try:
            values = _rotated(module, tables)
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
