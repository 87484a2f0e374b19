import pytest

from kvpool.net import is_loopback, names_loopback


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("localhost", True),
        ("127.0.0.1", True),
        ("127.255.0.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("::ffff:10.0.0.1", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
        ("", False),
    ],
)
def test_what_is_this_machine(host, own):
    assert is_loopback(host) is own
    if host:
        named = f"[{host}]" if ":" in host else host
        assert names_loopback(named) is own
        assert names_loopback(f"{named}:7071") is own


def test_who_names_no_host_is_no_browser():
    assert names_loopback("")
