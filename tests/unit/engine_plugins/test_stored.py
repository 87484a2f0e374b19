"""What ranks store: the same bytes whatever their number and their KV's layout, and everybody reads them. Needs torch."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is in the vLLM environment only", allow_module_level=True)

import torch

from kvpool.engine_plugins.vllm.config import Codec
from kvpool.engine_plugins.vllm.naming import namespace
from kvpool.engine_plugins.vllm.plan import GroupRule
from kvpool.errors import ConfigError
from tests.support.paged_ranks import ORDERS, Engine, PagedRanks

pytestmark = pytest.mark.torch
LAYERS, BLOCKS, TOKENS, CONTENT = 4, 6, 8, 16
KEYS = [bytes([1 + i]) * 16 for i in range(4)]
WRITTEN, READ = [2, 3, 5, 1], [0, 4, 2, 3]


def running(pool: Any, engine: Engine, kv: Any) -> PagedRanks:
    return PagedRanks(pool, engine, kv, chunk_bytes=300)


def model_kv(heads: int, seed: int = 0) -> Any:
    draw = torch.Generator().manual_seed(seed)
    shape = (LAYERS, BLOCKS, heads, TOKENS, CONTENT)
    return torch.randn(shape, generator=draw).to(torch.bfloat16)


def stored_parts(pool: Any, nbytes: int) -> dict[tuple[int, bytes], bytes]:
    return {
        (part, key): pool.table[row, :nbytes].tobytes() for (_, part, key), row in pool.rows.items()
    }


def canonical(kv: Any, shards: int, pieces: int = 1) -> dict[tuple[int, bytes], bytes]:
    """What is to be in the pool, of blocks that were saved: by hand."""
    expected = {}
    layers, heads = LAYERS // pieces, kv.shape[2] // shards
    for piece in range(pieces):
        for shard in range(shards):
            own = kv[piece * layers :][:layers, :, shard * heads :][:, :, :heads]
            for key, block in zip(KEYS, WRITTEN, strict=True):
                content = own[:, block].contiguous().view(torch.uint8).numpy().tobytes()
                expected[piece * shards + shard, key] = content
    return expected


def assert_read(pool: Any, engine: Engine, kv: Any) -> None:
    """An engine whose cache is empty reads what is stored, and writes nothing again."""
    reader = running(pool, engine, torch.zeros_like(kv))
    reader.load(KEYS, READ)
    for rank in range(engine.tp * engine.pp):
        wanted = torch.zeros_like(kv)
        wanted[:, READ] = kv[:, WRITTEN]
        assert torch.equal(reader.kv(rank), reader.share(wanted, rank))
    reader.close()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("layout", ORDERS)
@pytest.mark.parametrize(("heads", "shards"), [(8, 8), (2, 2), (24, 8)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_what_is_stored_depends_on_neither_ranks_nor_layout(
    pool: Any, layout: str, heads: int, shards: int, tp: int, on_device: bool
) -> None:
    kv = model_kv(heads)
    engine = Engine(tp=tp, layout=layout, on_device=on_device)
    writer = running(pool, engine, kv)
    assert [group.why for group in writer.groups[0]] == [""]
    writer.save(KEYS, WRITTEN)
    expected = canonical(kv, shards)
    nbytes = len(next(iter(expected.values())))
    assert stored_parts(pool, nbytes) == expected
    assert len(pool.writes) == len(set(pool.writes)) == len(expected), "each is written once"
    writer.close()
    assert_read(pool, engine, kv)


@pytest.mark.parametrize("writer", [1, 2, 4, 8])
@pytest.mark.parametrize("reader", [1, 2, 4, 8])
def test_every_number_of_ranks_reads_what_every_other_wrote(
    pool: Any, writer: int, reader: int
) -> None:
    kv = model_kv(8)
    wrote = running(pool, Engine(tp=writer), kv)
    wrote.save(KEYS, WRITTEN)
    wrote.close()
    assert_read(pool, Engine(tp=reader, layout="LBNHC"), kv)


@pytest.mark.parametrize("kernel_blocks", [1, 2, 4])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_kernel_blocks_do_not_show(pool: Any, kernel_blocks: int, layout: str) -> None:
    kv = model_kv(4)
    wrote = running(pool, Engine(tp=2, layout=layout, kernel_blocks=kernel_blocks), kv)
    wrote.save(KEYS, WRITTEN)
    wrote.close()
    assert stored_parts(pool, len(canonical(kv, 4)[0, KEYS[0]])) == canonical(kv, 4)
    assert_read(pool, Engine(layout=layout, kernel_blocks=kernel_blocks), kv)


def test_packed_keys_stay_whole(pool: Any) -> None:
    kv = model_kv(2)
    wrote = running(pool, Engine(backend="CPU_ATTN"), kv)
    assert wrote.reports[0].held[0].facts == {"kernel_tokens": [TOKENS]}
    wrote.save(KEYS, WRITTEN)
    wrote.close()
    assert_read(pool, Engine(tp=2, backend="CPU_ATTN"), kv)
    tokens_first = running(pool, Engine(tp=1, backend="CPU_ATTN", layout="LBNHC"), kv)
    assert "strides" in tokens_first.groups[0][0].why
    tokens_first.close()


@pytest.mark.parametrize(("heads", "mla"), [(1, True), (1, False), (2, False)])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_with_the_same_kv_write_it_once_and_share_the_work(
    pool: Any, heads: int, mla: bool, tp: int
) -> None:
    kv = model_kv(heads)
    wrote = running(pool, Engine(tp=tp, mla=mla), kv)
    wrote.save(KEYS, WRITTEN)
    writers = [half.counters.take().get("saved_blocks", 0) for half in wrote.halves]
    assert sum(writers) == heads * len(KEYS)
    assert max(writers) == max(1, len(KEYS) * heads // tp)
    assert pool.parents[0, KEYS[2]] == KEYS[1], "the chain is not torn where the turn changes"
    wrote.close()
    assert_read(pool, Engine(tp=1, mla=mla), kv)


def test_latent_vectors_say_how_kernels_lay_them_out(pool: Any) -> None:
    """Indexers' bytes depend on the kernel block and the backend, and look like vectors of bytes."""

    def facts(engine: Engine, kv: Any) -> Any:
        ranks = running(pool, engine, kv)
        ranks.close()
        return ranks.reports[0].held[0].facts

    vectors, opaque = model_kv(1), model_kv(1).view(torch.uint8)
    indexer = Engine(mla=True, backend="DEEPSEEK_V32_INDEXER")
    assert facts(indexer, opaque) == {"kernel_tokens": [TOKENS], "backends": [indexer.backend]}
    assert facts(replace(indexer, kernel_blocks=2), opaque)["kernel_tokens"] == [TOKENS // 2]
    assert facts(Engine(mla=True, backend="TRITON_MLA"), vectors) == {"kernel_tokens": [TOKENS]}


@pytest.mark.parametrize("pieces", [2, 4])
def test_stages_are_pieces_of_layers(pool: Any, pieces: int) -> None:
    kv = model_kv(2)
    wrote = running(pool, Engine(pp=2, tp=2, pieces=pieces), kv)
    wrote.save(KEYS, WRITTEN)
    wrote.close()
    expected = canonical(kv, 2, pieces)
    assert stored_parts(pool, len(expected[0, KEYS[0]])) == expected
    assert_read(pool, Engine(pp=1, pieces=pieces), kv)


def test_stages_that_cannot_share_the_pieces_are_refused(pool: Any) -> None:
    with pytest.raises(ConfigError, match="2 pipeline stages cannot share"):
        running(pool, Engine(pp=2, pieces=3), model_kv(2))
    with pytest.raises(ConfigError, match=r"stage 0 has 2 layers .* 4 pieces: give all"):
        running(pool, Engine(pp=2, pieces=8), model_kv(2))
    with pytest.raises(ConfigError, match=r"has no layers .* VLLM_PP_LAYER_PARTITION"):
        running(pool, Engine(pp=8), model_kv(2))


@pytest.mark.parametrize(
    ("engine", "why"),
    [
        (Engine(backend="ODD_ATTN"), "ODD_ATTN"),
        (Engine(slots=1), "FLASH_ATTN"),
        (Engine(tp=2, dcp=2), "do not share the same KV heads"),
    ],
)
def test_what_is_not_known_is_stored_by_rank(pool: Any, engine: Engine, why: str) -> None:
    kv = model_kv(2)
    wrote = running(pool, engine, kv)
    assert why in wrote.groups[0][0].why
    assert len(wrote.record.parts) == engine.tp
    wrote.save(KEYS, WRITTEN)
    wrote.close()
    assert_read(pool, engine, kv)


@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("model_heads", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_layers_may_have_other_heads_than_the_model_says(
    pool: Any, tp: int, model_heads: int, projected: bool
) -> None:
    """As in draft models, and windows with heads of their own: one head a rank need not be the same on all."""
    kv = model_kv(8)
    engine = Engine(tp=tp, model_heads=model_heads, projected=projected)
    wrote = running(pool, engine, kv)
    known = projected or tp == 1 or model_heads == 8
    assert all(("KV heads" in group.why) != known for (group,) in wrote.groups)
    assert wrote.groups[0][0].share.turns == 1
    wrote.save(KEYS, WRITTEN)
    wrote.close()
    assert_read(pool, engine, kv)


def test_heads_that_may_be_on_all_ranks_are_not_taken_for_it(pool: Any) -> None:
    kv = model_kv(2)
    wrote = running(pool, Engine(tp=8, projected=False), kv)
    assert "model.layers.0.attn" in wrote.groups[0][0].why
    assert len(wrote.record.parts) == 8
    wrote.close()


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
def test_encoded_halves_are_the_same_for_all_ranks(pool: Any, codec: Codec) -> None:
    kv = model_kv(4)
    found = []
    for tp in (1, 2, 4):
        engine = Engine(tp=tp, backend="CPU_ATTN", kernel_blocks=2, codec=codec)
        wrote = running(type(pool)(), engine, kv)
        wrote.save(KEYS, WRITTEN)
        wrote.close()
        found.append(stored_parts(wrote.pool, wrote.record.parts[0].nbytes))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("codec", [Codec.INT8, Codec.FP8])
@pytest.mark.parametrize("writer", [Engine(tp=1), Engine(tp=4, layout="LBNHC")])
def test_encoded_parts_are_the_same_for_all_too(pool: Any, codec: Codec, writer: Engine) -> None:
    kv = model_kv(4)
    found = []
    for each in (writer, Engine(tp=2, layout="BLNHC")):
        wrote = running(type(pool)(), replace(each, codec=codec), kv)
        wrote.save(KEYS, WRITTEN)
        wrote.close()
        found.append(stored_parts(wrote.pool, wrote.record.parts[0].nbytes))
        # A byte an element, and a scale for K and V of each head, beside them.
        assert wrote.record.parts[0].nbytes == LAYERS * (TOKENS * CONTENT + 2 * 4)
    assert found[0] == found[1]
    reader = running(wrote.pool, Engine(tp=4, codec=codec), torch.zeros_like(kv))
    reader.load(KEYS, READ)
    for rank in range(4):
        lost = reader.kv(rank)[:, READ].float() - kv[:, WRITTEN, rank : rank + 1].float()
        assert lost.abs().max() < 0.2
    reader.close()


def test_ranks_that_disagree_are_refused(pool: Any) -> None:
    kv = model_kv(2)
    one, other = running(pool, Engine(tp=2), kv), running(pool, Engine(tp=2, backend="O"), kv)
    with pytest.raises(ConfigError, match="hold their KV differently"):
        namespace.part_specs([GroupRule(0)], [one.reports[0], other.reports[1]])
    longer = replace(one.reports[0].held[0], parts={1: 1})
    with pytest.raises(ConfigError, match="hold the same KV differently"):
        namespace.part_specs(
            [GroupRule(0)], [replace(one.reports[0], held=[longer]), one.reports[1]]
        )
    with pytest.raises(ConfigError, match=r"of the 2 parts .* hold \[0\]"):
        namespace.part_specs([GroupRule(0)], one.reports[:1])
    for each in (one, other):
        each.close()


@pytest.mark.filterwarnings("ignore")  # vLLM and torch warn of their own deprecations
@pytest.mark.parametrize(("heads", "mla"), [(8, False), (2, False), (1, True)])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_the_shards_of_a_layer_are_vllms_canonical_page(
    pool: Any, heads: int, mla: bool, tp: int
) -> None:
    """As vLLM's own offloading derives it from each rank's page, where heads come before tokens."""
    pytest.importorskip("vllm")
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    kv = model_kv(heads)
    wrote = running(pool, Engine(tp=tp, mla=mla), kv)
    wrote.save(KEYS, WRITTEN)
    wrote.close()
    found = stored_parts(pool, wrote.record.parts[0].nbytes)
    spec = (MLAAttentionSpec if mla else FullAttentionSpec)(
        block_size=TOKENS,
        num_kv_heads=max(1, heads // tp),
        head_size=CONTENT if mla else CONTENT // 2,
        dtype=torch.bfloat16,
    )
    part_bytes = len(found[0, KEYS[0]]) // LAYERS
    for layer, (key, block) in itertools.product(range(LAYERS), zip(KEYS, WRITTEN, strict=True)):
        own = slice(layer * part_bytes, (layer + 1) * part_bytes)
        page = b"".join(found[shard, key][own] for shard in range(len(wrote.record.parts)))
        expected = bytearray(len(page))
        for rank in range(tp):
            context = canonical_mapping._RankContext(tp, 1, 1, 1, heads, rank)
            tensor = wrote.memory[rank][layer]
            mapping = canonical_mapping._layer_mapping(spec, tensor, BLOCKS, context)
            assert mapping is not None
            assert mapping.canonical_page_size_bytes == len(page)
            local = tensor[block].contiguous().view(torch.uint8).numpy().tobytes()
            for run in mapping.runs:
                for each in range(run.num_fragments):
                    start = run.local_offset + each * run.local_stride
                    to = run.canonical_offset + each * run.canonical_stride
                    expected[to : to + run.fragment_size] = local[start:][: run.fragment_size]
        assert page == bytes(expected)
