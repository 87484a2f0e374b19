"""What one rank stores: its layers' paged KV as vLLM registers it, cut into the parts of `shards.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpool.engine_plugins.vllm.config import Codec, PluginConfig
from kvpool.engine_plugins.vllm.layout.codecs import (
    CodecPages,
    HeadLayout,
    head_layout,
    shard_layout,
)
from kvpool.engine_plugins.vllm.layout.pages import (
    GroupPages,
    Pages,
    PartPages,
    ShardRows,
    byte_rows,
    shard_rows,
)
from kvpool.engine_plugins.vllm.layout.shards import (
    CONTENT_BACKENDS,
    HALVES_BACKENDS,
    Held,
    Kind,
    Rank,
    Share,
    by_rank,
    cut_layers,
    layer_order,
    share,
)
from kvpool.engine_plugins.vllm.naming.namespace import STATE_SPECS
from kvpool.engine_plugins.vllm.plan import GroupRule
from kvpool.errors import ConfigError

MakePages = Callable[[Sequence[Any], int], Pages]
"""Makes pages of rows (uint8 tensors), and of the step from a block's row to the next one's."""


@dataclass(frozen=True)
class Layer:
    """A layer's paged KV on this rank.

    tensor: logical (blocks or kernel blocks, heads, tokens, content). specs: vLLM's, of the layer.
    projected: the KV heads that its projection has on all ranks together, if that is seen.
    """

    name: str
    tensor: Any
    spec: Any
    backend: str
    projected: int | None = None

    @property
    def kind(self) -> Kind:
        if type(self.spec).__name__ in STATE_SPECS:
            return Kind.RANKS  # its parts are cut at other places than heads
        if "MLA" in type(self.spec).__name__ and self.tensor.shape[1] == 1:
            return Kind.LATENT
        plain = (
            self.spec.num_head_slots is None
            and self.spec.state_content_bytes is None
            and self.tensor.shape[1] == self.spec.num_kv_heads
        )
        if self.backend in CONTENT_BACKENDS and plain:
            return Kind.CONTENT
        if self.backend in HALVES_BACKENDS and plain:
            return Kind.HALVES
        return Kind.RANKS


@dataclass(frozen=True)
class StoredGroup:
    """One stored group on this rank.

    pieces: its layers, in their order, by the piece that they are in. why: it is stored by rank; else empty.
    """

    kind: Kind
    share: Share
    pieces: Sequence[Sequence[Layer]]
    blocks: int
    codec: Codec
    facts: Mapping[str, Any]
    why: str = ""

    def held(self) -> Held:
        """What the rank reports of it."""
        layers = {}
        parts = {}
        for piece, names in zip(self.share.pieces, self.pieces, strict=True):
            sizes = [self._row_bytes(layer) for layer in names]
            layers[piece] = [
                (layer.name, self._heads(layer), nbytes)
                for layer, nbytes in zip(names, sizes, strict=True)
            ]
            for shard in self.share.shards:
                parts[self.share.part(piece, shard)] = sum(sizes)
        return Held(self.kind, self.share.cut, parts, layers, self.facts, self.why)

    def layers(self) -> list[Layer]:
        return [layer for layers in self.pieces for layer in layers]

    def layer_bytes(self) -> list[tuple[str, int]]:
        """Of each layer, what the rank stores of a block."""
        shards = len(self.share.shards)
        return [(layer.name, shards * self._row_bytes(layer)) for layer in self.layers()]

    def pages(self, first: int, make: MakePages, count: Callable[..., None]) -> GroupPages:
        """Its parts, which begin at part number `first` of the namespace."""
        parts: list[PartPages] = []
        for piece, layers in zip(self.share.pieces, self.pieces, strict=True):
            shards = [first + self.share.part(piece, shard) for shard in self.share.shards]
            if self.kind is Kind.RANKS:
                rows = [byte_rows(layer.tensor, self.blocks) for layer in layers]
                pages = self._made(make, rows, [self._whole(layer) for layer in layers], 1, count)
                parts.append(PartPages(shards[0], pages))
                continue
            parts += self._cut(layers, shards, make, count)
        return GroupPages(parts, self.share.turn, self.share.turns)

    def _cut(
        self,
        layers: Sequence[Layer],
        shards: Sequence[int],
        make: MakePages,
        count: Callable[..., None],
    ) -> list[PartPages]:
        """Parts of one piece. All in the same pages, unless rows are not spaced alike in all layers."""
        layouts = [self._layout(layer) for layer in layers]
        whole = [(layer.tensor, self.rows(layer.tensor, len(shards))) for layer in layers]
        if len({(rows.across, rows.along) for _, rows in whole}) == 1:
            across, along = whole[0][1].across, whole[0][1].along
            views = [rows.of(tensor) for tensor, rows in whole]
            pages = self._made(make, views, layouts, across, count)
            return [PartPages(part, pages, across, at * along) for at, part in enumerate(shards)]
        parts = []
        for at, part in enumerate(shards):
            views = []
            for layer in layers:
                size = layer.tensor.shape[1] // len(shards)
                own = layer.tensor.narrow(1, at * size, size)
                views.append(self.rows(own, 1).of(own))
            parts.append(PartPages(part, self._made(make, views, layouts, 1, count)))
        return parts

    def rows(self, tensor: Any, shards: int) -> ShardRows:
        return shard_rows(
            tensor.shape,
            tensor.stride(),
            tensor.element_size(),
            blocks=self.blocks,
            shards=shards,
            dense_heads=self.kind is Kind.HALVES,
        )

    def _made(
        self,
        make: MakePages,
        rows: Sequence[Any],
        layouts: Sequence[HeadLayout | None],
        step: int,
        count: Callable[..., None],
    ) -> Pages:
        encoded = [layout for layout in layouts if layout is not None]
        if not encoded:
            return make(rows, step)
        layers = list(zip(rows, encoded, strict=True))
        return CodecPages(layers, self.codec, lambda each: make([each], 1), count)

    def _heads(self, layer: Layer) -> int:
        """Those of all shards together."""
        return int(layer.tensor.shape[1]) // len(self.share.shards) * self.share.cut.shards

    def _row_bytes(self, layer: Layer) -> int:
        layout = self._whole(layer) if self.kind is Kind.RANKS else self._layout(layer)
        if layout is not None:
            return layout.encoded_bytes
        nbytes = layer.tensor.numel() * layer.tensor.element_size() // self.blocks
        return int(nbytes) // len(self.share.shards)

    def _layout(self, layer: Layer) -> HeadLayout | None:
        """Of a shard's heads, for a codec."""
        if self.codec is Codec.NONE:
            return None
        size = layer.tensor.shape[1] // len(self.share.shards)
        return shard_layout(layer.tensor, self.blocks, size, halves=self.kind is Kind.HALVES)

    def _whole(self, layer: Layer) -> HeadLayout | None:
        """Of all of the rank's heads, for a codec."""
        if self.codec is Codec.NONE:
            return None
        return head_layout(layer.tensor, self.blocks, layer.backend)


