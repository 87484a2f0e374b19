"""URLs of Redis: what they mean, and that passwords stay where they are."""

import pytest

from kvpool.errors import ConfigError
from kvpool.placement.redis.settings import RedisKind, RedisSettings, parse_url

SERVER, SENTINEL, CLUSTER = RedisKind.SERVER, RedisKind.SENTINEL, RedisKind.CLUSTER


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("redis://cache", RedisSettings(SERVER, (("cache", 6379),))),
        ("redis://10.0.0.1:7000/3", RedisSettings(SERVER, (("10.0.0.1", 7000),), db=3)),
        ("rediss://[fd00::1]:7", RedisSettings(SERVER, (("fd00::1", 7),), tls=True)),
        ("redis://:p%40%2Fss@h", RedisSettings(SERVER, (("h", 6379),), password="p@/ss")),
        ("redis://u:p@h", RedisSettings(SERVER, (("h", 6379),), username="u", password="p")),
        (
            "redis+sentinel://a,b:1,[::1]/main/2",
            RedisSettings(SENTINEL, (("a", 26379), ("b", 1), ("::1", 26379)), service="main", db=2),
        ),
        (
            "rediss+sentinel://:pw@a/main",
            RedisSettings(SENTINEL, (("a", 26379),), service="main", password="pw", tls=True),
        ),
        ("redis+cluster://a:1,b:2", RedisSettings(CLUSTER, (("a", 1), ("b", 2)))),
        ("rediss+cluster://a/", RedisSettings(CLUSTER, (("a", 6379),), tls=True)),
    ],
    ids=str,
)
def test_what_urls_mean(url: str, settings: RedisSettings) -> None:
    assert parse_url(url) == settings


@pytest.mark.parametrize(
    "url",
    [
        "",
        "cache:6379",
        "http://cache",
        "redis+cluster",
        "redis://",
        "redis://:secret@",
        "redis://a,b",
        "redis://a:port",
        "redis://a:70000",
        "redis://a/x",
        "redis://a/1/2",
        "redis://a/-1",
        "redis://a?db=1",
        "redis://a#1",
        "redis://[::1",
        "redis://user@a",
        "redis+sentinel://a",
        "redis+sentinel://a/",
        "redis+sentinel://a/main/zero",
        "redis+cluster://a/1",
        "redis+cluster://a,,b",
        "redis+cluster://a,b@c,d@e",
        "redis+cluster://" + ",".join(["a"] * 65),
    ],
    ids=str,
)
def test_urls_that_mean_nothing(url: str) -> None:
    with pytest.raises(ConfigError):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "more"),
    [
        ("redis://:secret@h", {"password": "secret"}),
        ("redis://h", {"tls_ca": "ca.pem"}),
        ("rediss://h", {"tls_key": "key.pem"}),
    ],
    ids=str,
)
def test_what_does_not_go_together(url: str, more: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url, **more)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter2@h/99x",
        "redis://u:hunter2@h:port",
        "foo://u:hunter2@h",
        "redis://u:hunter2@[h",
    ],
)
def test_errors_show_no_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)


def test_a_password_is_in_no_text() -> None:
    settings = parse_url("rediss+sentinel://user:hunter2@a:1,b/main/3", sentinel_password="xyzzy")
    assert settings.url == "rediss+sentinel://a:1,b:26379/main/3"
    assert parse_url(settings.url).hosts == settings.hosts
    for text in (repr(settings), str(settings), settings.url):
        assert "hunter2" not in text and "xyzzy" not in text


def test_tls_files_that_are_none(tmp_path: object) -> None:
    with pytest.raises(ConfigError, match=r"missing\.pem"):
        parse_url("rediss://h", tls_ca=f"{tmp_path}/missing.pem").tls_context()
    assert parse_url("redis://h").tls_context() is None
