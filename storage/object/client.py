"""Object storage behind a small port, and the one place where obstore's errors are mapped.

A store's own error texts are never passed on: error bodies of S3 repeat key ids and signed strings.
A `StoreFault` names the kind of failure, which is all that callers use.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol
from urllib.parse import urlsplit

import numpy as np

from kvpool.errors import ConfigError, Unavailable
from kvpool.storage.object.packs import Bytes1D

LIST_CHUNK = 1000


class Fault(Enum):
    """Why a request failed. retryable: the same request may succeed soon."""

    MISSING = ("there is no such object", False)
    RANGE = ("the object ends before the range", False)
    DENIED = ("the credentials are refused", False)
    REFUSED = ("the request is refused", False)
    BUSY = ("the store fails or asks for patience", True)
    UNREACHABLE = ("the store cannot be reached", True)
    LATE = ("the store did not answer in time", True)
    SUSPENDED = ("the store is left alone after many failures", False)

    def __init__(self, text: str, retryable: bool) -> None:
        self.text = text
        self.retryable = retryable

    @property
    def answered(self) -> bool:
        """The store works, whatever it answered."""
        return self in (Fault.MISSING, Fault.RANGE, Fault.REFUSED)


class StoreFault(Unavailable):
    """A request to the store failed. status: of HTTP, 0 if there was none."""

    def __init__(self, fault: Fault, status: int = 0) -> None:
        super().__init__(f"{fault.text} (HTTP status {status})" if status else fault.text)
        self.fault = fault
        self.status = status


@dataclass(frozen=True, slots=True)
class Listed:
    """One object of a listing. modified: seconds since 1970."""

    path: str
    size: int
    modified: float


class ObjectClient(Protocol):
    """An object store. Coroutines end with `StoreFault`; cancelling one closes its connection.

    Every method belongs to one running event loop.
    """

    async def put(self, path: str, body: Bytes1D) -> None:
        """Whole and durable when it returns, or not there. `body` must not change meanwhile."""

    async def get(self, path: str, start: int, end: int) -> Bytes1D:
        """The bytes of a range, read-only; fewer where the object ends inside it."""

    async def delete(self, path: str) -> None:
        """Deleted when it returns; it may have been absent before."""

    def pages(self, prefix: str) -> AsyncIterator[list[Listed]]:
        """The objects below a folder, in no order, some at a time."""


# Names of options and variables that hold credentials. Without any of them obstore asks
# the metadata service of a cloud that this machine may not even be in.
_CREDENTIALS = {
    "s3": (
        "AWS_",
        (
            "access_key_id",
            "web_identity_token_file",
            "container_credentials",
            "skip_signature",
        ),
    ),
    "gs": ("GOOGLE_", ("service_account", "application_credentials", "bearer", "skip_signature")),
    "az": (
        "AZURE_",
        (
            "access_key",
            "account_key",
            "client_secret",
            "federated_token_file",
            "sas_",
            "skip_signature",
            "token",
            "use_azure_cli",
            "use_emulator",
        ),
    ),
}
SCHEMES = (*_CREDENTIALS, "file")
_OFF = (None, False, "", "0", "false", "False")


class ObstoreClient:
    """See `ObjectClient`: a store of the `obstore` package."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @classmethod
    def from_url(
        cls,
        url: str,
        *,
        options: Mapping[str, Any],
        client_options: Mapping[str, Any],
        instance_credentials: bool,
        attempt_s: float,
        connect_s: float,
        environ: Mapping[str, str] = os.environ,
    ) -> ObstoreClient:
        """See `ObjectStore.open`. Sends nothing."""
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES:
            raise ConfigError(
                f"the object tier's URL begins with one of {', '.join(SCHEMES)}, not {parts.scheme!r}"
            )
        if "@" in parts.netloc:
            raise ConfigError(
                "the object tier's URL must not contain credentials: set them in the environment"
            )
        try:
            from obstore import store as stores
            from obstore.exceptions import BaseError
        except ImportError:
            raise ConfigError("the object tier needs obstore: install kvpool[object]") from None
        if parts.scheme == "file":
            if parts.netloc or len(parts.path) < 2 or options or client_options:
                raise ConfigError(
                    "an object tier in files must be file:///absolute/path, without options"
                )
            try:
                return cls(stores.LocalStore(parts.path, mkdir=True))
            except (BaseError, OSError):
                raise ConfigError(f"{parts.path} cannot be created or used as a folder") from None
        family, _ = _CREDENTIALS[parts.scheme]
        if not instance_credentials:
            _check_credentials(parts.scheme, options, environ)
        make: Any = stores.from_url  # its types are one per cloud
        try:
            store = make(
                url,
                client_options={
                    # With options given, obstore no longer reads this one of its variables.
                    "allow_http": environ.get(f"{family}ALLOW_HTTP", "").lower() in ("1", "true"),
                    "timeout": timedelta(seconds=attempt_s),
                    "connect_timeout": timedelta(seconds=connect_s),
                    **client_options,
                },
                retry_config={"max_retries": 0},
                **options,
            )
        except (BaseError, TypeError, ValueError):
            # Not obstore's words: they may repeat options.
            named = ", ".join(sorted([*options, *client_options])) or "none"
            raise ConfigError(
                f"the settings of the object tier at {parts.scheme}://{parts.netloc} are invalid: the options are "
                f"{named}; settings in the environment also apply"
            ) from None
        return cls(store)

    async def put(self, path: str, body: Bytes1D) -> None:
        import obstore

        try:
            # In one request: the remains of a cancelled multipart upload cost money and are not listed.
            await obstore.put_async(self._store, path, body, use_multipart=False)
        except _foreign_errors() as error:
            raise fault_of(error) from None

    async def get(self, path: str, start: int, end: int) -> Bytes1D:
        import obstore

        try:
            found = await obstore.get_range_async(self._store, path, start=start, end=end)
        except _foreign_errors() as error:
            raise fault_of(error, path) from None
        return np.frombuffer(memoryview(found), np.uint8)

    async def delete(self, path: str) -> None:
        import obstore

        try:
            await obstore.delete_async(self._store, path)
        except FileNotFoundError:
            pass  # somebody else did it
        except _foreign_errors() as error:
            raise fault_of(error) from None

    async def pages(self, prefix: str) -> AsyncIterator[list[Listed]]:
        import obstore

        try:
            async for page in obstore.list(self._store, prefix=prefix, chunk_size=LIST_CHUNK):
                yield [
                    Listed(meta["path"], meta["size"], meta["last_modified"].timestamp())
                    for meta in page
                ]
        except _foreign_errors() as error:
            raise fault_of(error) from None


