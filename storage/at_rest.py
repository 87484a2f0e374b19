"""Encryption of blocks at rest, on disks and in object storage: AES-256-GCM (NIST SP 800-38D).

A block is bound to its name: its namespace, part, key, checksum and length are authenticated with its bytes. So one
who can write a disk or a bucket can have a block be missing, and never have other bytes taken for it.

The secrets come from the caller, the newest first: that one encrypts, all of them decrypt. Keys are derived from
them, for a disk from its store's id and for an object from its path (HKDF, RFC 5869), so no two stores and no two
objects have a key in common.

A sealed block of a disk:

    offset  0        12        20      24     32           32+n
            | nonce  | key id  | n     | 0    | ciphertext | tag |

Nonces of a disk: 7 random bytes of each opening of the store, then a number that counts. A block of an object has
its offset, which is never written twice under one path.
"""

from __future__ import annotations

import itertools
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvpool.errors import ConfigError
from kvpool.extras import install

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Bytes1D = npt.NDArray[np.uint8]

TAG_BYTES = 16
SEAL_BYTES = 48
"""What sealing adds to a block of a disk: header and tag."""
KEY_BYTES = 32

_HEADER = struct.Struct("<12s8sI8x")
_OPENING_BYTES, _COUNT_BYTES = 7, 5
_OBJECT_NONCE = struct.Struct("<Q4x")
_TABLE_NONCE = b"\xff" * 12
_CIPHERS_MAX = 256  # of objects, kept


class _DiskKey(NamedTuple):
    id: bytes
    cipher: AESGCM


class EncryptionSecrets:
    """The secrets in use, the newest first; none: nothing is encrypted. Thread-safe."""

    def __init__(self, secrets: Iterable[bytes] = ()) -> None:
        self.current = tuple(secrets)

    def change(self, secrets: Iterable[bytes]) -> None:
        """Replace them. They cannot be taken away: what is encrypted stays so. Raises `ValueError`."""
        changed = tuple(secrets)
        if bool(changed) != bool(self.current):
            raise ValueError("encryption at rest is switched on and off by a restart only")
        self.current = changed


class BlockSealer:
    """Seals and opens the blocks of one disk. Any number of threads may call at once.

    secrets: at least one. store_id: of the disk's store.
    """

    def __init__(self, secrets: EncryptionSecrets, store_id: bytes) -> None:
        """Raises `ConfigError` if the package cryptography is missing, or too old."""
        check_package()
        self._secrets = secrets
        self._store_id = store_id
        self._opening = os.urandom(_OPENING_BYTES)
        self._count = itertools.count()
        self._keys: dict[bytes, _DiskKey] = {}  # by secret; a few, and those that were replaced
        self._lock = threading.Lock()

    def key_number(self) -> int:
        """A number for the present key, 1 to 65,535, the same after a restart. Others may have it too, seldom."""
        return _number(self._key(self._secrets.current[0]).id)

    def known_numbers(self) -> list[int]:
        """Those of all keys in use."""
        return [_number(self._key(secret).id) for secret in self._secrets.current]

    def seal(self, plain: Bytes1D, name: bytes, out: Bytes1D) -> int:
        """Write a sealed block to the beginning of `out`; returns its length, `SEAL_BYTES` more than `plain` has.

        plain: contiguous, at most 1 GiB. name: what it is, authenticated with it.
        """
        key = self._key(self._secrets.current[0])
        nonce = self._opening + next(self._count).to_bytes(_COUNT_BYTES, "little")
        header = _HEADER.pack(nonce, key.id, plain.size)
        end = plain.size + SEAL_BYTES
        out[: _HEADER.size] = np.frombuffer(header, np.uint8)
        key.cipher.encrypt_into(nonce, plain.data, header + name, out[_HEADER.size : end].data)
        return end

    def length(self, sealed: Bytes1D) -> int:
        """How many bytes `open` would give, by the header; 0: it is not a sealed block."""
        if sealed.size < SEAL_BYTES:
            return 0
        _, _, length = _HEADER.unpack(sealed[: _HEADER.size].data)
        return int(length) if length <= sealed.size - SEAL_BYTES else 0

    def has_key(self, sealed: Bytes1D) -> bool:
        """Whether a secret in use decrypts it, by its header; True for what is no sealed block."""
        if not self.length(sealed):
            return True
        _, key_id, _ = _HEADER.unpack(sealed[: _HEADER.size].data)
        return any(self._key(secret).id == key_id for secret in self._secrets.current)

    def open(self, sealed: Bytes1D, name: bytes, out: Bytes1D) -> bool:
        """Fill `out`, of `length` bytes, contiguous and writable. False: it is not this block, or was changed.

        On False `out` holds anything.
        """
        length = self.length(sealed)
        if not length or out.size != length:
            return False
        header = sealed[: _HEADER.size].tobytes()
        nonce, key_id, _ = _HEADER.unpack(header)
        for secret in self._secrets.current:
            key = self._key(secret)
            if key.id == key_id:
                data = sealed[_HEADER.size : length + SEAL_BYTES]
                return _decrypts(key.cipher, nonce, data, header + name, out)
        return False

    def _key(self, secret: bytes) -> _DiskKey:
        key = self._keys.get(secret)
        if key is None:
            made = _derive(secret, self._store_id, b"kvpool disk 1", KEY_BYTES + 8)
            key = _DiskKey(made[KEY_BYTES:], _cipher_of(made[:KEY_BYTES]))
            with self._lock:
                self._keys = {
                    each: known
                    for each, known in self._keys.items()
                    if each in self._secrets.current
                } | {secret: key}
        return key


