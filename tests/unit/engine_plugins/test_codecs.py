"""KV quantised and back, against arithmetic in float64. Needs torch."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is in the vLLM environment only", allow_module_level=True)

import torch

from kvpool.engine_plugins.vllm.config import Codec
from kvpool.engine_plugins.vllm.layout.codecs import CodecPages, HeadLayout, head_layout
from kvpool.engine_plugins.vllm.layout.pages import DeviceSlots, HostPages, Pages, byte_rows
from kvpool.engine_plugins.vllm.metrics import COUNTERS
from kvpool.engine_plugins.vllm.worker.device import DevicePages, PinnedSegments
from kvpool.errors import ConfigError

pytestmark = pytest.mark.torch
BLOCKS, ROWS = 12, 20
LOSSY = [Codec.INT8, Codec.FP8]
TINY = 2.0**-126
CONTENT, HALVES = "FLASH_ATTN", "CPU_ATTN"
ORDERS = {"hnc": (0, 1, 2, 3), "nhc": (0, 2, 1, 3)}


@dataclass
class Slots:
    table: np.ndarray
    nbytes: int


@dataclass
class Layer:
    """Paged KV of one layer, made from K and V by hand: (blocks, heads, K/V, tokens, head size)."""

    kv: Any
    backend: str = CONTENT
    order: str = "hnc"
    kernel_blocks: int = 1
    paged: Any = field(init=False)

    def __post_init__(self) -> None:
        blocks, heads, _, tokens, size = self.kv.shape
        ratio = self.kernel_blocks
        shape = (blocks * ratio, heads, tokens // ratio, 2 * size)
        order = ORDERS[self.order]
        memory = torch.zeros([shape[axis] for axis in order], dtype=self.kv.dtype)
        self.paged = memory.permute([order.index(axis) for axis in range(4)])
        self.write(self.kv)

    def _places(self, block: int, token: int, half: int) -> Any:
        """All heads of one token's K or V, as a view (heads, head size)."""
        _, heads, _, tokens, size = self.kv.shape
        own = tokens // self.kernel_blocks
        kernel_block = self.paged[block * self.kernel_blocks + token // own]
        if self.backend == HALVES:
            return kernel_block.reshape(heads, 2, own, size)[:, half, token % own]
        return kernel_block[:, token % own, half * size : (half + 1) * size]

    def write(self, kv: Any) -> None:
        for block, half, token in np.ndindex(kv.shape[0], 2, kv.shape[3]):
            self._places(block, token, half)[:] = kv[block, :, half, token]

    def read(self) -> Any:
        kv = torch.empty_like(self.kv)
        for block, half, token in np.ndindex(kv.shape[0], 2, kv.shape[3]):
            kv[block, :, half, token] = self._places(block, token, half)
        return kv

    def rows(self) -> tuple[Any, HeadLayout]:
        blocks = len(self.kv)
        return byte_rows(self.paged, blocks), head_layout(self.paged, blocks, self.backend)


def host(encoded: Any) -> Pages:
    return HostPages([encoded.numpy()])


def pages(
    layers: list[Layer], codec: Codec, counts: dict[str, float] | None = None, **options: Any
) -> CodecPages:
    tally: dict[str, float] = {} if counts is None else counts

    def count(**amounts: float) -> None:
        for name, amount in amounts.items():
            assert name in COUNTERS
            tally[name] = tally.get(name, 0) + amount

    made = options.pop("make_pages", host)
    return CodecPages([layer.rows() for layer in layers], codec, made, count, **options)


def slots_for(part: CodecPages, slack: int = 0, fill: int = 0xA5) -> Slots:
    return Slots(np.full((ROWS, part.nbytes + slack), fill, np.uint8), part.nbytes)


def round_trip(layer: Layer, codec: Codec) -> Any:
    """All blocks, through the pool, in place."""
    part = pages([layer], codec)
    slots = slots_for(part)
    index = np.arange(len(layer.kv))
    part.to_slots(index, slots, index)
    layer.paged.zero_()
    part.from_slots(slots, index, index)
    return layer.read()


def error_bound(kv: np.ndarray, codec: Codec, dtype: Any) -> np.ndarray:
    """The most that each element may be off, in float64. kv: (blocks, heads, K/V, tokens, size)."""
    top = 127.0 if codec is Codec.INT8 else 448.0
    step = np.maximum(np.abs(kv).max(axis=(3, 4), keepdims=True) / top, TINY)
    if codec is Codec.INT8:
        bound = np.broadcast_to(step / 2, kv.shape)
    else:
        # Three bits behind the leading one; below 2^-6 evenly spaced by 2^-9.
        bound = np.maximum(np.abs(kv) * 2.0**-4, step * 2.0**-10)
    info = torch.finfo(dtype)
    # The result is rounded to the dtype, and float32 was used on the way.
    own = np.maximum(np.abs(kv) * info.eps, info.smallest_normal * info.eps)
    return bound * (1 + 2.0**-20) + own + np.abs(kv) * 2.0**-22


def random_kv(
    seed: int, blocks: int, heads: int, tokens: int, size: int, dtype: Any = torch.bfloat16
) -> Any:
    """Normal, with another magnitude for each head and half."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn((blocks, heads, 2, tokens, size), generator=generator)
    scales = torch.exp2(torch.randint(-9, 9, (blocks, heads, 2, 1, 1), generator=generator).float())
    return (values * scales).to(dtype)


@st.composite
def layer_groups(draw: st.DrawFn) -> list[Layer]:
    """Layers of one group: runs of alike ones, and others between them."""
    backend = draw(st.sampled_from([CONTENT, HALVES]))
    order = "hnc" if backend == HALVES else draw(st.sampled_from(sorted(ORDERS)))
    ratio = draw(st.sampled_from([1, 1, 2]))
    tokens = ratio * draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
    sizes = draw(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=3))
    repeat = draw(st.integers(1, 2))
    seed = draw(st.integers(0, 99))
    return [
        Layer(random_kv(seed + i, BLOCKS, heads, tokens, size, dtype), backend, order, ratio)
        for heads, size in sizes
        for i in range(repeat)
    ]


# --- what comes back


@settings(max_examples=80, deadline=None)
@given(
    layers=layer_groups(),
    codec=st.sampled_from(LOSSY),
    blocks=st.lists(st.integers(0, BLOCKS - 1), unique=True, min_size=1),
    chunk_bytes=st.sampled_from([1, 1000, 1 << 20]),
    slack=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_blocks_come_back_within_the_bound(
    layers: list[Layer],
    codec: Codec,
    blocks: list[int],
    chunk_bytes: int,
    slack: int,
    seed: int,
) -> None:
    random = np.random.default_rng(seed)
    part = pages(layers, codec, chunk_bytes=chunk_bytes)
    slots = slots_for(part, slack)
    index = np.asarray(blocks, np.int64)
    rows = random.permutation(ROWS)[: len(blocks)].astype(np.int64)
    part.to_slots(index, slots, rows)
    others = np.setdiff1d(np.arange(ROWS), rows)
    assert (slots.table[others] == 0xA5).all()
    assert (slots.table[:, part.nbytes :] == 0xA5).all()
    for layer in layers:
        assert torch.equal(layer.read(), layer.kv)

    for layer in layers:
        layer.paged.fill_(7.0)
    part.from_slots(slots, rows, index)
    rest = np.setdiff1d(np.arange(BLOCKS), index)
    for layer in layers:
        got, was = layer.read().double().numpy(), layer.kv.double().numpy()
        bound = error_bound(was, codec, layer.kv.dtype)
        assert (np.abs(got - was)[index] <= bound[index]).all()
        assert (got[rest] == 7.0).all()


@settings(max_examples=40, deadline=None)
@given(layers=layer_groups(), codec=st.sampled_from(LOSSY))
def test_what_was_loaded_is_saved_as_the_same_bytes(layers: list[Layer], codec: Codec) -> None:
    """So a block loses once, however often it is evicted and saved again."""
    part = pages(layers, codec)
    first, second = slots_for(part), slots_for(part)
    index = np.arange(BLOCKS)
    part.to_slots(index, first, index)
    part.from_slots(first, index, index)
    part.to_slots(index, second, index)
    assert np.array_equal(first.table, second.table)


@pytest.mark.parametrize(("codec", "low", "high"), [("int8", 0.007, 0.010), ("fp8", 0.024, 0.028)])
def test_the_loss_is_what_is_documented(codec: str, low: float, high: float) -> None:
    """For normal KV, 32 tokens and heads of 64 (docs/vllm.md)."""
    kv = torch.randn((4, 2, 2, 32, 64), generator=torch.Generator().manual_seed(0)).bfloat16()
    got = round_trip(Layer(kv), Codec(codec)).double()
    loss = float((got - kv.double()).norm() / kv.double().norm())
    assert low < loss < high


# --- heads that are not ordinary


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("backend", [CONTENT, HALVES])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_head_that_is_not_finite_stays_alone(codec: Codec, backend: str, bad: float) -> None:
    kv = random_kv(0, 3, 3, 4, 5)
    clean = round_trip(Layer(kv.clone(), backend), codec)
    kv[1, 2, 0, 3, 4] = bad
    got = round_trip(Layer(kv, backend), codec)
    assert got[1, 2, 0].isnan().all()
    got[1, 2, 0] = clean[1, 2, 0]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize(
    "value", [0.0, -0.0, 1e-40, -1e-38, 3.0e38, -3.3895313892515355e38, 2.0**-126]
)
def test_heads_at_the_ends_of_the_range(codec: Codec, value: float) -> None:
    kv = random_kv(1, 2, 2, 4, 8)
    kv[1, 1, 1] = value
    got, was = round_trip(Layer(kv), codec).double().numpy(), kv.double().numpy()
    assert (np.abs(got - was) <= error_bound(was, codec, torch.bfloat16)).all()
    if value == 0:
        assert (got[1, 1, 1] == 0).all()
    if abs(value) > 1:
        assert (got[1, 1, 1] == was[1, 1, 1]).all()


@pytest.mark.parametrize("codec", LOSSY)
def test_a_loud_head_costs_its_neighbours_nothing(codec: Codec) -> None:
    kv = random_kv(2, 2, 2, 4, 8)
    clean = round_trip(Layer(kv.clone()), codec)
    kv[0, 0, 1] *= 1000
    got = round_trip(Layer(kv), codec)
    got[0, 0, 1] = clean[0, 0, 1]
    assert torch.equal(got, clean)


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("backend", [CONTENT, HALVES])
def test_shards_of_heads_are_encoded_as_the_whole_is(codec: Codec, backend: str) -> None:
    """What tensor-parallel ranks read back is what one rank with all heads would."""
    kv = random_kv(3, 3, 4, 4, 6)
    whole = round_trip(Layer(kv.clone(), backend), codec)
    shards = [round_trip(Layer(kv[:, at : at + 2].clone(), backend), codec) for at in (0, 2)]
    assert torch.equal(torch.cat(shards, dim=1), whole)


# --- bytes


def encoded(layers: list[Layer], codec: Codec) -> bytes:
    part = pages(layers, codec)
    slots = slots_for(part)
    # Whatever was decoded before must leave nothing behind in the working memory.
    part.from_slots(slots, np.array([2]), np.array([0]))
    part.to_slots(np.array([1]), slots, np.array([3]))
    return slots.table[3].tobytes()


# Two heads of 2 tokens and size 2. Peaks are 127, 63.5, 254, 1016 of K and V of head 0, then 1.
BY_HAND = [
    [[[127, -1], [2.4, 0]], [[63.5, 0.5], [-1, 0.75]]],
    [[[-254, 2], [3, 5]], [[8, 1016], [-16, 4]]],
]
QUANTISED = [
    [[[127, -1], [2, 0]], [[127, 1], [-2, 2]]],
    # 3 and 5 over 2, and 4 over 8, lie between: to even.
    [[[-127, 1], [2, 2]], [[1, 127], [-2, 0]]],
]


@pytest.mark.parametrize(
    ("backend", "order", "axes"),
    [
        (CONTENT, "hnc", (0, 2, 1, 3)),  # memory order of (heads, K/V, tokens, size)
        (CONTENT, "nhc", (2, 0, 1, 3)),
        (HALVES, "hnc", (0, 1, 2, 3)),
    ],
)
def test_the_bytes_of_int8(backend: str, order: str, axes: tuple[int, ...]) -> None:
    kv = torch.zeros((2, 2, 2, 2, 2))
    kv[1] = torch.tensor(BY_HAND)
    record = encoded([Layer(kv, backend, order)], Codec.INT8)
    payload = np.array(QUANTISED, np.int8).transpose(axes).tobytes()
    assert record == payload + np.array([1, 0.5, 2, 8], "<f4").tobytes()


def test_the_bytes_of_fp8() -> None:
    kv = torch.zeros((2, 1, 2, 2, 2))
    kv[1, 0, 0] = torch.tensor([[448, 1], [-2, 0.5]])
    kv[1, 0, 1] = torch.tensor([[-896, 0], [2, 2 * 2.0**-9]])
    record = encoded([Layer(kv, HALVES)], Codec.FP8)
    payload = bytes([0x7E, 0x38, 0xC0, 0x30, 0xFE, 0x00, 0x38, 0x01])
    assert record == payload + np.array([1, 2], "<f4").tobytes()


def test_records_are_padded_and_follow_one_another() -> None:
    """Three elements a half: 6 bytes, 2 of zeros, 8 of scales; then the next layer."""
    kv = torch.zeros((2, 1, 2, 1, 3))
    kv[1, 0] = torch.tensor([[[127, 1, 2]], [[3, 4, 254]]])
    record = encoded([Layer(kv), Layer(kv * 2), Layer(random_kv(0, 2, 2, 1, 1))], Codec.INT8)
    payload = bytes([127, 1, 2, 2, 2, 127, 0, 0])
    assert record[:32] == (
        payload + np.array([1, 2], "<f4").tobytes() + payload + np.array([2, 4], "<f4").tobytes()
    )
    assert len(record) == 32 + 8 + 2 * 2 * 4


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_scale_of_a_head_that_is_not_finite(codec: Codec, bad: float) -> None:
    kv = torch.ones((2, 1, 2, 2, 2))
    kv[1, 0, 1, 0, 1] = bad
    scales = np.frombuffer(encoded([Layer(kv)], codec)[-8:], "<f4")
    assert np.isnan(scales).tolist() == [False, True]


@pytest.mark.parametrize("codec", LOSSY)
def test_layers_packed_side_by_side(codec: Codec) -> None:
    """Rows with gaps between them, which begin and end at no multiple of eight bytes."""
    storage = random_kv(8, 1, 1, BLOCKS, 3).flatten()
    packed = [
        storage.as_strided((BLOCKS, 1, 1, size), (6, size, size, 1), start)
        for size, start in [(2, 0), (4, 2)]
    ]
    tables = []
    for tensors in (packed, [tensor.clone() for tensor in packed]):
        layers = [
            (byte_rows(tensor, BLOCKS), head_layout(tensor, BLOCKS, CONTENT)) for tensor in tensors
        ]
        part = CodecPages(layers, codec, host, lambda **_: None)
        slots, index = slots_for(part), np.arange(BLOCKS)
        part.to_slots(index, slots, index)
        part.from_slots(slots, index, index)
        tables.append(slots.table)
    assert np.array_equal(*tables)
    assert all(torch.equal(*pair) for pair in zip(packed, tensors, strict=True))


def test_half_the_bytes_and_the_scales() -> None:
    layer = Layer(torch.zeros((BLOCKS, 2, 2, 32, 64), dtype=torch.bfloat16))
    raw = layer.rows()[0].shape[1]
    assert pages([layer], Codec.INT8).nbytes == raw // 2 + 2 * 2 * 4


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("chunk_bytes", [1, 1000, 1 << 20])
def test_the_streams_path_makes_the_same_bytes(codec: Codec, chunk_bytes: int) -> None:
    """On the CPU device, whose streams do nothing: the bytes, not the overlap."""
    layers = [Layer(random_kv(seed, BLOCKS, 2, 4, 8)) for seed in range(3)]
    segments = PinnedSegments(torch.device("cpu"))
    blocks, rows = np.array([3, 11, 4, 0, 7]), np.array([19, 2, 3, 4, 9])
    on_host = pages(layers, codec)
    on_device = pages(
        layers,
        codec,
        make_pages=lambda encoded: DevicePages([encoded], segments),
        chunk_bytes=chunk_bytes,
    )
    tables = [slots_for(on_host, 8), slots_for(on_host, 8)]
    on_host.to_slots(blocks, tables[0], rows)
    on_device.to_slots(blocks, tables[1], rows)
    assert np.array_equal(tables[0].table, tables[1].table)
    on_host.from_slots(tables[0], rows, blocks)
    expected = [layer.read() for layer in layers]
    near = DeviceSlots(torch.from_numpy(tables[1].table), on_device.nbytes)
    ways = [(on_device, tables[1]), (on_device, near), (on_host, near)]
    for part, slots in ways:  # the last two as from the daemon's device memory
        for layer in layers:
            layer.paged.zero_()
        part.from_slots(slots, rows, blocks)
        for layer, values in zip(layers, expected, strict=True):
            assert torch.equal(layer.read()[blocks], values[blocks])
    segments.close()


def test_it_works_inside_and_outside_of_inference_mode() -> None:
    """vLLM's thread is in it, the copying threads are not."""
    layer = Layer(random_kv(5, BLOCKS, 2, 4, 8))
    part = pages([layer], Codec.INT8)
    slots, index = slots_for(part), np.arange(BLOCKS)
    with torch.inference_mode():
        part.to_slots(index, slots, index)
    inside = slots.table.copy()
    part.to_slots(index, slots, index)
    assert np.array_equal(slots.table, inside)
    layer.paged.zero_()
    part.from_slots(slots, index, index)
    outside = layer.read()
    with torch.inference_mode():
        part.from_slots(slots, index, index)
    assert torch.equal(layer.read(), outside) and outside.any()


# --- the error that is shown


def test_one_block_in_64_is_measured() -> None:
    kv = random_kv(6, 150, 2, 4, 8)
    layers = [Layer(kv), Layer(kv * 3)]
    counts: dict[str, float] = {}
    part = pages(layers, Codec.INT8, counts, chunk_bytes=20 * 512)
    slots = Slots(np.zeros((150, part.nbytes), np.uint8), part.nbytes)
    part.to_slots(np.arange(50), slots, np.arange(50))
    assert counts["measured_blocks"] == 1
    part.to_slots(np.arange(50, 150), slots, np.arange(50, 150))
    part.from_slots(slots, np.arange(150), np.arange(150))
    expected = 0.0
    for block in (0, 64, 128):
        was = np.stack([each.kv[block].double().numpy() for each in layers])
        got = np.stack([each.read()[block].double().numpy() for each in layers])
        expected += math.sqrt(((got - was) ** 2).sum() / (was**2).sum())
    assert counts == {"measured_blocks": 3, "measured_error": pytest.approx(expected, rel=1e-5)}


@pytest.mark.parametrize(("value", "name"), [(math.inf, "nonfinite"), (0.0, "measured")])
def test_odd_blocks_do_not_spoil_the_mean(value: float, name: str) -> None:
    counts: dict[str, float] = {}
    kv = random_kv(7, 1, 2, 4, 8)
    kv[0] = value
    part = pages([Layer(kv)], Codec.FP8, counts)
    part.to_slots(np.zeros(1, np.int64), slots_for(part), np.zeros(1, np.int64))
    assert counts.get(f"{name}_blocks") == 1
    assert not counts.get("measured_error")


# --- layouts


def test_layouts_that_are_known() -> None:
    kv = random_kv(0, BLOCKS, 2, 6, 4)
    expected = {
        (CONTENT, "hnc", 1): HeadLayout(torch.bfloat16, (1, 2, 6, 2, 4), heads=1, kv=3),
        (CONTENT, "nhc", 1): HeadLayout(torch.bfloat16, (1, 6, 2, 2, 4), heads=2, kv=3),
        (CONTENT, "hnc", 2): HeadLayout(torch.bfloat16, (2, 2, 3, 2, 4), heads=1, kv=3),
        (HALVES, "hnc", 2): HeadLayout(torch.bfloat16, (2, 2, 2, 3, 4), heads=1, kv=2),
    }
    for arguments, layout in expected.items():
        assert Layer(kv, *arguments).rows()[1] == layout


@pytest.mark.parametrize(
    ("tensor", "backend", "says"),
    [
        (torch.zeros(4, 2, 3, 8), "MAMBA", "MAMBA.*set codec to none"),
        (torch.zeros(4, 2, 3, 8), "FLASH_ATTN_DIFFKV", "is unknown"),
        (torch.zeros(4, 2, 3, 7), CONTENT, "cannot be told apart"),
        (torch.zeros(4, 2, 8, 3).transpose(2, 3), CONTENT, "cannot be told apart"),
        (torch.zeros(4, 3, 2, 8).transpose(1, 2), HALVES, "cannot be told apart"),
    ],
)
def test_layouts_that_are_refused(tensor: Any, backend: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        head_layout(tensor, 4, backend)
