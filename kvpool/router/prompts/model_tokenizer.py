"""A model's tokenizer, from its files. Needs the extra kvpool[tokenizer].

What an engine makes of the same files may differ in ways that they do not show (its own chat template, a class that
changes the tokenizer after loading it), so its user compares both (`own_tokenizers.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvpool.errors import ConfigError, InvalidRequest
from kvpool.extras import install

FILE = "tokenizer.json"
CHARACTERS_MAX = 1 << 20
"""Longer prompts are left to engines: a thread would be busy with one for seconds."""


class ModelTokenizer:
    """Thread-safe; releases the GIL while it encodes."""

    def __init__(self, folder: str) -> None:
        """folder: with `tokenizer.json` and, for chats, a chat template. Raises `ConfigError`."""
        try:
            from tokenizers import Tokenizer

            from kvpool.router.prompts.chat_template import read_chat_template
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"models: a tokenizer needs {error.name}: {install('tokenizer')}"
            ) from None
        path = Path(folder) / FILE
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"models: cannot read {path}: {error}") from None
        try:
            tokenizer = Tokenizer.from_str(text)
        except Exception as error:  # noqa: BLE001  (the library raises nothing narrower)
            raise ConfigError(f"models: {path} is not a tokenizer: {error}") from None
        # Engines compute whole prompts, whatever the file says.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._chat_template = read_chat_template(Path(folder))

    def encode(self, asked: Mapping[str, Any]) -> list[int] | None:
        """The tokens for a `tokens.question`; None: only an engine can tell. Raises `InvalidRequest`."""
        # A chat template writes special tokens itself.
        chat = "messages" in asked
        special = asked.get("add_special_tokens", not chat)
        text = self._rendered(asked) if chat else asked.get("prompt")
        if not isinstance(text, str) or len(text) > CHARACTERS_MAX or type(special) is not bool:
            return None
        try:
            # Of one text, `encode` would keep the GIL.
            [found] = self._tokenizer.encode_batch_fast([text], add_special_tokens=special)
        except Exception as error:  # noqa: BLE001  (the library raises nothing narrower)
            raise InvalidRequest(f"a prompt cannot be tokenised: {error}") from None
        tokens: list[int] = found.ids
        return tokens

    def _rendered(self, asked: Mapping[str, Any]) -> str | None:
        return None if self._chat_template is None else self._chat_template.render(asked)