def _foreign_errors() -> tuple[type[Exception], ...]:
    from obstore.exceptions import BaseError

    return (BaseError, OSError)


_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = re.compile("NoSuchBucket|ContainerNotFound")
_RANGE = re.compile(r"[Ii]nvalid range|range was invalid")


def fault_of(error: Exception, path: str | None = None) -> StoreFault:
    """The meaning of one of obstore's errors. Parses its text if its class is not specific.

    path: of the object that was to be read. Only that one can be missing: for a bucket or
    the metadata service, "not found" is a wrong setting.
    """
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    text = str(error).partition("\n\nDebug source")[0]
    found = _STATUS.search(text)
    status = int(found[1]) if found else 0
    if isinstance(error, FileNotFoundError):
        missing = path is not None and path in text and not _NO_BUCKET.search(text)
        return StoreFault(Fault.MISSING if missing else Fault.REFUSED, status)
    if isinstance(error, (PermissionDeniedError, UnauthenticatedError)) or status in (401, 403):
        return StoreFault(Fault.DENIED, status)
    if status == 416 or _RANGE.search(text):
        return StoreFault(Fault.RANGE, status)
    if status in (408, 425, 429) or status >= 500:
        return StoreFault(Fault.BUSY, status)
    if status:
        return StoreFault(Fault.REFUSED, status)
    return StoreFault(Fault.UNREACHABLE)


def _check_credentials(scheme: str, options: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    family, marks = _CREDENTIALS[scheme]
    named = {name.lower(): value for name, value in options.items()}
    named |= {name.lower(): value for name, value in environ.items() if name.startswith(family)}
    if any(value not in _OFF and mark in name for name, value in named.items() for mark in marks):
        return
    raise ConfigError(
        f"no credentials for the object tier at {scheme}://…: set {family}… in the environment or options; on a "
        "machine of that cloud, use instance_credentials"
    )
