"""Keeps tenants' caches apart: whose prompts an engine, or the pool, has seen cannot be learnt by trying. No I/O.

vLLM hashes a request's `cache_salt` into its first block, and so into all that follow. The router replaces it by

    HMAC-SHA256(secret, region NUL the client's own salt), in hexadecimal digits

so that requests of two regions have no block in common. A tenant is a region of its own, unless its table names one.

Names that clients give to media (`uuid`) are replaced in the same way: vLLM caches what it makes of media under them.
What engines would hand each other by address is refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvpool.router.http.bodies import BadRequest, Body, with_field

FIELD = "cache_salt"
REFUSED = ("kv_transfer_params", "ec_transfer_params")
"""Fields that may name what others have in an engine, beside its prefix cache."""


class Isolation:
    """secret: random bytes, the same for all routers of these engines. regions: by tenant, those that are named."""

    def __init__(self, secret: bytes, regions: Mapping[str, str]) -> None:
        self._secret = secret
        # A tenant cannot have the region of another one by its name alone.
        self._regions = {tenant: f"region {region}" for tenant, region in regions.items()}

    def salted(self, body: Body, tenant: str) -> Body:
        """The body with the salt of the tenant's region. Raises `BadRequest` for what could lead out of it."""
        if not body.kind.has_tokens:
            raise BadRequest(
                400,
                f"{body.kind} is not served where tenants are isolated: engines do not salt what they cache of it",
            )
        for name in REFUSED:
            if body.value.get(name) is not None:
                raise BadRequest(400, f"{name} is not taken where tenants are isolated", param=name)
        own = body.value.get(FIELD)
        if own is not None and (not isinstance(own, str) or not own):
            # An engine might not see it as a salt, and then share the blocks.
            raise BadRequest(400, f"{FIELD} must be a text, and not empty", param=FIELD)
        region = self._regions.get(tenant, f"tenant {tenant}")
        body = _with(body, FIELD, self._digest(region, own or ""))
        messages = body.value.get("messages")
        renamed = self._renamed(messages, f"media\0{region}")
        return body if renamed == messages else _with(body, "messages", renamed)

    def _renamed(self, messages: Any, region: str) -> Any:
        """With other names of media in the parts of messages."""
        if not isinstance(messages, list):
            return messages
        return [
            {
                **message,
                "content": [self._renamed_part(part, region) for part in message["content"]],
            }
            if isinstance(message, dict) and isinstance(message.get("content"), list)
            else message
            for message in messages
        ]

    def _renamed_part(self, part: Any, region: str) -> Any:
        uuid = part.get("uuid") if isinstance(part, dict) else None
        if uuid is None:
            return part
        if not isinstance(uuid, str):
            raise BadRequest(400, "the uuid of a part must be a text", param="messages")
        return {**part, "uuid": self._digest(region, uuid)}

    def _digest(self, region: str, name: str) -> str:
        said = f"{region}\0{name}".encode(errors="surrogatepass")
        return hmac.new(self._secret, said, hashlib.sha256).hexdigest()


def _with(body: Body, field: str, value: Any) -> Body:
    return replace(body, value={**body.value, field: value}, raw=with_field(body, field, value))
