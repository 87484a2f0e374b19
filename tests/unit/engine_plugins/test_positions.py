"""Which rotations models in memory use. Needs torch; with vLLM's own modules, where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is in the vLLM environment only", allow_module_level=True)

import torch

from kvpool.engine_plugins.vllm.naming.positions import rotations

pytestmark = pytest.mark.torch
DTYPE = torch.bfloat16


class Rotary(torch.nn.Module):
    """Turns queries and keys by a table, of neighbours or of halves."""

    def __init__(
        self,
        length: int = 4096,
        base: float = 10000.0,
        *,
        dtype: Any = DTYPE,
        offset: int = 0,
        neighbours: bool = False,
    ) -> None:
        super().__init__()
        self.head_size, self.rotary_dim = 12, 8
        self.offset, self.neighbours = offset, neighbours
        frequencies = base ** -(torch.arange(0, 8, 2) / 8)
        angles = torch.outer(torch.arange(length + offset).float(), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)
        self.register_buffer("cos_sin_cache", table, persistent=False)

    def forward(self, positions: Any, query: Any, key: Any) -> Any:
        cos, sin = self.cos_sin_cache[positions + self.offset].chunk(2, dim=-1)

        def turned(x: Any) -> Any:
            x, rest = x[..., :8], x[..., 8:]
            first, second = (x[..., ::2], x[..., 1::2]) if self.neighbours else x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)

        return turned(query), turned(key)


def model(*rotary: Any) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(2, 2), *rotary)


def of(*rotary: Any, dtype: Any = DTYPE) -> list[str]:
    return rotations([model(*rotary)], dtype)


def test_the_same_rotation_is_one_fact_however_long_its_table() -> None:
    first = of(Rotary())
    assert len(first) == 1
    assert of(Rotary()) == first
    assert of(Rotary(length=131072)) == first, "another --max-model-len"
    assert of(Rotary(length=130)) == first, "some tables are no longer than that"
    assert of(Rotary(), Rotary(length=8192)) == first, "each layer may have a module of its own"
    assert of(Rotary(dtype=torch.float32)) == first, "kernels may want tables of more precision"


@pytest.mark.parametrize(
    "other",
    [
        Rotary(base=10100.0),
        Rotary(offset=7),
        Rotary(neighbours=True),
    ],
    ids=["base", "offset", "neighbours"],
)
def test_another_rotation_is_another_fact(other: Rotary) -> None:
    assert of(other) != of(Rotary())
    assert set(of(other, Rotary())) == {*of(other), *of(Rotary())}


def test_models_without_rotations_have_none() -> None:
    learned = torch.nn.Embedding(100, 4)
    masked = torch.nn.Linear(2, 2)
    masked.register_buffer("mask", torch.ones(4, 4), persistent=False)
    assert of(learned, masked) == []


def test_queries_that_are_scaled_by_their_positions_are_another_fact() -> None:
    """vLLM does it for Llama 4 by the longest prompt that it allows, or as the generation config says."""

    def tuned(tuning: bool) -> list[str]:
        attention = torch.nn.Module()
        attention.attn_temperature_tuning = tuning
        return of(Rotary(), attention)

    assert tuned(False) == of(Rotary()) != tuned(True)


@pytest.mark.parametrize("marks", [("language",), ("tower",), ("language", "tower")], ids=str)
def test_towers_say_nothing_of_the_kv(marks: tuple[str, ...]) -> None:
    """vLLM leaves them out if no media are served."""

    def seeing(*, tower: Any) -> list[str]:
        whole = torch.nn.Module()
        whole.inner = torch.nn.Module()
        whole.inner.language_model = model(Rotary())
        whole.inner.vision_tower = tower
        if "language" in marks:
            whole._language_model_names = ["inner.language_model"]
        if "tower" in marks:
            whole.inner._tower_model_names = ["vision_tower"]
        return rotations([whole], DTYPE)

    assert seeing(tower=model(Rotary(base=100.0))) == seeing(tower=torch.nn.Identity())
    assert seeing(tower=torch.nn.Identity()) == of(Rotary())


def test_trained_coefficients_are_weights_and_no_fact_of_positions() -> None:
    """Each tensor-parallel rank has those of its heads."""

    def trained(heads: int, base: float = 1e4) -> Any:
        module = frequencies(base)
        module.cos_coef = torch.nn.Parameter(torch.rand(heads, 4, 4))
        table = torch.rand(4096, heads, 8)
        module.register_buffer("cos_sin_cache", table, persistent=False)
        return module

    assert of(trained(2)) == of(trained(4)) != of(trained(4, 1e6))


def frequencies(base: float) -> Any:
    """A module as transformers has: it computes from frequencies, and takes other arguments."""
    module = torch.nn.Module()
    table = base ** -(torch.arange(0, 8, 2) / 8)
    module.register_buffer("inv_freq", table, persistent=False)
    return module


def test_modules_that_compute_without_a_table_are_known_by_their_frequencies() -> None:
    assert of(frequencies(1e4)) == of(frequencies(1e4)) != of(frequencies(1e6))


def test_complex_tables_are_read() -> None:
    def table(scale: float) -> Any:
        module = torch.nn.Module()
        angles = torch.outer(torch.arange(4096).float(), torch.tensor([1.0, 0.01])) * scale
        turns = torch.polar(torch.ones_like(angles), angles)
        module.register_buffer("freqs_cis", turns, persistent=False)
        return module

    assert of(table(1)) == of(table(1)) != of(table(2))


# --- vLLM's own


LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": tuple([1.0] * 8),
    "long_factor": tuple([2.0] * 8),
    "original_max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 2048,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": YARN,
    "yarn, other factor": {**YARN, "factor": 2.0},
    "deepseek": {**YARN, "rope_type": "deepseek_yarn", "mscale": 1.0, "mscale_all_dim": 1.0},
    "deepseek, scaled": {**YARN, "rope_type": "deepseek_yarn", "mscale": 2.0, "mscale_all_dim": 0.5},
    "llama3": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "multimodal": {"rope_type": "yarn", **YARN, "mrope_section": [4, 2, 2], "rope_theta": 5000.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "max_trained_positions": 1024},
    "part": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "longrope": LONG,
}  # fmt: skip


@pytest.fixture
def get_rope(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes vLLM's module for rotations, in an engine that allows prompts of so many tokens."""
    pytest.importorskip("vllm")
    from types import SimpleNamespace

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding

    def make(parameters: dict[str, Any], length: int = 4096, *, table: int = 8192) -> Any:
        config = VllmConfig()
        config.model_config = SimpleNamespace(max_model_len=length)  # type: ignore[assignment]
        with set_current_vllm_config(config):
            return rotary_embedding.get_rope(16, table, True, dict(parameters), dtype=DTYPE)

    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", NoMemory())
    return make