def stored_groups(
    vllm_config: Any,
    kv_cache_config: Any,
    config: PluginConfig,
    rules: Sequence[GroupRule],
    kv_caches: Mapping[str, Any],
    backend_of: Callable[[str], str],
    heads_of: Callable[[str], int | None],
) -> list[StoredGroup]:
    """What this rank stores of each group, in the order of `rules`.

    kv_caches: the layers' tensors; backend_of: the attention backend of one; heads_of: the KV heads that its
    projection has on all ranks together, if it is seen. Raises `ConfigError`.
    """
    parallel = vllm_config.parallel_config
    at = Rank(
        parallel.rank,
        parallel.tensor_parallel_size,
        parallel.prefill_context_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.decode_context_parallel_size,
    )
    total = vllm_config.model_config.get_total_num_kv_heads()
    per_stage, rest = divmod(config.layer_pieces or at.pp, at.pp)
    if rest:
        raise ConfigError(
            f"layer_pieces is {config.layer_pieces}, which {at.pp} pipeline stages cannot share: give all engines a "
            "multiple of their stages"
        )
    stored = []
    for rule in rules:
        group = kv_cache_config.kv_cache_groups[rule.group]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        layers = [
            Layer(
                name,
                kv_caches[name],
                specs.get(name, group.kv_cache_spec),
                backend_of(name),
                heads_of(name),
            )
            for name in sorted(group.layer_names)
            if name in kv_caches
        ]
        if not layers:
            raise ConfigError(
                f"pipeline stage {at.stage} has no layers of cache group {rule.group}: use fewer stages, choose them with "
                "VLLM_PP_LAYER_PARTITION so that each has layers of every group, or serve this model without the "
                "connector"
            )
        if len(layers) < per_stage:
            raise ConfigError(
                f"pipeline stage {at.stage} has {len(layers)} layers of cache group {rule.group}, which layer_pieces cuts "
                f"into {per_stage} pieces: give all engines that share blocks a smaller multiple of their stages"
            )
        stored.append(
            _stored(
                at,
                layers,
                total,
                per_stage,
                kv_cache_config.num_blocks,
                config,
                parallel.cp_kv_cache_interleave_size,
            )
        )
    return stored


