"""What the stub engine makes of text, and what it answers. No I/O, no clock.

A byte is a token. Roles and images have tokens of their own, which text may spell out (`<|user|>`), so that
`text_of` is the inverse of `tokens_of`. An answer follows from the prompt alone: whoever knows the prompt
knows what every engine has to answer, and a prompt that was lost or mixed up on the way is seen.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

VOCABULARY = 32_000
BOS = 256
IMAGE_TOKENS = 20
"""What an image takes in a prompt: more than a block, and no multiple of one."""

SPECIALS = ("begin", "end", "system", "user", "assistant", "tool", "tools", "image")
_IDS = {f"<|{name}|>": BOS + number for number, name in enumerate(SPECIALS)}
_NAMES = {number: text for text, number in _IDS.items()}
_SPLIT = re.compile("(" + "|".join(map(re.escape, _IDS)) + ")")
_END, _TOOLS, IMAGE = _IDS["<|end|>"], _IDS["<|tools|>"], _IDS["<|image|>"]


def tokens_of(text: str, *, special: bool = True) -> list[int]:
    """The tokens of a text. special: with the one that prompts begin with, as tokenizers do by default."""
    tokens = [BOS] if special else []
    for piece in _SPLIT.split(text):
        known = _IDS.get(piece)
        tokens += piece.encode("utf-8", "replace") if known is None else (known,)
    return tokens


def text_of(tokens: Sequence[int]) -> str:
    """Tokens as text; those that no text has are written as their number."""
    out = bytearray()
    for token in tokens:
        if token < BOS:
            out.append(token)
        else:
            out += _NAMES.get(token, f"<{token}>").encode()
    return out.decode("utf-8", "replace")


def chat_tokens(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> tuple[list[int], list[tuple[str, int, int]]]:
    """The chat template: the prompt, and its images, each with its name, first token and length.

    Raises `ValueError` for messages that are none.
    """
    tokens: list[int] = [BOS]
    images: list[tuple[str, int, int]] = []
    if tools:
        tokens += [_TOOLS, *json.dumps(list(tools), sort_keys=True).encode(), _END]
    for message in messages:
        role = _IDS.get(f"<|{message.get('role')}|>")
        if role is None:
            raise ValueError(f"Unexpected message role: {message.get('role')!r}")
        tokens.append(role)
        content = message.get("content") or ""
        parts: Sequence[Mapping[str, Any]] = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content
        )
        for part in parts:
            if part.get("type") == "text":
                tokens += tokens_of(part["text"], special=False)
            elif part.get("type") == "image_url":
                images.append((part["image_url"]["url"], len(tokens), IMAGE_TOKENS))
                tokens += [IMAGE] * IMAGE_TOKENS
            else:
                raise ValueError(f"Unknown part type: {part.get('type')!r}")
        for call in message.get("tool_calls") or ():
            tokens += json.dumps(call, sort_keys=True).encode()
        tokens.append(_END)
    if continue_final_message:
        tokens.pop()
    elif add_generation_prompt:
        tokens.append(_IDS["<|assistant|>"])
    return tokens, images


def answer(
    prompt: Sequence[int],
    count: int,
    *,
    lora: str = "",
    images: Sequence[str] = (),
    choice: int = 0,
) -> list[int]:
    """The first `count` tokens that any engine answers to a prompt: small letters.

    lora: name of the adapter. images: their names, in order. choice: which of several answers.
    """
    about = json.dumps([lora, list(images), choice]).encode()
    seed = xxhash.xxh3_64_intdigest(array("q", prompt).tobytes() + about)
    letters = []
    for _ in range(count):
        seed = (seed * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        letters.append(97 + (seed >> 33) % 26)
    return letters
