"""The router's own tokenizers, one a configured model, and whether their tokens count.

A prompt that is tokenised here is no call to an engine. Were its tokens not the engine's, prefill orders would
compute blocks that no request finds, so they are compared: the first `FIRST` prompts of a model that are asked for,
completions and chats apart, before they are used, and `SHARE` of all others meanwhile. After one difference the
engines tokenise until the router restarts. Answers are right in any case: they are made from the client's own body.

Event loop only; encodes in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from kvpool.errors import InvalidRequest, Unavailable

log = logging.getLogger("kvpool.router")

FIRST = 8
SHARE = 0.01
THREADS = 2
PENDING_MAX = 64
"""Prompts that wait for a thread; further ones are tokenised by engines."""
COMPLETIONS, CHAT = "completions", "chat"
KINDS = (COMPLETIONS, CHAT)


class Encodes(Protocol):
    """As `model_tokenizer.ModelTokenizer`."""

    def encode(self, asked: Mapping[str, Any]) -> list[int] | None: ...


@dataclass(slots=True)
class _Standing:
    """equal: prompts that were the same. differs: one was not."""

    equal: int = 0
    differs: bool = False

    @property
    def proven(self) -> bool:
        return self.equal >= FIRST and not self.differs


class OwnTokenizers:
    """See the module. told: called with model, kind, and whether the router tokenises these now."""

    def __init__(
        self,
        tokenizers: Mapping[str, Encodes],
        random: Callable[[], float],
        told: Callable[[str, str, bool], None] = lambda *_: None,
    ) -> None:
        self._tokenizers = tokenizers
        self._random = random
        self._told = told
        self._standing = {(model, kind): _Standing() for model in tokenizers for kind in KINDS}
        self._pending = 0
        self._threads: ThreadPoolExecutor | None = None
        if tokenizers:
            self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        for model, kind in self._standing:
            told(model, kind, False)

    async def encode(self, asked: Mapping[str, Any], within_s: float) -> list[int] | None:
        """A prompt's tokens, by the model's own tokenizer; None: an engine is to be asked.

        Raises `Unavailable` if no thread was free, or did it, in time.
        """
        standing = self._standing.get(_name(asked))
        if standing is None or standing.differs or self._pending >= PENDING_MAX:
            return None
        tokenizer = self._tokenizers[asked["model"]]
        loop = asyncio.get_running_loop()
        self._pending += 1
        try:
            async with asyncio.timeout(within_s):
                return await loop.run_in_executor(self._threads, tokenizer.encode, asked)
        except TimeoutError:
            raise Unavailable(f"no tokens of a prompt within {within_s:.3g} s") from None
        except InvalidRequest:
            return None  # the engine will say what is wrong
        finally:
            self._pending -= 1

    def proven(self, asked: Mapping[str, Any]) -> bool:
        """Whether tokens of such prompts can be used as they are."""
        return self._standing[_name(asked)].proven

    def samples(self) -> bool:
        """Whether to compare this prompt, too."""
        return self._random() < SHARE

    def compare(self, asked: Mapping[str, Any], ours: Sequence[int], theirs: Sequence[int]) -> bool:
        """Whether they are equal. theirs: the engine's."""
        model, kind = _name(asked)
        standing = self._standing[model, kind]
        if standing.differs:
            return False
        if ours == theirs:
            standing.equal += 1
            if standing.equal == FIRST:
                self._told(model, kind, True)
            return True
        standing.differs = True
        self._told(model, kind, False)
        at = next(
            (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        log.error(
            "the tokenizer configured for model %s is not the engines': of a prompt (%s) it makes %d tokens, an "
            "engine %d, and number %d is %s instead of %s. Engines tokenise %s of this model from now on",
            *(model, kind, len(ours), len(theirs), at, _shown(ours, at), _shown(theirs, at), kind),
        )
        return False

    def close(self) -> None:
        """Does not wait for prompts that are being encoded."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _name(asked: Mapping[str, Any]) -> tuple[str, str]:
    return asked["model"], CHAT if "messages" in asked else COMPLETIONS


def _shown(tokens: Sequence[int], at: int) -> str:
    """One token: not the prompt, which is its sender's."""
    return str(tokens[at]) if at < len(tokens) else "none"
