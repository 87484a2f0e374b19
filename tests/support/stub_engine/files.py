"""The files of the stub engine's model: its tokenizer and its chat template, as real models have them.

Made with the library that reads them, from what `tokens.py` says; whoever loads them must find the same tokens.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tests.support.stub_engine.tokens import BOS, SPECIALS

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
BEGIN = f"<|{SPECIALS[0]}|>"


def write_files(folder: Path, *, template: str = TEMPLATE, begins: bool = True) -> Path:
    """Returns `folder`. begins: whether prompts begin with the token for that, as the engine's do."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: _byte_of(letter, sorted(letters)) for letter in letters}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIALS])
    assert tokenizer.token_to_id(BEGIN) == BOS
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, BOS)]
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BEGIN, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _byte_of(letter: str, letters: list[str]) -> int:
    """Which byte a letter of byte-level BPE stands for: printable ones stand for themselves, others follow 255."""
    if ord(letter) < BOS:
        return ord(letter)
    others = [number for number in range(BOS) if chr(number) not in letters]
    return others[ord(letter) - BOS]
