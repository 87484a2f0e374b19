"""Which weights there are: of modules in memory, and of files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvpool.engine_plugins.vllm import weights
from kvpool.engine_plugins.vllm.weights import Loaded, stored

# --- files


def safetensors(path: Path, tensors: Mapping[str, bytes | bytearray]) -> None:
    header, at = {}, 0
    for name, each in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(each)], "data_offsets": [at, at + len(each)]}
        at += len(each)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))


def test_a_copy_is_the_same_and_other_bytes_are_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    tensors = {"x": bytes(1000), "y": bytes(range(256))}
    for folder in ("a", "b"):
        safetensors(tmp_path / folder / "model.safetensors", tensors)
    (tmp_path / "a" / "README.md").write_text("not weights")
    assert stored(str(tmp_path / "a")) == stored(str(tmp_path / "b"))
    safetensors(tmp_path / "b/model.safetensors", {**tensors, "y": bytes(256)})
    assert stored(str(tmp_path / "a")) != stored(str(tmp_path / "b"))
    assert stored(str(tmp_path / "a/model.safetensors")) == stored(str(tmp_path / "a"))


def test_of_a_large_file_each_tensor_is_looked_at(tmp_path: Path) -> None:
    size = 2 * weights.PIECES_MAX * weights.PIECE_BYTES // 4
    tensors = {str(i): bytes([i]) * size for i in range(4)}
    path = tmp_path / "m.safetensors"
    safetensors(path, tensors)
    before = stored(str(path))
    for name in tensors:
        safetensors(path, {**tensors, name: bytes([9]) * size})
        assert stored(str(path)) != before, name


@pytest.mark.parametrize("tensors", [300, 600])
def test_few_tensors_of_each_of_many_files_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors: int
) -> None:
    """As a fine-tune of some layers changes them. There are more tensors than places, or fewer."""
    monkeypatch.setattr(weights, "PIECES_MAX", 64)
    monkeypatch.setattr(weights, "SPOTS_MAX", 2400)
    size, changed = 2 * weights.PIECE_BYTES, 5
    was = {str(i): bytes(size) for i in range(tensors)}

    def write(tensors: dict[str, bytes]) -> None:
        for at in range(4):
            safetensors(tmp_path / f"m-{at}.safetensors", tensors)

    write(was)
    before = stored(str(tmp_path))
    write({**was, **{str(i): b"\1" * size for i in range(1, 1 + changed)}})
    after = stored(str(tmp_path))
    assert all(one != other for one, other in zip(before, after, strict=True))


@pytest.mark.parametrize("at", ["beginning", "middle", "end"])
def test_a_tensor_is_looked_at_in_several_places(tmp_path: Path, at: str) -> None:
    size = 2 * weights.PIECES_MAX * weights.PIECE_BYTES
    path = tmp_path / "m.safetensors"
    content = bytearray(size)
    safetensors(path, {"x": content})
    before = stored(str(path))
    content[{"beginning": 0, "middle": size // 2, "end": size - 1}[at]] = 1
    safetensors(path, {"x": content})
    assert stored(str(path)) != before


def test_of_very_many_tensors_little_is_read_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECES_MAX", 1)
    monkeypatch.setattr(weights, "SPOT_BYTES_MAX", 4 * 100 * weights.SPOT_BYTES_MIN)
    path = tmp_path / "m.safetensors"
    tensors = {str(i): bytes(2000) for i in range(100)}
    safetensors(path, tensors)
    before = stored(str(path))
    seen = 0
    for at in range(0, 2000, 50):
        safetensors(path, {**tensors, "7": bytes(at) + b"\1" * 50 + bytes(1950 - at)})
        seen += stored(str(path)) != before
    assert 3 <= seen <= 12
    safetensors(path, dict.fromkeys(tensors, b"\x01" * 2000) | {"7": bytes(2000)})
    assert stored(str(path)) != before


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 20,
        (9).to_bytes(8, "little") + b'{"a": [1]}',
        (4).to_bytes(8, "little") + b"null",
        (33).to_bytes(8, "little") + b'{"a": {"data_offsets": [-90, 10]}}',
    ],
)
def test_what_is_no_safetensors_file_is_bytes(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    before = stored(str(path))
    path.write_bytes(content + b"1")
    assert stored(str(path)) != before


def test_a_hub_id_has_no_files() -> None:
    assert stored("org/model-that-is-no-folder") is None


# --- memory


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is in the vLLM environment only")


def model_of(torch: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(300, 64),
        torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.LayerNorm(700)),
        torch.nn.Linear(700, 33, dtype=torch.bfloat16),
    )


def test_the_whole_model_is_found_from_a_layer(torch: Any) -> None:
    model, other = model_of(torch), model_of(torch)
    assert weights.models_with([model[1][0]]) == [model]
    assert weights.models_with([model[1][0], model[2], other[0]]) in (
        [model, other],
        [other, model],
    )


def test_the_heads_of_all_ranks_are_those_of_the_projection(torch: Any) -> None:
    """Of each layer its own: a draft's and a window's may be others than the model's."""

    def attention(*totals: int, wrapped: bool = False) -> Any:
        owner = torch.nn.Module()
        owner.attn = torch.nn.Identity()
        for number, total in enumerate(totals):
            linear = torch.nn.Linear(2, 2)
            linear.total_num_kv_heads = total
            if wrapped:
                linear, inner = torch.nn.Module(), linear
                linear.base_layer = inner
            owner.add_module(f"qkv_{number}", linear)
        return owner

    model, draft = torch.nn.Module(), torch.nn.Module()
    model.full, model.window, model.lora = attention(4), attention(8), attention(2, wrapped=True)
    model.twice, model.odd, model.none = attention(4, 4), attention(4, 8), attention()
    draft.layer = attention(1)
    layers = {name: each.attn for name, each in model.named_children()}
    layers |= {"draft": draft.layer.attn, "states": object()}
    found = weights.projected_heads([model, draft], layers)
    assert found == {"full": 4, "window": 8, "lora": 2, "twice": 4, "draft": 1}


