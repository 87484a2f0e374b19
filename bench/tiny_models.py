"""Tiny random-weight models whose output depends on their KV cache. Needs torch and transformers.

Plain default initialisation repeats one token whatever the KV holds, so it proves nothing. With
these standard deviations every token depends on the whole prompt, and zeroing the stored KV changes
the output. Nothing is downloaded.

Usage: python bench/tiny_models.py KIND OUT_DIR
KIND: llama, longrope, gemma, mistral, qwen-next, nemotron-h, chat, mimo and deepseek (both with MTP heads), idefics (pictures)
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

VOCABULARY = 512
EMBEDDING_STD, ATTENTION_STD, OTHER_STD = 1.0, 0.10, 0.09
MAX_POSITIONS, LONG_POSITIONS = 8192, 40960
HIDDEN = 256
PICTURE_TOKEN, PICTURE_PIXELS, PICTURE_TOKENS = VOCABULARY - 1, 112, 16 + 3
"""Of the model that sees pictures: the token in whose place one comes, its edge, and the tokens that it is."""


def make(kind: str, out: Path) -> Path:
    """Write a model and its tokenizer to `out` unless they are there. Returns `out`."""
    if not (out / "tokenizer.json").exists():
        makers = {
            "chat": _make_chat,
            "mimo": _make_mimo,
            "deepseek": _make_deepseek,
            "idefics": _make_idefics,
        }
        makers.get(kind, lambda to: _make_plain(kind, to))(out)
    return out


def _make_plain(kind: str, out: Path) -> None:
    _save_model(_model(kind), out)
    _save_tokenizer(out)


def _make_chat(out: Path) -> None:
    _save_model(_model("llama"), out)
    _save_chat_tokenizer(out)


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
        Phi3Config,
        Phi3ForCausalLM,
        Qwen3NextConfig,
        Qwen3NextForCausalLM,
    )

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "dtype": "bfloat16",
    }
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, **common))
    if (
        kind == "longrope"
    ):  # long factors for all positions, where prompts of over 1,024 tokens are allowed
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 32,
            "long_factor": [1.0 + 0.25 * each for each in range(32)],
        }
        return Phi3ForCausalLM(
            Phi3Config(
                num_hidden_layers=4,
                original_max_position_embeddings=1024,
                rope_parameters=rope,
                pad_token_id=0,
                **common,
            )
        )
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


def _make_mimo(out: Path) -> None:
    """A Qwen 2 whose last layer is also the block of an MTP head, under the names of MiMo.

    transformers knows no MiMo; vLLM takes the architecture's name and the configuration of Qwen 2.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    _save_model(Qwen2ForCausalLM(config), out)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")
    head = {f"model.mtp_layers.0.{norm}.weight": _ones() for norm in norms}
    head["model.mtp_layers.0.input_proj.weight"] = _both()
    _add_tensors(out, {**_renamed(out, "model.layers.3.", "model.mtp_layers.0."), **head})
    _change_config(out, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    _save_tokenizer(out)


def _make_deepseek(out: Path) -> None:
    """A DeepSeek V3 with latent attention (MLA) and an MTP head, without experts.

    Positions are scaled, as in all models of the family: on CPUs vLLM 0.32 rotates by another kernel without that,
    which takes the heads' bytes for those of tokens. The sizes of the latent are those that its kernels know.
    """
    import torch
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    layers = 4
    config = DeepseekV3Config(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=layers + 1,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": MAX_POSITIONS // 2,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        dtype="bfloat16",
    )
    _save_model(DeepseekV3ForCausalLM(config), out)
    mtp = f"model.layers.{layers}."
    saved = _tensors(out)
    head = {
        **{f"{mtp}{norm}.weight": _ones() for norm in ("enorm", "hnorm", "shared_head.norm")},
        f"{mtp}eh_proj.weight": _both(),
        f"{mtp}embed_tokens.weight": saved["model.embed_tokens.weight"],
        f"{mtp}shared_head.head.weight": saved["lm_head.weight"],
    }
    _add_tensors(out, {**_renamed(out, f"model.layers.{layers - 1}.", mtp), **head})
    _change_config(out, num_nextn_predict_layers=1)
    _save_tokenizer(out)


def make_eagle3(llama: Path, out: Path) -> Path:
    """Write a draft head of EAGLE 3 for the llama, of one layer, which sees three of the llama's layers. Returns `out`."""
    import json

    import torch
    from safetensors.torch import save_file

    saved = _tensors(llama)
    head = {
        "midlayer.hidden_norm.weight": _ones(),
        "norm.weight": saved["model.norm.weight"],
        "lm_head.weight": saved["lm_head.weight"],
        "fc.weight": torch.cat([torch.eye(HIDDEN)] * 3, 1).to(torch.bfloat16) / 3,
    }
    for name, tensor in _renamed(llama, "model.layers.0.", "midlayer.").items():
        # These see a token's embedding beside the llama's layers.
        twice = name.split(".")[2] in ("q_proj", "k_proj", "v_proj")
        head[name] = torch.cat([tensor, tensor], 1) if twice else tensor
    out.mkdir(parents=True, exist_ok=True)
    save_file(head, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((llama / "config.json").read_text())
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    }
    (out / "config.json").write_text(json.dumps(config))
    return out


def _make_idefics(out: Path) -> None:
    """An Idefics 3, which sees pictures: a llama with a small encoder. A picture is `PICTURE_TOKENS` tokens of the prompt.

    vLLM prepares its pictures without torchvision and mistral_common, which most other families need.
    """
    import torch
    from transformers import (
        Idefics3Config,
        Idefics3ForConditionalGeneration,
        Idefics3Processor,
        LlamaConfig,
    )
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    torch.manual_seed(0)
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=0,
        dtype="bfloat16",
    )
    patch, scale = 14, 2
    vision = Idefics3VisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=PICTURE_PIXELS,
        patch_size=patch,
    )
    config = Idefics3Config(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_id=PICTURE_TOKEN,
        scale_factor=scale,
        pad_token_id=0,
        dtype="bfloat16",
    )
    _save_model(Idefics3ForConditionalGeneration(config), out)
    tokenizer = _word_tokenizer(
        {
            PICTURE_TOKEN: "<image>",
            PICTURE_TOKEN - 1: "<fake_token_around_image>",
            PICTURE_TOKEN - 2: "<global-img>",
            PICTURE_TOKEN - 3: "<end_of_utterance>",
        }
    )
    longest = {"longest_edge": PICTURE_PIXELS}
    pictures = Idefics3ImageProcessorPil(
        size=longest, max_image_size=longest, do_image_splitting=False
    )
    seen = (PICTURE_PIXELS // patch // scale) ** 2
    Idefics3Processor(pictures, tokenizer, image_seq_len=seen).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _ones() -> Any:
    """The weight of a norm."""
    import torch

    return torch.ones(HIDDEN, dtype=torch.bfloat16)


def _both() -> Any:
    """A projection of two vectors to their sum."""
    import torch

    return torch.cat([torch.eye(HIDDEN)] * 2, 1).to(torch.bfloat16)


def _tensors(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = load_file(model / "model.safetensors")
    return found


def _renamed(model: Path, before: str, now: str) -> dict[str, Any]:
    """The tensors of a layer under other names."""
    return {
        now + name[len(before) :]: tensor.clone()
        for name, tensor in _tensors(model).items()
        if name.startswith(before)
    }


def _add_tensors(model: Path, more: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    together = {name: tensor.clone() for name, tensor in {**_tensors(model), **more}.items()}
    save_file(together, model / "model.safetensors", metadata={"format": "pt"})


def _change_config(model: Path, **changes: Any) -> None:
    import json

    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


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
    shrink = (HIDDEN / config.hidden_size) ** 0.5
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
    _word_tokenizer({}).save_pretrained(out)


def _word_tokenizer(special: dict[int, str]) -> Any:
    """A word a token. special: the words of some."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {special.get(i, f"tok{i}"): i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="tok0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    more = {"additional_special_tokens": list(special.values())} if special else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="tok0", eos_token="tok1", bos_token="tok2", **more
    )


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

    rank, hidden, sizes = 8, HIDDEN, {"q_proj": 256, "v_proj": 128}
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
