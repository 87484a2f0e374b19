"""SGLang's HiCache on a machine without a GPU: what calls CUDA is replaced by the same in torch; all else is real.

With this folder on PYTHONPATH, SGLang loads `register` as a plugin in each of its processes. It replaces the
registration of host memory with CUDA, which only makes copies faster; the kernels that copy between the device's pool
and the host's; and the memory that SGLang leaves free for others, which is more than a small machine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def register() -> None:
    """Replace them in this process. A second time it does nothing."""
    from sglang.srt.layers.rotary_embedding import base as rotary
    from sglang.srt.mem_cache.pool_host import base, common, mha, mla

    if getattr(base, "_kvpool_cpu", False):
        return
    base._kvpool_cpu = True
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    common._cuda_host_register = _register_nothing
    rotary._is_cpu = True  # else it takes a kernel from vLLM, which it then does not call
    for module in (mha, mla):
        module.transfer_kv_direct = transfer_kv_direct
        module.transfer_kv_all_layer_direct_lf_pf = transfer_kv_all_layer_direct_lf_pf
        module.transfer_kv_per_layer_direct_pf_lf = transfer_kv_per_layer_direct_pf_lf
    make = base.HostKVCache.__init__

    def make_unpinned(self: Any, *arguments: Any, **options: Any) -> None:
        options["pin_memory"] = False
        make(self, *arguments, **options)

    base.HostKVCache.__init__ = make_unpinned


def _register_nothing(*_: Any, **__: Any) -> None:
    """In place of cudaHostRegister."""


def transfer_kv_direct(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Tokens of each layer from one pool to the other, both with one tensor a layer."""
    for source, destination in zip(src_layers, dst_layers, strict=True):
        destination[dst_indices] = source[src_indices]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """All layers of the device into pages of the host, in which the layers lie behind each other."""
    layers = len(src_ptrs) // len(dst_ptrs)
    tokens = src_indices.view(-1, page_size)
    pages = dst_indices.view(-1, page_size)[:, 0] // page_size
    for index, source in enumerate(src_ptrs):
        dst_ptrs[index // layers][pages, index % layers] = source[tokens]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of the host's pages onto the device."""
    pages = src_indices.view(-1, page_size)[:, 0] // page_size
    for source, destination in zip(src_ptrs, dst_ptrs, strict=True):
        destination[dst_indices] = source[pages, layer_id].flatten(0, 1)
