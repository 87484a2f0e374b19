"""etcd URLs and what goes with them."""

from pathlib import Path
from typing import Any

import pytest

from kvpool.errors import ConfigError
from kvpool.placement.etcd.settings import EtcdSettings


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("etcd://h:1", (("h:1",), False, "")),
        ("etcd://h", (("h:2379",), False, "")),
        ("etcds://h:1/", (("h:1",), True, "")),
        ("etcd://a:1,b,10.0.0.1:3", (("a:1", "b:2379", "10.0.0.1:3"), False, "")),
        ("etcd://u@[::1]:5,[fe80::1]", (("[::1]:5", "[fe80::1]:2379"), False, "u")),
        ("etcds://u%40x@h:1", (("h:1",), True, "u@x")),
    ],
)
def test_urls(url: str, expected: Any) -> None:
    made = EtcdSettings.from_url(url, password="p" if "@" in url else "")
    assert (made.endpoints, made.tls, made.user) == expected


@pytest.mark.parametrize(
    "url",
    [
        "",
        "etcd:h:1",
        "http://h:1",
        "etcd://",
        "etcd://h:1,",
        "etcd://h:",
        "etcd://h:0",
        "etcd://h:99999",
        "etcd://h:x",
        "etcd://h:1/path",
        "etcd://h?x=1",
        "etcd://::1",
        "etcd://" + ",".join(f"h{n}" for n in range(17)),
    ],
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="etcd"):
        EtcdSettings.from_url(url)


def test_passwords_stay_out_of_sight() -> None:
    with pytest.raises(ConfigError, match="must not contain a password") as caught:
        EtcdSettings.from_url("etcd://user:hush@h:1", password="hush")
    assert "hush" not in str(caught.value)
    assert "hush" not in repr(EtcdSettings.from_url("etcd://user@h:1", password="hush"))


@pytest.mark.parametrize(
    ("url", "given", "match"),
    [
        ("etcd://h", {"password": "p"}, "both a user in its URL .* or neither"),
        ("etcd://u@h", {}, "both a user in its URL .* or neither"),
        ("etcd://h", {"ca": Path("ca.pem")}, "etcds://"),
        ("etcds://h", {"cert": Path("c.pem")}, "both files"),
        ("etcds://h", {"key": Path("k.pem")}, "both files"),
    ],
)
def test_halves_are_refused(url: str, given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        EtcdSettings.from_url(url, **given)
