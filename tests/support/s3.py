"""A proxy before an S3 server, which does to requests and answers what networks and stores do.

with Proxy(server.get_host_and_port()) as proxy:     # a `ThreadedMotoServer` of the moto package
    proxy.make_bucket("bucket")
    proxy.rule = every("GET", Answer(status=503))
"""

from __future__ import annotations

import http.client
import http.server
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please</Message></Error>"


@dataclass
class Answer:
    """What the proxy does instead of passing a request on unchanged.

    status: answers with it, and the server never hears of the request. cut: the answer's body ends after
    so many bytes, though more were announced. hold: the answer waits for this event. flip: a bit of the
    body is turned over. deaf: the connection is closed; after_server: but the server did hear.
    """

    status: int = 0
    cut: int | None = None
    hold: threading.Event | None = None
    flip: int | None = None
    deaf: bool = False
    after_server: bool = False


NOTHING = Answer()
Rule = Callable[[str, str], Answer]


@dataclass
class Proxy:
    """An HTTP proxy before one server. rule: what to do with a request, by its verb and path."""

    target: tuple[str, int]
    rule: Rule = lambda *_: NOTHING
    bucket: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)  # verb, path, range
    answered: list[None] = field(default_factory=list)  # one for each of them that has ended

    def __enter__(self) -> Self:
        self._listen(free_port())  # which is still there when it comes up again
        return self

    def _listen(self, port: int) -> None:
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def handle_any(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_DELETE = do_POST = do_HEAD = handle_any  # noqa: N815

            def log_message(self, *args: object) -> None:
                """The test says what matters."""

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self.server.shutdown()
        self.thread.join(PATIENCE_S)
        self.server.server_close()

    def go_down(self) -> None:
        """Refuse connections, and answer nothing on those that there are, until `come_up`."""
        self.rule = lambda *_: Answer(deaf=True)
        self._close()

    def come_up(self) -> None:
        """The same address serves again, and passes everything on."""
        self.rule = lambda *_: NOTHING
        self._listen(self.server.server_port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def make_bucket(self, name: str) -> None:
        """Make it, at the server, and have it as `bucket`."""
        self.bucket = name
        server = http.client.HTTPConnection(*self.target, timeout=PATIENCE_S)
        server.request("PUT", f"/{name}")
        if server.getresponse().status != 200:
            raise RuntimeError(f"the S3 server makes no bucket {name}")
        server.close()

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs to use it."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "AKIDEXAMPLE",
            "AWS_SECRET_ACCESS_KEY": "secret",  # of nobody
        }

    def verbs(self) -> list[str]:
        """What was asked for, in order."""
        return [verb for verb, _, _ in self.asked]

    def handle(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """One request, in a thread of its own."""
        body = request.rfile.read(int(request.headers.get("content-length", 0)))
        verb, path = request.command, request.path
        self.asked.append((verb, path, request.headers.get("range", "")))
        try:
            self._answer(request, verb, path, body)
        finally:
            self.answered.append(None)

    def _answer(
        self, request: http.server.BaseHTTPRequestHandler, verb: str, path: str, body: bytes
    ) -> None:
        answer = self.rule(verb, path)
        if answer.deaf and not answer.after_server:
            request.close_connection = True
            return
        if answer.status:
            status, headers, found = answer.status, [], SLOW_DOWN
        else:
            server = http.client.HTTPConnection(*self.target, timeout=PATIENCE_S)
            server.request(verb, path, body, dict(request.headers))
            response = server.getresponse()
            found = response.read()
            status, headers = response.status, response.getheaders()
            server.close()
        if answer.deaf:
            request.close_connection = True
            return
        if answer.hold is not None:
            answer.hold.wait(PATIENCE_S)
        if answer.flip is not None:
            found = bytes(byte ^ (at == answer.flip) for at, byte in enumerate(found))
        try:
            request.send_response_only(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                    request.send_header(name, value)
            request.send_header("content-length", str(len(found)))
            request.end_headers()
            if verb != "HEAD":
                request.wfile.write(found[: answer.cut])
        except OSError:
            request.close_connection = True  # whoever asked had given up
        if answer.cut is not None:
            request.close_connection = True


def nth(verb: str, numbers: set[int], answer: Answer) -> Rule:
    """The answer for those requests of a verb, counted from 1."""
    lock = threading.Lock()
    seen = 0

    def rule(asked: str, _path: str) -> Answer:
        nonlocal seen
        with lock:
            seen += asked == verb
            return answer if asked == verb and seen in numbers else NOTHING

    return rule


def every(verb: str, answer: Answer) -> Rule:
    """The answer for all requests of a verb."""
    return lambda asked, _: answer if asked == verb else NOTHING
