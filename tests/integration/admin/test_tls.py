"""A gateway over TLS, with the certificates that daemons use."""

import contextlib
import http.client
import shutil
import ssl
from json import loads

import pytest

from kvpool.admin.tokens import add_token
from tests.integration.admin.test_routers import TOKEN
from tests.support.pki import Pki
from tests.support.programs import program
from tests.support.servers.etcd import free_port
from tests.support.waiting import PATIENCE_S

SETTINGS = {"KVPOOL_CLUSTER": "test", "KVPOOL_NODE": "n"}


def ask(port, ca, token="", path="/v1/me"):
    """The status, and the serial number of the certificate that was shown."""
    context = ssl.create_default_context(cafile=str(ca))
    connection = http.client.HTTPSConnection("localhost", port, timeout=PATIENCE_S, context=context)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        answer.read()
        return answer.status, connection.sock.getpeercert()[
            "serialNumber"
        ] if connection.sock else ""
    finally:
        connection.close()


def test_tokens_go_over_tls_and_new_certificates_are_taken(start, tmp_path, until):
    pki = Pki(tmp_path / "pki")
    files = pki.files("n")
    tokens, port = tmp_path / "tokens.toml", free_port()
    token = add_token(tokens, "ci", "viewer", [])
    start(
        *("--http", f"0.0.0.0:{port}", "--http-tokens", str(tokens)),
        *("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca),
        **SETTINGS,
    )

    def answers():
        try:
            return ask(port, pki.ca, token)
        except ConnectionRefusedError:
            return None

    status, serial = until(answers)
    assert status == 200
    assert ask(port, pki.ca)[0] == 401
    plain = http.client.HTTPConnection("localhost", port, timeout=PATIENCE_S)
    plain.request("GET", "/healthz")
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        plain.getresponse()
    plain.close()
    with pytest.raises(ssl.SSLCertVerificationError):
        ask(port, Pki(tmp_path / "other").ca)
    newer = Pki(tmp_path / "pki2").files(
        "n"
    )  # another authority: files that do not fit are not taken
    shutil.copy(newer.key, files.key)
    assert ask(port, pki.ca, token) == (200, serial)
    fresh = pki.files("n")
    assert fresh.cert == files.cert
    until(lambda: ask(port, pki.ca, token)[1] not in {"", serial})


@pytest.mark.parametrize("own_authority", [False, True])
def test_routers_are_asked_over_tls_and_verified(start, tmp_path, until, own_authority):
    """The authority of `tls_ca`, or of `router_ca`, is trusted beside the public ones; a router of another one gets no
    token.
    """
    pki, others = Pki(tmp_path / "pki"), Pki(tmp_path / "others")
    files = pki.files("n")
    tokens, port = tmp_path / "tokens.toml", free_port()
    token = add_token(tokens, "ci", "admin", [])
    with contextlib.ExitStack() as stack:
        line = stack.enter_context(program("tests.support.stub_engine", "--port", "0"))
        engine = loads(line)["url"]
        routers = []
        for authority in (pki, others):
            own, at = authority.files("router"), f"localhost:{free_port()}"
            command = ("kvpool.cli", "router", "--engine", engine, "--no-daemon", "--listen", at)
            tls = ("--tls-cert", own.cert, "--tls-key", own.key)
            stack.enter_context(program(*command, *tls, KVPOOL_ROUTER_TOKEN=TOKEN))
            routers.append(f"https://{at}")
        start(
            *("--http", f"127.0.0.1:{port}", "--http-tokens", str(tokens)),
            *("--tls-cert", files.cert, "--tls-key", files.key, "--tls-ca", files.ca),
            *(("--router-ca", str(others.ca)) if own_authority else ()),
            KVPOOL_ROUTERS=",".join(routers),
            KVPOOL_ROUTER_TOKEN=TOKEN,
            **SETTINGS,
        )

        def engines():
            context = ssl.create_default_context(cafile=str(pki.ca))
            connection = http.client.HTTPSConnection(
                "localhost", port, timeout=PATIENCE_S, context=context
            )
            with contextlib.closing(connection):
                try:
                    connection.request(
                        "GET", "/v1/engines", headers={"Authorization": f"Bearer {token}"}
                    )
                except ConnectionRefusedError:
                    return None  # the gateway is still starting
                return loads(connection.getresponse().read())

        found = until(lambda: (told := engines()) and told["items"] and told)
        trusted, other = reversed(routers) if own_authority else routers
        assert [list(each["routers"]) for each in found["items"]] == [[trusted]]
        assert list(found["unreachable"]) == [other]
        assert "certificate" in found["unreachable"][other].lower()
