"""The handshake of two daemons: version, cluster, and the proof that both know its secret.

    connecting                       listening
    PeerHello(nonce a)      ->
                            <-       PeerChallenge(nonce b, proof of the listener)
    PeerProof(proof)        ->
                            <-       Done

A proof is HMAC-SHA256, keyed with the cluster secret, over everything both have sent, and over the
sender's role, so that neither can be given back its own. Without a secret proofs are empty.

Over TLS (`tls`) proofs also cover the connection's binding, so a proof made for a man in the middle proves
nothing at his other end; and each side must be the node in its certificate. Without TLS the bytes that follow are
neither encrypted nor signed. (Blocks are compared with their checksums in any case, which stops accidents, not
forgers.)
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvpool.errors import KvpoolError, NotAuthenticated, ProtocolError
from kvpool.transfer.base import Identity
from kvpool.transfer.stream import Stream
from kvpool.wire.frame import (
    HELLO_BYTES_MAX,
    PROTOCOL_OLDEST,
    PROTOCOL_VERSION,
    Done,
    Message,
    agree,
    error_message,
    raise_error,
)
from kvpool.wire.frame import Error as ErrorMessage
from kvpool.wire.peer import PeerChallenge, PeerHello, PeerProof, decode_peer

M = TypeVar("M", bound=Message)

NONCE_BYTES = 32


def greet(stream: Stream, us: Identity) -> PeerChallenge:
    """Authenticate to a daemon after connecting; returns its message.

    Raises `NotAuthenticated`, `ProtocolError` for another version, and the errors of `Stream`.
    """
    hello = PeerHello(
        PROTOCOL_VERSION, us.cluster, us.node, os.urandom(NONCE_BYTES), PROTOCOL_OLDEST
    )
    stream.send(hello, 1)
    challenge = _answer(stream, PeerChallenge)
    agree(challenge.version, challenge.oldest, "the peer")
    _check_nonce(challenge.nonce)
    _check_name(stream, challenge.node)
    expected = _proof(us.secret, b"listens", hello, challenge, stream.binding)
    if not hmac.compare_digest(challenge.proof, expected):
        raise NotAuthenticated(
            "the peer did not prove that it belongs to this cluster: set the same cluster secret on all daemons"
        )
    proof = _proof(us.secret, b"connects", hello, challenge, stream.binding)
    stream.send(PeerProof(proof), 2)
    _answer(stream, Done)
    return challenge


def admit(stream: Stream, us: Identity, known: Callable[[], None] = lambda: None) -> PeerHello:
    """Authenticate a daemon that connected, and return its message. Raises as `greet`.

    known: called when it is authenticated, before it is told so.
    """
    request, payload = stream.receive(HELLO_BYTES_MAX)
    hello = decode_peer(payload)
    if not isinstance(hello, PeerHello):
        raise ProtocolError("the first frame between daemons must be a PeerHello")
    agree(hello.version, hello.oldest, "the peer")
    _check_nonce(hello.nonce)
    if hello.cluster != us.cluster:
        raise NotAuthenticated(
            f"this daemon does not belong to cluster {hello.cluster!r}: set the same name on all daemons of a "
            "cluster"
        )
    _check_name(stream, hello.node)
    nonce = os.urandom(NONCE_BYTES)
    challenge = PeerChallenge(
        PROTOCOL_VERSION, us.node, us.incarnation, nonce, b"", PROTOCOL_OLDEST
    )
    proof = _proof(us.secret, b"listens", hello, challenge, stream.binding)
    stream.send(msgspec.structs.replace(challenge, proof=proof), request)
    request, payload = stream.receive(HELLO_BYTES_MAX)
    shown = decode_peer(payload)
    if not isinstance(shown, PeerProof):
        raise ProtocolError("the answer to a PeerChallenge must be a PeerProof")
    expected = _proof(us.secret, b"connects", hello, challenge, stream.binding)
    if not hmac.compare_digest(shown.proof, expected):
        raise NotAuthenticated(
            "wrong proof: set the same cluster secret on all daemons of the cluster"
        )
    stream.peer_node = hello.node
    known()
    stream.send(Done(), request)
    return hello


def refuse(stream: Stream, error: KvpoolError) -> None:
    """Tell the peer the reason, if it still listens."""
    try:
        stream.send(error_message(error), 0)
    except KvpoolError:
        pass  # it does not; the caller's reason matters


def _answer(stream: Stream, kind: type[M]) -> M:
    message = decode_peer(stream.receive(HELLO_BYTES_MAX)[1])
    if isinstance(message, ErrorMessage):
        raise_error(message)
    if not isinstance(message, kind):
        raise ProtocolError(f"the peer answered the handshake with a {type(message).__name__}")
    return message


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_BYTES:
        raise ProtocolError(f"a nonce must have {NONCE_BYTES} bytes, not {len(nonce)}")


def _check_name(stream: Stream, node: str) -> None:
    if stream.peer_node not in (None, node):
        raise NotAuthenticated(
            f"a peer claims to be node {node!r}, but its certificate is for {stream.peer_node!r}: give each node its "
            "own (kvpool certs node)"
        )


def _proof(
    secret: bytes, speaker: bytes, hello: PeerHello, challenge: PeerChallenge, binding: bytes
) -> bytes:
    if not secret:
        return b""
    said: tuple[object, ...] = (
        speaker,
        hello.version,
        hello.cluster,
        hello.node,
        hello.nonce,
        hello.oldest,
        challenge.version,
        challenge.node,
        challenge.incarnation,
        challenge.nonce,
        challenge.oldest,
    )
    if binding:
        said = (*said, binding)
    return hmac.digest(secret, msgspec.msgpack.encode(said), hashlib.sha256)
