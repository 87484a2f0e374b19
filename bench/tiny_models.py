"""Tiny random-weight models whose output depends on their KV cache. Needs torch and transformers.

Plain default initialisation repeats one token whatever the KV holds, so it proves nothing. With
these standard deviations every token depends on the whole prompt, and zeroing the stored KV changes
the output. Nothing is downloaded.

Usage: python bench/tiny_models.py KIND OUT_DIR      (KIND: llama, gemma, mistral, qwen-next, nemotron-h, chat)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

VOCABULARY = 512
EMBEDDING_STD, ATTENTION_STD, OTHER_STD = 1.0, 0.10, 0.09
MAX_POSITIONS, LONG_POSITIONS = 8192, 40960


def make(kind: str, out: Path) -> Path:
    """Write a model and its tokenizer to `out` unless they are there. Returns `out`."""
    if not (out / "tokenizer.json").exists():
        _save_model(_model("llama" if kind == "chat" else kind), out)
        (_save_chat_tokenizer if kind == "chat" else _save_tokenizer)(out)
    return out


def _model(kind: str) -> Any:
    import torch
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        NemotronHConfig,
        NemotronHForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "dtype": "bfloat16",
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **common))
    if kind == "mistral":  # all layers see a window only
        return MistralForCausalLM(MistralConfig(num_hidden_layers=4, sliding_window=64, **common))
    if kind == "gemma":
        return Gemma3ForCausalLM(
            Gemma3TextConfig(
                num_hidden_layers=6,
                head_dim=64,
                sliding_window=64,
                query_pre_attn_scalar=16,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
                **common,
            )
        )
    ends = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    common["max_position_embeddings"] = LONG_POSITIONS
    if (
        kind == "qwen-next"
    ):  # gated delta nets, whose states almost fill a block of the fourth layer's attention
        linear = {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
        return Qwen3NextForCausalLM(
            Qwen3NextConfig(
                num_hidden_layers=4,
                layer_types=["linear_attention"] * 3 + ["full_attention"],
                head_dim=64,
                linear_num_key_heads=7,
                linear_num_value_heads=7,
                num_experts=2,
                num_experts_per_tok=1,
                moe_intermediate_size=128,
                shared_expert_intermediate_size=128,
                **{**common, **linear, **ends, "num_key_value_heads": 4},
            )
        )
    if kind == "nemotron-h":  # Mamba 2
        return NemotronHForCausalLM(
            NemotronHConfig(
                layers_block_type=["mamba", "attention", "mlp", "mamba"],
                mamba_num_heads=16,
                mamba_head_dim=32,
                n_groups=1,
                ssm_state_size=16,
                chunk_size=32,
                head_dim=64,
                **common,
                **ends,
            )
        )
    raise ValueError(f"no tiny model {kind!r}: see the usage")


def make_half_8b(out: Path) -> Path:
    """Write a llama with the layers' sizes of an 8B model and half as many, made on the GPU: 6 GB. Returns `out`.

    The standard deviations shrink with the root of the hidden size, so that scores and logits spread as
    they do in the tiny ones.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    shrink = (256 / config.hidden_size) ** 0.5
    _save_model(model, out, shrink)
    _save_tokenizer(out)
    return out


def _save_model(model: Any, out: Path, shrink: float = 1.0) -> None:
    import torch

    # Gemma multiplies embeddings by the root of the hidden size, ties the output to them and
    # normalises what each layer adds: larger ones would only ever repeat the last token.
    embedding_std = 0.02 if model.config.model_type.startswith("gemma") else EMBEDDING_STD
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            attention = "q_proj" in name or "k_proj" in name
            std = ATTENTION_STD * shrink if attention else OTHER_STD * shrink
            torch.nn.init.normal_(weight, std=embedding_std if "embed" in name else std)
    model.to(torch.bfloat16).save_pretrained(out)


def _save_tokenizer(out: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({f"tok{i}": i for i in range(VOCABULARY)}, unk_token="tok0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="tok0", eos_token="tok1", bos_token="tok2"
    ).save_pretrained(out)


CHAT_TEMPLATE = (
    "{% if tools %}<|role|>tools\n{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|role|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or () %}"
    "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
    "{% if not (loop.last and continue_final_message) %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
)


def _save_chat_tokenizer(out: Path) -> None:
    """A token a byte, so that all that is text can be said, JSON too; and a template for chats with tools."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        bos_token="<|begin|>",
        additional_special_tokens=["<|role|>"],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(out)


def make_adapter(out: Path) -> Path:
    """Write a LoRA adapter for the llama, and so for the chat, that changes what it says. Returns `out`."""
    import json

    import torch
    from safetensors.torch import save_file

    rank, hidden, sizes = 8, 256, {"q_proj": 256, "v_proj": 128}
    draw = torch.Generator().manual_seed(1)
    weights = {}
    for layer in range(4):
        for name, size in sizes.items():
            begins = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{begins}.lora_A.weight"] = torch.randn(rank, hidden, generator=draw) * 0.3
            weights[f"{begins}.lora_B.weight"] = torch.randn(size, rank, generator=draw) * 0.3
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "adapter_model.safetensors")
    config = {
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(sizes),
        "bias": "none",
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
    }
    (out / "adapter_config.json").write_text(json.dumps(config))
    return out


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt of random tokens, the same for a seed everywhere; special tokens never occur."""
    import random

    draw = random.Random(seed)
    return [draw.randrange(3, VOCABULARY) for _ in range(tokens)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    make(arguments.kind, arguments.out)
