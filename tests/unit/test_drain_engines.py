"""Engines are drained at routers, and waited for. The routers are made up."""

from __future__ import annotations

import http.server
import threading
from typing import Any

import pytest

from kvpool.cli.drain_engines import EnginesDrain, check_wanted
from kvpool.errors import ClusterUnavailable, InvalidRequest, NotAuthenticated
from kvpool.router.client import NoRouter, RouterHttp, routers_at
from tests.support.servers.etcd import free_port


class Router:
    """Its engines become idle after so many looks. errors: what looks meet, in order; None: nothing."""

    def __init__(self, where: str, looks: int, *errors: Exception | None) -> None:
        self.where = where
        self.said: list[tuple[str, str]] = []
        self._left = looks
        self._errors = list(errors)
        self._drained: set[str] = set()

    def ask(self, path: str, body: bytes | None = None, *, method: str = "") -> Any:
        if method:
            self.said.append((method, path))
            name = path.split("/")[2].replace("%3A", ":")
            (self._drained.add if method == "POST" else self._drained.discard)(name)
            return {}
        if self._errors and (error := self._errors.pop(0)) is not None:
            raise error
        idle = self._left <= 0
        self._left -= bool(self._drained)
        rows = [("h:1-dp0", "n"), ("h:1-dp1", "n"), ("i:1", "m")]
        return {
            "engines": [
                {
                    "name": name,
                    "url": f"http://{name.partition('-')[0]}",
                    "node": node,
                    "state": ("drained" if idle else "draining")
                    if name in self._drained
                    else "serving",
                }
                for name, node in rows
            ]
        }


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def drain(routers: list[Router], node: str | None = "n", *engines: str) -> EnginesDrain:
    time = Time()
    return EnginesDrain(routers, node, engines, clock=time.clock, sleep=time.sleep)


def test_all_routers_are_told_and_waited_for() -> None:
    routers = [Router("a", 1), Router("b", 3)]
    drained = drain(routers)
    assert drained.begin() == ["h:1-dp0", "h:1-dp1"]
    for router in routers:
        assert router.said == [
            ("POST", "/engines/h%3A1-dp0/drain"),
            ("POST", "/engines/h%3A1-dp1/drain"),
        ]
    assert drained.wait(100.0) == ("no requests are left at the engines", True)
    assert drained.cancel() == ["h:1-dp0", "h:1-dp1"]
    assert routers[0].said[-1] == ("DELETE", "/engines/h%3A1-dp1/drain")


@pytest.mark.parametrize(
    ("engines", "names"),
    [
        (("http://h:1/",), ["h:1-dp0", "h:1-dp1"]),  # a server, with all ranks
        (("h:1-dp1",), ["h:1-dp1"]),
        (("http://h:1", "i:1"), ["h:1-dp0", "h:1-dp1", "i:1"]),
        (("nobody",), []),
    ],
)
def test_engines_are_named_by_url_or_as_the_router_does(engines: Any, names: Any) -> None:
    drained = drain([Router("a", 0)], None, *engines)
    assert drained.begin() == names
    assert drained.wait(1.0)[1]


def test_requests_that_do_not_end_are_told_of() -> None:
    drained = drain([Router("a", 0), Router("b", 10_000)])
    drained.begin()
    text, good = drained.wait(30.0)
    assert not good
    assert text == "after 30 s 2 engines still had requests: h:1-dp0, h:1-dp1"


def test_where_nobody_listens_there_is_no_router() -> None:
    nobody = NoRouter("no router answers at x")
    there = Router("a", 0)
    drained = drain([Router("x", 0, nobody), there])
    assert drained.begin()
    assert drained.wait(1.0)[1]
    with pytest.raises(ClusterUnavailable, match="no router answers at x, y"):
        drain([Router("x", 0, nobody), Router("y", 0, nobody)]).begin()
    # One that ends meanwhile sends nothing either; one that does not answer may.
    ended = drain([Router("a", 10_000, None, nobody, nobody), there])
    ended.begin()
    assert ended.wait(0.0)[1]
    slow = drain([Router("a", 0, None, ClusterUnavailable("time out"))])
    slow.begin()
    assert slow.wait(0.0) == ("after 0 s time out", False)


def test_what_is_to_be_drained_has_to_be_said() -> None:
    with pytest.raises(InvalidRequest, match="name the node"):
        check_wanted(None, [], ["http://r"])
    with pytest.raises(InvalidRequest, match="--router"):
        check_wanted(None, ["http://e"], [])
    check_wanted("n", [], [])


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body = {"/engines": (200, b'{"engines": []}'), "/text": (200, b"hello")}.get(
            self.path, (404, b'{"error": {"message": "not here"}}')
        )
        if self.headers["Authorization"] != "Bearer secret":
            status, body = 401, b'{"error": {"message": "who?"}}'
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Host", self.headers["Host"])
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_a_router_is_asked_at_each_of_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOOL_ROUTER_TOKEN", "secret")
    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://localhost:{server.server_port}"
            found = routers_at([url])
            assert f"{url} at 127.0.0.1" in [each.where for each in found]
            (here,) = [each for each in found if each.where.endswith("127.0.0.1")]
            assert here.ask("/engines") == {"engines": []}
            with pytest.raises(InvalidRequest, match=r"not here \(404\)"):
                here.ask("/nothing")
            with pytest.raises(InvalidRequest, match="sent no JSON"):
                here.ask("/text")
            monkeypatch.setenv("KVPOOL_ROUTER_TOKEN", "wrong")
            with pytest.raises(NotAuthenticated, match="who"):
                RouterHttp(url).ask("/engines")
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(NoRouter):
        RouterHttp(f"http://127.0.0.1:{free_port()}").ask("/engines")
    with pytest.raises(ClusterUnavailable):
        routers_at(["http://nowhere.invalid:1"])
