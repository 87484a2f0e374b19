"""Which settings SGLang writes into a model's configuration, and what is made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.configs.model_config import ModelConfig

from kvpool.engine_plugins.facts import config_digest


def test_engines_of_other_lengths_and_roles_share_what_they_compute(
    models: Callable[[str], Path],
) -> None:
    def digest(**given: Any) -> str:
        return config_digest(ModelConfig(str(models("llama")), **given).hf_config)

    first = digest()
    assert digest(context_length=1024) == digest(context_length=512) == first
    assert digest(language_only=True) == digest(language_model_only=True) == first
    assert digest(model_override_args='{"rms_norm_eps": 0.5}') != first
