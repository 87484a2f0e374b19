"""Tags by which the two ends of a connection without TLS know that bytes come from each other, in order and whole.

Nothing is encrypted. A tag is GMAC (NIST SP 800-38D): AES-256-GCM over no plaintext, with the bytes as the
additional data. Each direction has a key of its own, made anew for each connection (`handshake`), so a number that
counts the tags is a nonce that is never used twice with a key.

GMAC because it is as fast as the checksum of the blocks: 26 GB/s on one core with AES instructions, where BLAKE3 and
Poly1305 have 6 and 10.
"""

from __future__ import annotations

import hmac
import struct

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvpool.errors import NotAuthenticated

TAG_BYTES = 16
_NONCE = struct.Struct("<4xQ")
_CALL_BYTES_MAX = 1 << 30  # the library takes less than 2 GiB at a time


class Sealer:
    """Makes the tags of one direction of a connection. One thread at a time."""

    def __init__(self, key: bytes) -> None:
        self._gcm = AESGCM(key)
        self._aes = algorithms.AES(key)
        self._count = 0

    def tag(self, buffers: list[memoryview]) -> bytes:
        """The next tag, over these bytes as one."""
        nonce = _NONCE.pack(self._count)
        self._count += 1
        if len(buffers) == 1 and len(buffers[0]) <= _CALL_BYTES_MAX:
            return self._gcm.encrypt(nonce, b"", buffers[0])
        cipher = Cipher(self._aes, modes.GCM(nonce)).encryptor()
        for buffer in buffers:
            for at in range(0, len(buffer), _CALL_BYTES_MAX):
                cipher.authenticate_additional_data(buffer[at : at + _CALL_BYTES_MAX])
        cipher.finalize()
        return cipher.tag

    def check(self, buffers: list[memoryview], tag: bytes | bytearray) -> None:
        """Raises `NotAuthenticated` unless this is the next tag of these bytes."""
        if not hmac.compare_digest(self.tag(buffers), tag):
            raise NotAuthenticated(
                "the peer's bytes do not match their tag: something between the two daemons changes, drops or adds "
                "bytes; use TLS if you do not trust the network"
            )
