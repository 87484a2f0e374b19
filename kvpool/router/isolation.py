"""Keeps tenants' caches apart: whose prompts an engine, or the pool, has seen cannot be learnt by trying. No I/O.

vLLM hashes a request's `cache_salt` into its first block, and so into all that follow. The router replaces it by

    HMAC-SHA256(secret, region NUL the client's own salt), in hexadecimal digits

so that requests of two regions have no block in common. A tenant is a region of its own, unless its table names one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace

from kvpool.router.bodies import BadRequest, Body, with_field

FIELD = "cache_salt"


class Isolation:
    """secret: random bytes, the same for all routers of these engines. regions: by tenant, those that are named."""

    def __init__(self, secret: bytes, regions: Mapping[str, str]) -> None:
        self._secret = secret
        # A tenant cannot have the region of another one by its name alone.
        self._regions = {tenant: f"region {region}" for tenant, region in regions.items()}

    def salted(self, body: Body, tenant: str) -> Body:
        """The body with the salt of the tenant's region. Raises `BadRequest` for a salt that is no text."""
        own = body.value.get(FIELD)
        if own is not None and (not isinstance(own, str) or not own):
            # An engine might not see it as a salt, and then share the blocks.
            raise BadRequest(400, f"{FIELD} must be a text, and not empty", param=FIELD)
        region = self._regions.get(tenant, f"tenant {tenant}")
        said = f"{region}\0{own or ''}".encode(errors="surrogatepass")
        salt = hmac.new(self._secret, said, hashlib.sha256).hexdigest()
        return replace(body, value={**body.value, FIELD: salt}, raw=with_field(body, FIELD, salt))