@pytest.mark.filterwarnings("ignore")  # vLLM and torch warn of their own deprecations
@pytest.mark.parametrize(("total", "local"), [(1, 1), (4, 1), (8, 1), (16, 2)])
def test_vllms_projection_says_its_heads(
    torch: Any, monkeypatch: pytest.MonkeyPatch, total: int, local: int
) -> None:
    linear = pytest.importorskip("vllm.model_executor.layers.linear")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=8, rank_in_group=3))
    owner = torch.nn.Module()
    owner.attn = torch.nn.Identity()
    with set_current_vllm_config(VllmConfig()), torch.device("meta"):
        owner.qkv_proj = linear.QKVParallelLinear(32, 4, 16, total)
    assert owner.qkv_proj.num_kv_heads == local
    assert weights.projected_heads([owner], {"layer": owner.attn}) == {"layer": total}


def test_every_single_element_counts(torch: Any) -> None:
    model = model_of(torch)
    loaded = Loaded([model[0]])
    before = loaded.digest()
    assert before == loaded.digest()
    same = model_of(torch)
    assert before == Loaded([same[0]]).digest()
    seen = {before}
    tensors = list(model.parameters())
    for tensor in tensors:
        flat = tensor.data.view(-1)
        for at in (0, len(flat) // 2, len(flat) - 1):
            was = flat[at].clone()
            flat[at] = was + 1
            seen.add(loaded.digest())
            flat[at] = was
    assert len(seen) == 1 + 3 * len(tensors)
    assert loaded.digest() == before


def test_an_exchange_counts(torch: Any) -> None:
    model = model_of(torch)
    loaded = Loaded([model[0]])
    before = loaded.digest()
    rows = model[1][0].weight.data
    rows[[3, 500]] = rows[[500, 3]]
    assert loaded.digest() != before


def test_strides_and_odd_sizes_are_read_right(torch: Any) -> None:
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    wide = torch.arange(5 * 7 * 3, dtype=torch.uint8).view(5, 7, 3)
    model.layer.register_buffer("odd", wide.permute(2, 0, 1)[1:, ::2])
    loaded = Loaded([model.layer])
    before = loaded.digest()
    for at in range(wide.numel()):
        flat = wide.view(-1)
        flat[at] += 1
        inside = at % 3 >= 1 and at // 21 % 2 == 0
        assert (loaded.digest() != before) == inside, at
        flat[at] -= 1


def test_only_what_is_saved_with_a_model_counts(torch: Any) -> None:
    model = model_of(torch)
    model[1].register_buffer("scale", torch.ones(()))
    model[1].register_buffer("work", torch.ones(4), persistent=False)
    loaded = Loaded([model[0]])
    before = loaded.digest()
    model[1].work += 1
    assert loaded.digest() == before
    model[1].scale += 1
    assert loaded.digest() != before


def packed(torch: Any) -> Any:
    """A linear layer as vLLM leaves it on CPUs."""

    class Packed(torch.nn.Module):
        input_size_per_partition = 96

        def __init__(self) -> None:
            super().__init__()
            self.hidden = [torch.randn(40, 96)]
            self.weight = torch.nn.Parameter(torch.empty(0))
            self.quant_method = self
            self.cpu_linear = lambda x, _weight, _bias: x @ self.hidden[0].T

        def apply(self, layer: Any, probes: Any) -> Any:
            return layer.cpu_linear(probes, layer.weight, None)

    return Packed()


def test_a_layer_that_hides_its_weights_is_known_by_what_it_computes(torch: Any) -> None:
    model = torch.nn.Sequential(packed(torch), torch.nn.Linear(4, 4))
    loaded = Loaded([model[1]])
    before = loaded.digest()
    assert before == loaded.digest()
    for at in (0, 50, 95):
        model[0].hidden[0][7, at] += 1e-3
        assert loaded.digest() != before
        before = loaded.digest()


def test_weights_that_cannot_be_seen_have_no_digest(torch: Any) -> None:
    model = model_of(torch)
    model[1][0].weight = torch.nn.Parameter(torch.empty(0))
    assert Loaded([model[0]]).digest() == ""
    assert Loaded([]).digest() == ""


def test_a_layer_that_cannot_compute_has_no_digest(
    torch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As what MLA leaves of `kv_b_proj` on CPUs with AMX, and a kernel that takes no such vectors."""
    layer = packed(torch)
    model = torch.nn.Sequential(layer)
    del layer.cpu_linear
    assert Loaded([model]).digest() == ""
    layer.cpu_linear = torch.nn.functional.linear
    assert Loaded([model]).digest() == ""
    assert "cannot be seen" in caplog.text


@pytest.mark.parametrize("name", ["w_zp", "qzeros", "weight_zero_point", "g_idx"])
def test_empty_zero_points_are_none(torch: Any, name: str) -> None:
    """As Marlin leaves them for weights of four bits."""

    def empty(dtype: Any) -> Any:
        return torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    layer = packed(torch)
    model = torch.nn.Sequential(layer)
    layer.weight = None
    layer.register_parameter(name, empty(torch.int32))
    assert Loaded([model]).digest() == "", "there is nothing else"
    words = torch.zeros(8, 128, dtype=torch.int32)
    layer.qweight = torch.nn.Parameter(words, requires_grad=False)
    before = Loaded([model]).digest()
    assert before
    words[3, 4] = 1
    assert Loaded([model]).digest() not in (before, "")
    # Weights that a kernel has elsewhere, of which scales are left.
    layer.packed = empty(torch.int32)
    assert Loaded([model]).digest() == ""
    layer.packed = empty(torch.float32)
    assert Loaded([model]).digest() == ""
