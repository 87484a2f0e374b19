"""The handshake of two daemons: version, cluster, the proof that both know its secret, and keys for what follows.

    connecting                       listening
    PeerHello(nonce a)      ->
                            <-       PeerChallenge(nonce b, proofs of the listener, one for each of its secrets)
    PeerProof(proof)        ->
                            <-       Done

A proof is HMAC-SHA256, keyed with a cluster secret, over everything both have sent but the proofs, and over the
sender's role, so that neither can be given back its own. While secrets are being replaced a daemon has several: the
connecting side takes the first of its own that the listener has too.

Over TLS (`tls`) proofs also cover the connection's binding, so a proof made for a man in the middle proves
nothing at his other end; and each side must be the node in its certificate. Without TLS, all that follows `Done` is
authenticated by tags (`sealing`), with keys that are made of the secret and of all that both have sent, both nonces
included: who passed the handshake on, without the secret, can read everything and change nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable
from typing import TypeVar

import msgspec

from kvpool.errors import KvpoolError, NotAuthenticated, ProtocolError
from kvpool.security.cluster_secrets import SECRETS_MAX
from kvpool.transfer.base import Identity
from kvpool.transfer.stream import Stream
from kvpool.wire.frame import (
    HELLO_BYTES_MAX,
    NONCE_BYTES,
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

LISTENS, CONNECTS = b"listens", b"connects"  # whose proof it is
LISTENS_KEY, CONNECTS_KEY = b"listener's key", b"connector's key"  # whose bytes it is for


def greet(stream: Stream, us: Identity) -> PeerChallenge:
    """Authenticate to a daemon after connecting; returns its message.

    Raises `NotAuthenticated`, `ProtocolError` for another version, and the errors of `Stream`.
    """
    secrets = _secrets(us)
    hello = PeerHello(PROTOCOL_VERSION, us.cluster, us.node, os.urandom(NONCE_BYTES))
    stream.send(hello, 1)
    challenge = _answer(stream, PeerChallenge)
    agree(challenge.version, challenge.oldest, "the peer")
    _check_name(stream, challenge.node)
    said = _said(hello, challenge, stream.binding)
    secret = _proved((challenge.proof, *challenge.more), secrets, LISTENS, said)
    if secret is None:
        raise NotAuthenticated(
            "the peer did not prove that it belongs to this cluster: set the same cluster secret on all daemons"
        )
    stream.send(PeerProof(_digest(secret, CONNECTS, said)), 2)
    _answer(stream, Done)
    _rely_on(secret, stream, us, said, (CONNECTS_KEY, LISTENS_KEY))
    return challenge


def admit(stream: Stream, us: Identity, known: Callable[[], None] = lambda: None) -> PeerHello:
    """Authenticate a daemon that connected, and return its message. Raises as `greet`.

    known: called when it is authenticated, before it is told so.
    """
    secrets = _secrets(us)
    request, payload = stream.receive(HELLO_BYTES_MAX)
    hello = decode_peer(payload)
    if not isinstance(hello, PeerHello):
        raise ProtocolError("the first frame between daemons must be a PeerHello")
    agree(hello.version, hello.oldest, "the peer")
    if hello.cluster != us.cluster:
        raise NotAuthenticated(
            f"this daemon does not belong to cluster {hello.cluster!r}: set the same name on all daemons of a "
            "cluster"
        )
    _check_name(stream, hello.node)
    nonce = os.urandom(NONCE_BYTES)
    challenge = PeerChallenge(PROTOCOL_VERSION, us.node, us.incarnation, nonce, b"")
    said = _said(hello, challenge, stream.binding)
    first, *more = (_digest(secret, LISTENS, said) for secret in secrets)
    stream.send(msgspec.structs.replace(challenge, proof=first, more=tuple(more)), request)
    request, payload = stream.receive(HELLO_BYTES_MAX)
    shown = decode_peer(payload)
    if not isinstance(shown, PeerProof):
        raise ProtocolError("the answer to a PeerChallenge must be a PeerProof")
    secret = _proved((shown.proof,), secrets, CONNECTS, said)
    if secret is None:
        raise NotAuthenticated(
            "wrong proof: set the same cluster secret on all daemons of the cluster"
        )
    stream.peer_node = hello.node
    known()
    stream.send(Done(), request)
    _rely_on(secret, stream, us, said, (LISTENS_KEY, CONNECTS_KEY))
    return hello


def refuse(stream: Stream, error: KvpoolError, request: int = 0) -> None:
    """Tell the peer the reason, if it still listens. request: the one that is refused; 0: the connection."""
    try:
        stream.send(error_message(error), request)
    except KvpoolError:
        pass  # it does not; the caller's reason matters


def _answer(stream: Stream, kind: type[M]) -> M:
    message = decode_peer(stream.receive(HELLO_BYTES_MAX)[1])
    if isinstance(message, ErrorMessage):
        raise_error(message)
    if not isinstance(message, kind):
        raise ProtocolError(f"the peer answered the handshake with a {type(message).__name__}")
    return message


def _check_name(stream: Stream, node: str) -> None:
    if stream.peer_node not in (None, node):
        raise NotAuthenticated(
            f"a peer claims to be node {node!r}, but its certificate is for {stream.peer_node!r}: give each node its "
            "own (kvpool certs node)"
        )


def _secrets(us: Identity) -> tuple[bytes, ...]:
    secrets = us.secrets.current()
    if not secrets:
        raise NotAuthenticated(
            "this daemon has no cluster secret, so it has no peers: set cluster_secret_file, or KVPOOL_CLUSTER_SECRET"
        )
    return secrets


def _proved(
    proofs: tuple[bytes, ...], secrets: tuple[bytes, ...], role: bytes, said: tuple[object, ...]
) -> bytes | None:
    """The first of our secrets that one of these proofs shows; None: none of them."""
    for secret in secrets:
        expected = _digest(secret, role, said)
        if any(hmac.compare_digest(proof, expected) for proof in proofs[:SECRETS_MAX]):
            return secret
    return None


def _rely_on(
    secret: bytes,
    stream: Stream,
    us: Identity,
    said: tuple[object, ...],
    keys: tuple[bytes, bytes],
) -> None:
    """The connection lasts as long as its secret is accepted, and has keys unless TLS protects it.

    keys: the roles of ours and of theirs.
    """
    stream.trusted = lambda: secret in us.secrets.current()
    if not stream.binding:
        ours, theirs = (_digest(secret, role, said) for role in keys)
        stream.use_keys(ours, theirs)


def _said(hello: PeerHello, challenge: PeerChallenge, binding: bytes) -> tuple[object, ...]:
    """What both sides have sent before the proofs."""
    said = (
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
    return (*said, binding) if binding else said


def _digest(secret: bytes, role: bytes, said: tuple[object, ...]) -> bytes:
    return hmac.digest(secret, msgspec.msgpack.encode((role, *said)), hashlib.sha256)