def _stored(
    at: Rank,
    layers: list[Layer],
    total: int,
    pieces: int,
    blocks: int,
    config: PluginConfig,
    interleave: int,
) -> StoredGroup:
    """One group, canonical if it can be. layers: by name."""

    def group_by_rank(why: str) -> StoredGroup:
        return StoredGroup(Kind.RANKS, by_rank(at), [layers], blocks, config.codec, {}, why)

    kinds = {layer.kind for layer in layers}
    if kinds != {layers[0].kind} or Kind.RANKS in kinds:
        names = ", ".join(sorted({layer.backend for layer in layers}))
        return group_by_rank(f"where heads are in the KV of {names} is not known")
    kind = layers[0].kind

    def layer_share(layer: Layer) -> Share | str:
        heads = 1 if kind is Kind.LATENT else _total_heads(layer, total, at.tp)
        if heads is None:
            return f"how many KV heads all ranks together have in {layer.name} is not known"
        return share(
            at,
            heads=heads,
            local_heads=layer.tensor.shape[1],
            pieces=pieces,
            sharded_tokens=layer.spec.dcp_sharded,
        )

    shares = [layer_share(layer) for layer in layers]
    mine = next((each for each in shares if isinstance(each, str)), shares[0])
    if isinstance(mine, str):
        return group_by_rank(mine)
    if any(each != mine for each in shares):
        return group_by_rank("its layers have other shards")
    ordered = sorted(layers, key=lambda layer: layer_order(layer.name))
    facts = _facts(kind, ordered, mine.cut.classes > 1, interleave)
    group = StoredGroup(kind, mine, cut_layers(ordered, pieces), blocks, config.codec, facts)
    try:
        for layer in layers:
            group.rows(layer.tensor, len(mine.shards))
    except ValueError as error:
        return group_by_rank(str(error))
    return group


def _facts(
    kind: Kind, layers: Sequence[Layer], context_parallel: bool, interleave: int
) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    if kind is not Kind.CONTENT:
        # Sparse attention's indexers keep the values of a kernel block's tokens together, then their scales.
        facts["kernel_tokens"] = sorted({int(layer.tensor.shape[2]) for layer in layers})
    packed = [
        layer
        for layer in layers
        if layer.spec.kv_quant_mode
        or layer.spec.state_content_bytes
        or (kind is Kind.LATENT and not layer.tensor.is_floating_point())
    ]
    if packed:
        facts["backends"] = sorted({layer.backend for layer in packed})
    if context_parallel:
        facts["interleave"] = interleave
    return facts


def _total_heads(layer: Layer, model: int, tp: int) -> int | None:
    """The KV heads of a layer on all ranks together; None: not known.

    model: what its configuration says, which is not true of all layers (draft models, windows with heads of their
    own). It counts where the ranks have as many together, so that none of them are taken for having the same heads.
    """
    if layer.projected is not None:
        return layer.projected
    all_ranks = int(layer.tensor.shape[1]) * tp
    return all_ranks if tp == 1 or all_ranks == model else None
