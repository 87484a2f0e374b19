"""Access control: tokens, peers of unix sockets, hosts and origins, and limits of failed attempts. No I/O."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from urllib.parse import urlsplit

from kvpool.admin.problems import Refused
from kvpool.admin.tokens import (
    LOCAL_NAME,
    TOKEN_CHARACTERS_MAX,
    Principal,
    Rates,
    Tokens,
    digest_of,
)
from kvpool.net import names_loopback

WRONG_BURST = 0.2  # of the rate: so many wrong tokens from one address at once
WRONG_SHARE = 1 / 300  # of the rate: so many a second after that
ADDRESSES_MAX = 4096
KNOWN_MAX = 4096  # addresses and the tokens that were right there
BURST = 2.0  # times the rate
LOCAL = Principal(LOCAL_NAME, "admin")
_HOST = re.compile(r"[A-Za-z0-9._\[\]:-]{0,255}")


class Guard:
    """Decides about requests before anything is done for them. Event loop only.

    rate: requests a second of each token. uid: of the daemon, whose processes a unix socket accepts. failed: is told
    of each wrong token: from where, and what is wrong.
    """

    def __init__(
        self,
        tokens: Tokens,
        rate: float,
        uid: int,
        clock: Callable[[], float],
        failed: Callable[[str, str], object] = lambda *_: None,
    ) -> None:
        self._failed = failed
        self._tokens = tokens
        self._uid = uid
        self._wrong_s = 1 / (WRONG_SHARE * rate)
        burst = max(1.0, WRONG_BURST * rate)
        self._wrong = Rates(WRONG_SHARE * rate, burst, clock, ADDRESSES_MAX)
        self._rates = Rates(rate, max(1.0, BURST * rate), clock, ADDRESSES_MAX)
        self._known: OrderedDict[tuple[str, bytes], None] = OrderedDict()

    def admit(self, address: str, uid: int | None, authorization: str) -> Principal:
        """address: of the client; of a unix socket's, whose user is `uid`, empty. Raises `Refused`."""
        if uid is not None and not authorization and uid == self._uid:
            who = LOCAL
        else:
            who = self._by_token(address, authorization)
        if wait_s := self._rates.take(who.name):
            raise _too_many("requests of this token", wait_s)
        return who

    def admits_still(self, who: Principal) -> bool:
        """Whether an accepted principal still would be: tokens can be removed."""
        return who is LOCAL or self._tokens.has(who)

    def _by_token(self, address: str, authorization: str) -> Principal:
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        # A token that was valid from an address is not blocked by failed attempts of others there.
        place = (address, digest_of(token[:TOKEN_CHARACTERS_MAX]))
        if place not in self._known and self._wrong.empty(address):
            raise _too_many("failed authentication attempts", self._wrong_s)
        found = None
        if scheme.lower() == "bearer" and 0 < len(token) <= TOKEN_CHARACTERS_MAX:
            found = self._tokens.find(token)
        if found is None:
            self._known.pop(place, None)
            self._wrong.take(address)
            if authorization:
                self._failed(address or "unix socket", "a wrong token")
            raise Refused(
                401,
                "not_authenticated",
                "Authorization: Bearer TOKEN is missing or wrong",
                {"WWW-Authenticate": 'Bearer realm="kvpool"'},
            )
        self._known[place] = None
        self._known.move_to_end(place)
        if len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return found


def check_host(host: str, origin: str, *, loopback: bool) -> None:
    """Refuse web pages of other sites, under any host name. Raises `Refused`.

    loopback: only this machine can have sent it, by a name that leads nowhere else. Without an Origin it is not
    from a web page, or from one that cannot read the answer.
    """
    if not _HOST.fullmatch(host):
        raise Refused(400, "invalid", "the Host header is not a valid host name")
    if loopback and not names_loopback(host):
        raise Refused(421, "wrong_host", "on loopback use a local host name such as localhost")
    if origin:
        try:
            parts = urlsplit(origin)
            same = bool(parts.netloc) and parts.netloc.lower() == host.lower()
        except ValueError:
            same = False
        if not same:
            raise Refused(403, "wrong_origin", "cross-site requests are refused")


def _too_many(what: str, wait_s: float) -> Refused:
    return Refused(
        429,
        "limit",
        f"too many {what}: retry in {wait_s:.1f} s",
        {"Retry-After": str(int(wait_s) + 1)},
    )