class NoMemory(dict[Any, Any]):
    """Keeps nothing: vLLM would give the same module for another engine of the process."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@pytest.mark.filterwarnings("ignore")  # vLLM and torch warn of their own deprecations
def test_vllms_rotations_differ_by_kind_and_not_by_length(get_rope: Any) -> None:
    found = {name: of(get_rope(parameters)) for name, parameters in KINDS.items()}
    assert all(len(each) == 1 for each in found.values())
    assert len({each[0] for each in found.values()}) == len(KINDS)
    for name, parameters in KINDS.items():
        assert of(get_rope(parameters, 8192)) == found[name], name


@pytest.mark.filterwarnings("ignore")
def test_vllm_takes_the_factors_of_longrope_by_the_longest_prompt(get_rope: Any) -> None:
    short, long, longer = (of(get_rope(LONG, length)) for length in (1024, 1025, 8192))
    assert short != long == longer


@pytest.mark.filterwarnings("ignore")
def test_trained_coefficients_of_vllm_are_no_fact(get_rope: Any) -> None:
    def trained(heads: int, base: float = 1e4) -> list[str]:
        parameters = {**KINDS["plain"], "rope_theta": base, "use_fope": True}
        parameters |= {"fope_sep_head": True, "fope_init_factor": 0.1}
        module = get_rope(parameters | {"num_key_value_heads": heads, "num_inv_freq": None})
        for each in module.parameters():
            torch.nn.init.normal_(each)
        return of(module)

    assert trained(2) == trained(4) != trained(4, 1e6)


@pytest.mark.filterwarnings("ignore")
def test_a_plain_table_may_be_as_long_as_the_longest_prompt(get_rope: Any) -> None:
    plain = KINDS["plain"]
    assert of(get_rope(plain, table=131072)) == of(get_rope(plain, table=512))
