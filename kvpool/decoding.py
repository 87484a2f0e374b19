"""Bytes from outside this process, decoded: whatever is wrong with them is one error, `ProtocolError`.

msgspec reports it in several ways: what is not of the wanted type (`MsgspecError`), text that is not UTF-8
(`UnicodeDecodeError`), and values nested too deep, also in a field that is not wanted (`RecursionError`). Whoever
forgets one of them lets a sender end the process. So nothing else in this package calls msgspec's decoders.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Generic, TypeVar, cast

import msgspec

from kvpool.errors import InvalidRequest, ProtocolError

T = TypeVar("T")

FINITE_MAX = 1e300
Finite = Annotated[float, msgspec.Meta(ge=-FINITE_MAX, le=FINITE_MAX)]
"""Neither NaN, which compares with nothing, nor infinite, which never ends. MessagePack can carry both."""


def finite(number: float, name: str) -> float:
    """The same as a message can carry it: at most `FINITE_MAX`. Raises `InvalidRequest` for what is no number."""
    if -FINITE_MAX <= number <= FINITE_MAX:
        return number
    if math.isnan(number):
        raise InvalidRequest(f"{name} must be a number, not NaN")
    return min(max(number, -FINITE_MAX), FINITE_MAX)


_BAD = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class WrongValue(ProtocolError):
    """Well-formed bytes with a value that its field cannot have: what was sent after them can still be read."""


class _Decoder(Generic[T]):
    """Decodes values of one type. Thread-safe.

    Values are the caller's, and share no memory with the bytes unless their type is `Raw` or a view.
    """

    __slots__ = ("_decode", "_what")

    def __init__(self, decode: Any, what: str) -> None:
        self._decode = decode
        self._what = what

    def __call__(self, data: bytes | bytearray | memoryview | str | msgspec.Raw) -> T:
        """Raises `ProtocolError`, of the kind `WrongValue` if only a value is wrong."""
        try:
            return cast(T, self._decode(data))
        except _BAD as error:
            kind = WrongValue if isinstance(error, msgspec.ValidationError) else ProtocolError
            raise kind(f"not {self._what}: {str(error)[:500]}") from None


class MsgpackDecoder(_Decoder[T]):
    """See `_Decoder`. what: in the error, as "a message of this protocol"."""

    def __init__(self, kind: type[T] | Any, what: str) -> None:
        super().__init__(msgspec.msgpack.Decoder(kind).decode, what)


class JsonDecoder(_Decoder[T]):
    """The same for JSON."""

    def __init__(self, kind: type[T] | Any, what: str) -> None:
        super().__init__(msgspec.json.Decoder(kind).decode, what)


def decode_json(data: bytes | bytearray | memoryview | str, kind: type[T], what: str) -> T:
    """One value, of a type that is known only now. Raises `ProtocolError`."""
    return JsonDecoder[T](kind, what)(data)


def decode_hex(text: str, what: str) -> bytes:
    """Raises `ProtocolError`."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ProtocolError(f"not {what} in hex: {text!r:.100}") from None
