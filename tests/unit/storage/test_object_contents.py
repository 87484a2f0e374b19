"""Opening a remote store: what is refused, and that no secret is ever repeated."""

from __future__ import annotations

import os
import traceback
from pathlib import Path

import pytest

from kvpool.errors import ConfigError
from kvpool.storage.object.client import ObstoreClient
from kvpool.storage.object.requests import ObjectLimits
from kvpool.storage.object.store import ObjectStore

LIMITS = ObjectLimits(bytes_max=1 << 20)
NODE = b"the node"
SECRET = "kJh7secret7word"
KEYS = {"access_key_id": "AKIDEXAMPLE", "secret_access_key": SECRET}


@pytest.fixture(autouse=True)
def no_clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")):
            monkeypatch.delenv(name)


def opened(url: str, **settings: object) -> None:
    ObjectStore.open(url, node=NODE, limits=LIMITS, **settings).close()


@pytest.mark.parametrize("url", ["", "bucket", "http://x/y", "memory:///", "ftp://h/x", "/folder"])
def test_other_stores_are_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match="s3, gs, az, file"):
        opened(url)


@pytest.mark.parametrize("url", ["file://", "file:///", "file://host/folder"])
def test_a_folder_is_an_absolute_path(url: str) -> None:
    with pytest.raises(ConfigError, match="file:///absolute/path"):
        opened(url)


def test_a_folder_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without options"):
        opened(f"file://{tmp_path}", options={"region": "x"})


def test_a_folder_is_made_and_must_be_one(tmp_path: Path) -> None:
    opened(f"file://{tmp_path}/a/b")
    assert (tmp_path / "a/b").is_dir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="folder"):
        opened(f"file://{tmp_path}/file/below")


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_without_credentials_no_metadata_service_is_asked(scheme: str) -> None:
    with pytest.raises(ConfigError, match=r"no credentials.*instance_credentials"):
        opened(f"{scheme}://bucket/prefix")


@pytest.mark.parametrize("value", [False, "", "false", "0"])
def test_signing_that_is_not_skipped_needs_credentials(value: object) -> None:
    with pytest.raises(ConfigError, match="no credentials"):
        opened("s3://bucket", options={"skip_signature": value})


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("s3://b/p", {"options": KEYS}),
        ("s3://b/p", {"options": {"aws_" + name: value for name, value in KEYS.items()}}),
        ("s3://b", {"options": {"skip_signature": True}}),
        ("s3://b", {"instance_credentials": True}),
        ("gs://b/p", {"options": {"skip_signature": True}}),
        ("gs://b/p", {"instance_credentials": True}),
        ("az://b/p", {"options": {"account_name": "a", "account_key": "a2V5"}}),
        ("az://b/p", {"options": {"account_name": "a"}, "instance_credentials": True}),
    ],
)
def test_credentials_or_the_will_to_ask_are_enough(url: str, settings: dict[str, object]) -> None:
    opened(url, **settings)


def test_credentials_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    opened("s3://bucket/prefix")


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        (f"s3://user:{SECRET}@bucket/prefix", {}),
        ("s3://bucket", {"options": {**KEYS, "nonsense": SECRET}}),
        ("s3://bucket", {"options": {"secret_access_key": SECRET, "access_key_id": 5}}),
        ("s3://bucket", {"options": {"access_key_id": SECRET}}),
        ("s3://bucket", {"options": KEYS, "client_options": {"nonsense": SECRET}}),
        ("s3://bucket", {"options": KEYS, "client_options": {"proxy_url": f"u:{SECRET}"}}),
        ("gs://bucket", {"options": {"service_account_key": SECRET}}),
        ("az://bucket", {"options": {"account_name": "a", "account_key": f"!{SECRET}"}}),
    ],
)
def test_errors_name_settings_and_never_their_values(url: str, settings: dict) -> None:
    with pytest.raises(ConfigError) as caught:
        opened(url, **settings)
    told = "".join(traceback.format_exception(caught.value))
    assert SECRET not in told
    assert all(name in str(caught.value) for name in settings.get("options", ()))


def test_a_store_does_not_show_its_settings() -> None:
    objects = ObstoreClient.from_url(
        "s3://b/p",
        options=KEYS,
        client_options={},
        instance_credentials=False,
        attempt_s=1.0,
        connect_s=1.0,
    )
    assert SECRET not in repr(objects)
