"""A request's prompt: its tokens, its block hashes, and how much of it the pool has.

Tokens come from the router's own tokenizer of the model or an engine that serves it, hashes are computed here. The pool's part is requested from the
daemon for each prompt, which asks its directory, and the answer is written to the index (`pool_view.py`).
Event loop only; the daemon is called in threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kvpool.errors import KvpoolError, Unavailable
from kvpool.router.daemon_link import DaemonLink
from kvpool.router.engines.engine_catalog import EngineCatalog
from kvpool.router.engines.pool_view import PoolViews
from kvpool.router.hashing import Hasher, HashSpec, Item, Prompt, index_keys, salt_of
from kvpool.router.prompts.rendering import PATHS, Renderer
from kvpool.router.prompts.tokens import Tokenizer, UnknownModel, question
from kvpool.router.upstream.specs import EngineSpec
from kvpool.types import KEY_BYTES

Told = Callable[[bytes, Sequence[int], Mapping[str, tuple[int, ...]]], None]

TOKENIZE_TRIES = 2
LONG_TOKENS = 1 << 16
"""From here on hashing takes longer than others may wait: some 20 ms."""
COUNTED = ("looks", "late_looks", "failed_looks")
LOOKS_MAX = 32
"""Concurrent lookups in the pool; further prompts skip it."""


@dataclass(eq=False, repr=False, slots=True)
class Prompts:
    """See the module."""

    _catalog: EngineCatalog
    _daemon: DaemonLink | None
    """None: this host has none, and the pool's contents are unknown."""
    _tokenizer: Tokenizer
    _renderer: Renderer
    _pools: PoolViews
    _clock: Callable[[], float] = time.monotonic
    _api_key: Callable[[EngineSpec], str] = lambda _: ""
    _told: Told = lambda *_: None
    """Is told of each of the pool's answers."""
    _hasher: Hasher = field(default_factory=Hasher, init=False)
    _long_hasher: Hasher = field(default_factory=Hasher, init=False)
    _long: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _turn: int = field(default=0, init=False)
    _looking: int = field(default=0, init=False)
    _looks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    _counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0), init=False)

    async def prompt(
        self,
        body: Mapping[str, Any],
        kind: str,
        *,
        deadline_s: float = 5.0,
        like: EngineSpec | None = None,
    ) -> Prompt:
        """A request's prompt. kind: as `tokens.question` has it. deadline_s: for an engine to tokenise it.

        like: hashed as this engine does, whose hashing is known; None: as most engines of the model do.

        Raises `UnknownModel`, `TokenizeRefused` with the engine's answer, and `Unavailable` when none answers.
        """
        model = body.get("model") or ""
        served = self._catalog.serving(model) if isinstance(model, str) else None
        if served is None:
            raise UnknownModel(f"no engine serves {str(model)[:200]!r}")
        serving, kinds, chosen = served.engines, served.kinds, like or served.chosen
        asked = question(body, kind)
        salt = body.get("cache_salt")
        tokens: Sequence[int] | None = None
        items: Sequence[Item] = ()
        if isinstance(asked, dict):
            tokens = await self._tokenize(
                *(serving, {"model": model or serving[0].model, **asked}, deadline_s),
                scope=salt if isinstance(salt, str) else "",
            )
        elif asked is not None:
            tokens = asked
        elif kind in PATHS:
            tokens, items = await self._render(serving, kind, body, deadline_s)
        if not tokens or chosen is None:
            return Prompt(model, tokens or (), (), (), kinds, None)
        hashing = chosen.hashing
        assert hashing is not None
        path = chosen.adapters.get(model)
        if len(tokens) >= LONG_TOKENS and all(0 < s.max_len <= len(tokens) for s in serving):
            return Prompt(model, tokens, (), (), kinds, None)  # no engine takes it
        try:
            hashes = await self._hashes(
                hashing,
                tokens,
                salt if isinstance(salt, str) else None,
                None if path is None else (model, path),
                items,
            )
        except ValueError:
            return Prompt(model, tokens, (), (), kinds, None)  # the engine will report the error
        keys = index_keys(hashes, salt_of(chosen.model, hashing))
        return Prompt(model, tokens, hashes, keys, kinds, hashing)

    async def _hashes(
        self,
        spec: HashSpec,
        tokens: Sequence[int],
        salt: str | None,
        lora: tuple[str, str] | None,
        items: Sequence[Item],
    ) -> list[bytes]:
        """A long prompt is hashed in a thread, one at a time, while the loop goes on. Raises `ValueError`."""
        of: dict[str, Any] = {"salt": salt, "lora": lora, "multimodal": items}
        if len(tokens) < LONG_TOKENS:
            return self._hasher.chain(spec, tokens, **of)
        async with self._long:
            return await asyncio.to_thread(partial(self._long_hasher.chain, spec, tokens, **of))

    async def _tokenize(
        self,
        serving: Sequence[EngineSpec],
        asked: Mapping[str, Any],
        deadline_s: float,
        scope: str = "",
    ) -> Sequence[int] | None:
        """By one engine after the other, starting with a different one each time; healthy ones first."""
        serving = [spec for spec in serving if self._catalog.answers(spec)] or serving
        deadline = self._clock() + deadline_s
        failed: Unavailable | None = None
        for left in range(min(TOKENIZE_TRIES, len(serving)), 0, -1):
            self._turn += 1
            spec = serving[self._turn % len(serving)]
            wait_s = max(0.001, (deadline - self._clock()) / left)
            try:
                return await self._tokenizer.tokenize(
                    *(spec.url, asked), deadline_s=wait_s, api_key=self._api_key(spec), scope=scope
                )
            except Unavailable as error:
                failed = error
        assert failed is not None
        raise failed

    async def _render(
        self, serving: Sequence[EngineSpec], kind: str, body: Mapping[str, Any], deadline_s: float
    ) -> tuple[Sequence[int], Sequence[Item]]:
        """By one engine, if there is one that renders; nothing if it does not render this prompt.

        One is asked, not one after the other: media are costly.
        """
        able = [
            spec
            for spec in serving
            if self._catalog.answers(spec) and self._renderer.renders_at(spec.url)
        ]
        if not able:
            return (), ()
        self._turn += 1
        spec = able[self._turn % len(able)]
        rendered = await self._renderer.render(
            *(spec.url, kind, body), deadline_s=deadline_s, api_key=self._api_key(spec)
        )
        return rendered or ((), ())

    async def look(self, prompt: Prompt, wait_s: float = 0.02) -> bool:
        """Update the index with each node's part of a prompt; returns whether that was done within this time.

        False: the daemon is slow, unreachable, or missing. A later answer is written, too.
        """
        daemon = self._daemon
        namespaces = {
            spec.namespace
            for spec in self._catalog.engines.values()
            if spec.namespace and spec.hashing == prompt.spec and spec.serves(prompt.model)
        }
        if daemon is None or not prompt.keys or not namespaces:
            return False
        if self._looking + len(namespaces) > LOOKS_MAX:
            self._counts["late_looks"] += 1
            return False
        packed = b"".join([each[-KEY_BYTES:] for each in prompt.hashes])
        looks = [
            asyncio.get_running_loop().create_task(
                self._look(daemon, namespace, packed, prompt.keys, wait_s)
            )
            for namespace in namespaces
        ]
        for look in looks:
            self._looks.add(look)
            look.add_done_callback(self._looks.discard)
        self._counts["looks"] += 1
        _, late = await asyncio.wait(looks, timeout=wait_s)
        self._counts["late_looks"] += bool(late)
        return not late and not daemon.error

    async def _look(
        self,
        daemon: DaemonLink,
        namespace: bytes,
        packed: bytes,
        keys: Sequence[int],
        wait_s: float,
    ) -> None:
        self._looking += 1
        try:
            found = await daemon.ask(
                lambda client: client.routing.prefixes(namespace, packed, wait_s=wait_s)
            )
        except KvpoolError:
            self._counts["failed_looks"] += 1
            return
        finally:
            self._looking -= 1
        self._pools.told(namespace, keys, found)
        self._told(namespace, keys, found)

    async def why(self, prompt: Prompt, engine: str) -> dict[str, Any] | None:
        """Why the engine's node could not provide more of a prompt: see `kvpool.wire.client.WhyMissing`.

        None: the node or its namespace is not known. `error`, if the daemon did not say.
        """
        spec = self._catalog.engines.get(engine)
        daemon = self._daemon
        known = spec is not None and spec.node and spec.namespace and spec.hashing == prompt.spec
        if daemon is None or spec is None or not known or not prompt.keys:
            return None
        if self._looking >= LOOKS_MAX:
            return {"error": "too many lookups are in progress"}
        packed = b"".join([each[-KEY_BYTES:] for each in prompt.hashes])
        self._looking += 1
        try:
            return await daemon.ask(
                lambda client: client.routing.why_missing(spec.namespace, packed, node=spec.node)
            )
        except KvpoolError as error:
            return {"error": str(error)}
        finally:
            self._looking -= 1

    def stats(self) -> dict[str, int]:
        """Plain values, counted from the start."""
        return {
            "tokenized": self._tokenizer.misses,
            "tokenized_here": self._tokenizer.own_count,
            "tokens_remembered": self._tokenizer.hits,
            "rendered": self._renderer.renders,
            **self._pools.stats(),
            **self._counts,
        }

    async def close(self) -> None:
        """Cancel calls to the daemon and what else runs here."""
        await self._tokenizer.close()
        looks = list(self._looks)
        for look in looks:
            look.cancel()
        await asyncio.gather(*looks, return_exceptions=True)
