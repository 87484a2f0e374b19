"""Which weights there are, of modules in memory. Needs torch."""

from __future__ import annotations

import gc
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is in the vLLM environment only", allow_module_level=True)

import torch

from kvpool.engine_plugins.vllm.naming import weights
from kvpool.engine_plugins.vllm.naming.callers import models_with
from kvpool.engine_plugins.vllm.naming.weights import Loaded

pytestmark = pytest.mark.torch


def model_of(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Embedding(300, 64),
        torch.nn.Sequential(torch.nn.Linear(64, 700), torch.nn.LayerNorm(700)),
        torch.nn.Linear(700, 33, dtype=torch.bfloat16),
    )


class Runner:
    """As vLLM's: it has the model, the draft's and parts of them in attributes, behind wrappers or not."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def register(self, *layers: Any) -> list[Any]:
        return models_with(layers)


def test_the_whole_models_are_found_from_their_layers() -> None:
    model, other, draft = model_of(), model_of(), model_of()
    wrapped = Runner(runnable=draft)
    runner = Runner(part=model[1], model=model, other=other, drafter=Runner(model=wrapped))
    gc.freeze()  # as vLLM does, to spare the collector what is there for good
    try:
        assert runner.register(model[1][0]) == [model]
        found = runner.register(model[1][0], model[2], draft[0])
    finally:
        gc.unfreeze()
    assert {id(each) for each in found} == {id(model), id(draft)}


def test_a_layer_that_is_in_no_model_stands_for_itself() -> None:
    model, lone = model_of(), torch.nn.Linear(2, 2)
    assert Runner(model=model).register(lone, model[0]) == [model, lone]


def test_without_a_runner_no_model_is_found() -> None:
    assert Runner(device=torch.device("cpu")).register(model_of()[0]) == []


def test_the_heads_of_all_ranks_are_those_of_the_projection() -> None:
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
    monkeypatch: pytest.MonkeyPatch, total: int, local: int
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


def test_every_single_element_counts() -> None:
    model = model_of()
    loaded = Loaded([model])
    before = loaded.digest()
    assert before == loaded.digest()
    same = model_of()
    assert before == Loaded([same]).digest()
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


def test_an_exchange_counts() -> None:
    model = model_of()
    loaded = Loaded([model])
    before = loaded.digest()
    rows = model[1][0].weight.data
    rows[[3, 500]] = rows[[500, 3]]
    assert loaded.digest() != before


def test_strides_and_odd_sizes_are_read_right() -> None:
    model = torch.nn.Module()
    model.layer = torch.nn.Module()
    wide = torch.arange(5 * 7 * 3, dtype=torch.uint8).view(5, 7, 3)
    model.layer.register_buffer("odd", wide.permute(2, 0, 1)[1:, ::2])
    loaded = Loaded([model])
    before = loaded.digest()
    for at in range(wide.numel()):
        flat = wide.view(-1)
        flat[at] += 1
        inside = at % 3 >= 1 and at // 21 % 2 == 0
        assert (loaded.digest() != before) == inside, at
        flat[at] -= 1


def test_only_what_is_saved_with_a_model_counts() -> None:
    model = model_of()
    model[1].register_buffer("scale", torch.ones(()))
    model[1].register_buffer("work", torch.ones(4), persistent=False)
    loaded = Loaded([model])
    before = loaded.digest()
    model[1].work += 1
    assert loaded.digest() == before
    model[1].scale += 1
    assert loaded.digest() != before


def packed() -> Any:
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


def test_a_layer_that_hides_its_weights_is_known_by_what_it_computes() -> None:
    model = torch.nn.Sequential(packed(), torch.nn.Linear(4, 4))
    loaded = Loaded([model])
    before = loaded.digest()
    assert before == loaded.digest()
    for at in (0, 50, 95):
        model[0].hidden[0][7, at] += 1e-3
        assert loaded.digest() != before
        before = loaded.digest()


def test_a_hidden_layer_that_all_ranks_have_whole_is_known_too() -> None:
    layer = packed()
    del type(layer).input_size_per_partition
    type(layer).input_size = 96
    model = torch.nn.Sequential(layer, torch.nn.Linear(4, 4))
    loaded = Loaded([model])
    before = loaded.digest()
    assert before
    layer.hidden[0][7, 95] += 1e-3
    assert loaded.digest() not in ("", before)


def test_weights_that_cannot_be_seen_have_no_digest() -> None:
    model = model_of()
    model[1][0].weight = torch.nn.Parameter(torch.empty(0))
    assert Loaded([model]).digest() == ""
    assert Loaded([]).digest() == ""


def test_a_layer_that_cannot_compute_has_no_digest(caplog: pytest.LogCaptureFixture) -> None:
    """As what MLA leaves of `kv_b_proj` on CPUs with AMX, and a kernel that takes no such vectors."""
    layer = packed()
    model = torch.nn.Sequential(layer)
    del layer.cpu_linear
    assert Loaded([model]).digest() == ""
    layer.cpu_linear = torch.nn.functional.linear
    assert Loaded([model]).digest() == ""
    assert "cannot be seen" in caplog.text


@pytest.mark.parametrize("name", ["w_zp", "qzeros", "weight_zero_point", "g_idx"])
def test_empty_zero_points_are_none(name: str) -> None:
    """As Marlin leaves them for weights of four bits."""

    def empty(dtype: Any) -> Any:
        return torch.nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)

    layer = packed()
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
