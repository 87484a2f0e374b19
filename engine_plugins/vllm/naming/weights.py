"""The weights that a rank has in its memory, to the last bit.

They depend on how ranks share a model, so they tell whether weights have changed, and which engines of one shape have
changed to the same. Those of a checkpoint's files, the same for engines of all shapes, are in `checkpoint.py`.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

log = logging.getLogger("kvpool.vllm")

WORD = 8
ROW_WORDS = 4096
PROBED_INPUTS, PROBES_MAX = 8, 512
OPTIONAL = ("zp", "zero", "g_idx")
"""In names of integer parameters that kernels leave empty if a checkpoint has none: zero points, orders of groups."""


def projected_heads(models: Iterable[Module], layers: Mapping[str, Any]) -> dict[str, int]:
    """Of attention layers by name, the KV heads of all ranks together, as the projections beside them say.

    Without those that have none beside them, or several that differ.
    """
    names = {id(layer): name for name, layer in layers.items()}
    found: dict[str, set[int]] = {}
    for module in (each for model in models for each in model.modules()):
        children = list(module.children())
        # LoRA wraps projections.
        projections = [getattr(child, "base_layer", child) for child in children]
        heads = {
            each.total_num_kv_heads for each in projections if hasattr(each, "total_num_kv_heads")
        }
        for child in children:
            if id(child) in names:
                found.setdefault(names[id(child)], set()).update(heads)
    return {name: heads.pop() for name, heads in found.items() if len(heads) == 1}


class Loaded:
    """The weights of one rank. For the engine's thread, between its forward passes."""

    def __init__(self, models: Iterable[Module]) -> None:
        self._models = list(models)

    def digest(self) -> str:
        """Of all bytes of all parameters, and of what else a checkpoint sets; empty if some cannot be seen.

        Reads the weights twice, on their device, and moves little. Linear layers whose kernels keep the weights in a
        form of their own, as vLLM's do on CPUs, are known by what they compute, to within its rounding.
        """
        import torch

        total = hashlib.sha256()
        sums: list[Tensor] = []
        seen = 0
        for model in self._models:
            for name, tensor in _tensors(model):
                if tensor.is_meta or not tensor.numel():
                    return ""
                seen += 1
                total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
                sums += _sums(tensor)
        if not seen:
            return ""
        for device in sorted({str(each.device) for each in sums}):
            together = torch.cat([each for each in sums if str(each.device) == device])
            total.update(together.cpu().numpy().tobytes())
        return total.hexdigest()[:32]


def _tensors(model: Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and buffers that are saved with them: others are what an engine works with."""
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            tensor: Tensor | None = parameter
            if not parameter.numel():
                tensor = _instead(module, name, parameter)
            if tensor is not None:
                yield from _inner(f"{prefix}.{name}", tensor)
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield from _inner(f"{prefix}.{name}", buffer)


def _instead(layer: Any, name: str, parameter: Tensor) -> Tensor | None:
    """What tells of an empty parameter: what its layer computes, or None if there is nothing to tell.

    The parameter itself, empty as it is, if its weights are out of sight.
    """
    if not parameter.is_floating_point():
        others = any(other.numel() for other in layer.parameters(recurse=False))
        return None if others and any(part in name for part in OPTIONAL) else parameter
    if name != "weight" or not hasattr(layer, "cpu_linear"):
        return parameter
    try:
        return _computed(layer, parameter)
    except (RuntimeError, AttributeError, TypeError, ValueError, AssertionError) as error:
        log.warning("weights of a %s cannot be seen: %r", type(layer).__name__, error)
        return parameter


def _computed(layer: Any, parameter: Tensor) -> Tensor:
    """What a linear layer makes of vectors that have few inputs each, so that no change drowns in their sum."""
    import torch

    # A layer that all ranks have whole says no more than its size.
    whole = not hasattr(layer, "input_size_per_partition")
    inputs = layer.input_size if whole else layer.input_size_per_partition
    rows = min(-(-inputs // PROBED_INPUTS), PROBES_MAX)
    probes = torch.zeros(rows, inputs, dtype=parameter.dtype, device=parameter.device)
    each = torch.arange(inputs)
    probes[each % rows, each] = 1 - 2 * (each // rows % 2).to(parameter.dtype)
    with torch.inference_mode():
        computed: Tensor = layer.quant_method.apply(layer, probes)
    return computed


def _inner(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that have the bytes, where quantisation has wrapped several into one."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _inner(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor.detach()


def _sums(tensor: Tensor) -> list[Tensor]:
    """Sums of a tensor's words by row and by column of a table that they fill in their order.

    Any one change is another sum, and so is an exchange of two words, or of two rows.
    """
    import torch

    flat = _in_memory(tensor)
    whole = len(flat) // WORD
    words = [flat[: whole * WORD].view(torch.int64)] if flat.storage_offset() % WORD == 0 else []
    rest = flat[whole * WORD :] if words else flat
    found = [rest.to(torch.int64)] if len(rest) < ROW_WORDS else []
    if not found:
        words.append(rest.to(torch.int64))
    for every in words:
        rows = len(every) // ROW_WORDS
        table, last = every[: rows * ROW_WORDS].view(rows, ROW_WORDS), every[rows * ROW_WORDS :]
        found.append(last)
        if rows:
            found += [table.sum(0), table.sum(1)]
    return found


def _in_memory(tensor: Tensor) -> Tensor:
    """Its bytes in the order in which they lie, without a copy where they lie together."""
    import torch

    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    flat = tensor.permute(order).contiguous().view(-1)
    return flat.view(torch.uint8)