class ObjectSealer:
    """Seals and opens the blocks of objects, and their tables. Any number of threads may call at once.

    Each object has a key of its own, by its path; a block is `TAG_BYTES` longer than before.
    """

    def __init__(self, secrets: EncryptionSecrets) -> None:
        """Raises `ConfigError` if the package cryptography is missing, or too old."""
        check_package()
        self._secrets = secrets
        self._ciphers: OrderedDict[tuple[bytes, str], AESGCM] = OrderedDict()  # the last used ones
        self._lock = threading.Lock()

    def seal(self, path: str, offset: int, plain: Bytes1D, name: bytes, out: Bytes1D) -> None:
        """Fill `out`, `TAG_BYTES` longer than `plain`. offset: where it begins in the object."""
        cipher = self._cipher(self._secrets.current[0], path)
        cipher.encrypt_into(_OBJECT_NONCE.pack(offset), plain.data, name, out.data)

    def open(self, path: str, offset: int, sealed: Bytes1D, name: bytes, out: Bytes1D) -> bool:
        """The inverse. False: it is not this block, or was changed; then `out` holds anything."""
        if sealed.size != out.size + TAG_BYTES:
            return False
        nonce = _OBJECT_NONCE.pack(offset)
        return any(
            _decrypts(self._cipher(secret, path), nonce, sealed, name, out)
            for secret in self._secrets.current
        )

    def seal_table(self, path: str, table: bytes, name: bytes) -> bytes:
        """The same for the object's table."""
        return self._cipher(self._secrets.current[0], path).encrypt(_TABLE_NONCE, table, name)

    def open_table(self, path: str, sealed: bytes, name: bytes) -> bytes | None:
        """The inverse; None: it is not this object's table, or was changed."""
        out = np.empty(max(0, len(sealed) - TAG_BYTES), np.uint8)
        data = np.frombuffer(sealed, np.uint8)
        if any(
            _decrypts(self._cipher(secret, path), _TABLE_NONCE, data, name, out)
            for secret in self._secrets.current
        ):
            return out.tobytes()
        return None

    def _cipher(self, secret: bytes, path: str) -> AESGCM:
        at = secret, path
        with self._lock:
            cipher = self._ciphers.get(at)
            if cipher is not None:
                self._ciphers.move_to_end(at)
                return cipher
        cipher = _cipher_of(_derive(secret, path.encode(), b"kvpool object 1", KEY_BYTES))
        with self._lock:
            self._ciphers[at] = cipher
            while len(self._ciphers) > _CIPHERS_MAX:
                self._ciphers.popitem(last=False)
        return cipher


def block_name(place: bytes, key: bytes, checksum: bytes, nbytes: int) -> bytes:
    """What is authenticated with a block. place: its namespace and part. key, checksum: 16 bytes each."""
    return struct.pack("<I", nbytes) + key + checksum + place


def place_name(digest: bytes, part: int) -> bytes:
    """The place of a block's name: a namespace's digest, and the part."""
    return digest + part.to_bytes(2, "little")


def check_package() -> None:
    """Raises `ConfigError` if the package cryptography is missing, or too old."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(
            f"encryption at rest needs a package that cannot be imported ({error}): {install('cluster')}"
        ) from None
    if not hasattr(AESGCM, "decrypt_into"):
        raise ConfigError(
            f"encryption at rest needs a newer package cryptography: {install('cluster')}"
        )


def _cipher_of(key: bytes) -> AESGCM:
    # Imported only when needed: most daemons do without.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _derive(secret: bytes, salt: bytes, use: bytes, nbytes: int) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), nbytes, salt, use).derive(secret)


def _number(key_id: bytes) -> int:
    return int.from_bytes(key_id[:2], "little") or 1


def _decrypts(cipher: AESGCM, nonce: bytes, data: Bytes1D, name: bytes, out: Bytes1D) -> bool:
    from cryptography.exceptions import InvalidTag

    try:
        cipher.decrypt_into(nonce, data.data, name, out.data)
    except InvalidTag:
        return False
    return True
