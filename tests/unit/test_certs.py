"""`kvpool certs`: what it makes, looked at by the `openssl` program and by Python's ssl."""

import json
import os
import re
import ssl
import stat
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvpool.cli.verbs import app
from kvpool.errors import ConfigError, InvalidRequest, KvpoolError
from kvpool.security import certs
from kvpool.security.certificate_names import CLIENT, NODE
from tests.support.imports import modules_after

NOW = datetime.now(UTC).replace(microsecond=0)


def openssl(*arguments: str | Path) -> str:
    done = subprocess.run(
        ["openssl", *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    certs.make_authority(tmp_path / "ca", "prod", NOW)
    return tmp_path / "ca"


def made(folder: Path, role: str = NODE, name: str = "a", **changes: object) -> certs.Issued:
    return certs.issue(certs.open_authority(folder), role, name, NOW, **changes)


def kvpool(*arguments: str | Path) -> str:
    """What it prints. Raises what it raises."""
    result = CliRunner().invoke(app, ["certs", *map(str, arguments)])
    if isinstance(result.exception, KvpoolError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_an_authority_that_openssl_believes_in(folder: Path) -> None:
    text = openssl("x509", "-in", folder / "ca.pem", "-noout", "-text")
    assert "CA:TRUE, pathlen:0" in text
    assert "Certificate Sign, CRL Sign" in text
    assert "NIST CURVE: P-256" in text
    assert "O = prod" in text
    assert openssl("verify", "-CAfile", folder / "ca.pem", folder / "ca.pem").endswith("OK\n")
    assert openssl("ec", "-in", folder / "ca.key", "-noout", "-check").count("valid") == 1


@pytest.mark.parametrize("purpose", ["sslserver", "sslclient"])
def test_a_nodes_certificate_is_good_for_both_ends(folder: Path, purpose: str) -> None:
    node = made(folder, hosts=["host-7.example.org", "*.example.org", "10.0.0.7", "fd00::7"])
    command = ["verify", "-CAfile", folder / "ca.pem", "-CRLfile", folder / "crl.pem"]
    strict = ["-x509_strict", "-crl_check", "-purpose", purpose]
    assert openssl(*command, *strict, node.cert).endswith("OK\n")
    text = openssl("x509", "-in", node.cert, "-noout", "-text")
    for name in (
        "URI:kvpool://prod/node/a",
        "DNS:host-7.example.org",
        "DNS:*.example.org",
        "IP Address:10.0.0.7",
        "IP Address:FD00:0:0:0:0:0:0:7",
        "CA:FALSE",
    ):
        assert name in text
    for host, good in (("host-7.example.org", True), ("other.example.com", False)):
        shown = openssl("x509", "-in", node.cert, "-noout", "-checkhost", host)
        assert ("does match" in shown) is good


def test_a_clients_certificate_is_good_for_one_end(folder: Path) -> None:
    client = made(folder, CLIENT, "alice")
    command = ["verify", "-CAfile", folder / "ca.pem", "-purpose"]
    assert openssl(*command, "sslclient", client.cert).endswith("OK\n")
    assert "unsuitable certificate purpose" in openssl(*command, "sslserver", client.cert)
    text = openssl("x509", "-in", client.cert, "-noout", "-text")
    assert "URI:kvpool://prod/client/alice" in text
    assert "CN = alice" in text  # which etcd takes for the user's name


def test_keys_are_for_their_owner_alone(folder: Path) -> None:
    node = made(folder)
    for key in (node.key, folder / "ca.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert key.stat().st_uid == os.getuid()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(node.cert, node.key)
    assert not list(folder.glob(".*")), "nothing half-made is left"


@pytest.mark.parametrize("days", [1, 30, 3650])
def test_how_long_it_is_good_for(folder: Path, days: int) -> None:
    node = made(folder, days=days)
    shown = openssl("x509", "-in", node.cert, "-noout", "-enddate", "-dateopt", "iso_8601")
    ends = datetime.fromisoformat(shown.strip().partition("=")[2])
    authority = certs.open_authority(folder).certificate.not_valid_after_utc
    assert ends == node.ends == min(NOW + timedelta(days=days), authority)
    with pytest.raises(InvalidRequest, match="from 1 to 3650"):
        made(folder, days=0)


def test_an_authority_that_has_expired_signs_nothing(folder: Path) -> None:
    late = NOW + timedelta(days=certs.AUTHORITY_DAYS + 1)
    with pytest.raises(ConfigError, match="has expired"):
        certs.issue(certs.open_authority(folder), NODE, "a", late)


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "../a", "-a", ".a", "a\n", "a" * 64, "ä", "a?x", "a#x", "%2e"]
)
def test_names_that_nobody_has(folder: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="letters, digits"):
        made(folder, name=name)
    with pytest.raises(InvalidRequest, match="letters, digits"):
        certs.make_authority(tmp_path / "other", name, NOW)
    assert not (tmp_path / "other").exists()
    assert len(list(folder.iterdir())) == 3


@pytest.mark.parametrize(
    "host", ["", "a b", "https://x", "x:443", "10.0.0.300/24", "x.", "a" * 300]
)
def test_hosts_that_there_are_not(folder: Path, host: str) -> None:
    with pytest.raises(InvalidRequest, match="--host"):
        made(folder, hosts=[host])


def revoked_serials(folder: Path) -> set[str]:
    text = openssl(
        "crl", "-in", folder / "crl.pem", "-CAfile", folder / "ca.pem", "-noout", "-text"
    )
    assert "verify OK" in text
    return {digits.lower().zfill(40) for digits in re.findall(r"Serial Number: ([0-9A-F]+)", text)}


def serial(path: Path) -> str:
    shown = openssl("x509", "-in", path, "-noout", "-serial")
    return shown.strip().partition("=")[2].lower().zfill(40)


def test_revoking_by_name_takes_all_that_were_made_for_it(folder: Path) -> None:
    assert revoked_serials(folder) == set()
    first, other = made(folder), made(folder, name="b")
    one = serial(first.cert)
    second = serial(made(folder).cert)  # in the place of the first one
    assert one != second
    revoked = certs.revoke(certs.open_authority(folder), "a", NOW)
    assert {f"{number:040x}" for number in revoked} == {one, second}
    assert revoked_serials(folder) == {one, second}
    assert certs.revoke(certs.open_authority(folder), "a", NOW) == [], "they were before"
    command = ["verify", "-CAfile", folder / "ca.pem", "-CRLfile", folder / "crl.pem", "-crl_check"]
    assert "certificate revoked" in openssl(*command, first.cert)
    assert openssl(*command, other.cert).endswith("OK\n")
    third = made(folder)
    assert openssl(*command, third.cert).endswith("OK\n"), "a new one is another one"


@pytest.mark.parametrize("shape", [str.lower, str.upper, lambda s: ":".join(re.findall("..", s))])
def test_revoking_by_serial_number_takes_that_one(folder: Path, shape) -> None:
    first = serial(made(folder).cert)
    second = serial(made(folder).cert)
    certs.revoke(certs.open_authority(folder), shape(first), NOW)
    assert revoked_serials(folder) == {first}
    certs.revoke(certs.open_authority(folder), second, NOW)
    assert revoked_serials(folder) == {first, second}, "what was revoked stays so"


def test_the_list_does_not_expire_before_its_authority(folder: Path) -> None:
    shown = openssl("crl", "-in", folder / "crl.pem", "-noout", "-nextupdate")
    ends = openssl("x509", "-in", folder / "ca.pem", "-noout", "-enddate")
    assert shown.partition("=")[2] == ends.partition("=")[2]


@pytest.mark.parametrize("which", ["nobody", "", "f" * 15, "f" * 41, "f" * 40, "gg" * 10])
def test_what_cannot_be_revoked(folder: Path, which: str) -> None:
    made(folder)
    with pytest.raises(InvalidRequest, match="has issued no certificate for"):
        certs.revoke(certs.open_authority(folder), which, NOW)
    assert revoked_serials(folder) == set()


def test_one_name_for_a_node_and_a_client_is_not_guessed(folder: Path) -> None:
    made(folder)
    made(folder, CLIENT)
    with pytest.raises(InvalidRequest, match="a node and of a client"):
        certs.revoke(certs.open_authority(folder), "a", NOW)


def test_a_list_that_cannot_be_read_is_not_begun_anew(folder: Path) -> None:
    """Else all that it held would be good again."""
    made(folder)
    for broken in (b"", b"nonsense"):
        (folder / "crl.pem").write_bytes(broken)
        with pytest.raises(ConfigError, match=r"crl\.pem"):
            certs.revoke(certs.open_authority(folder), "a", NOW)
        assert (folder / "crl.pem").read_bytes() == broken


def test_an_authority_is_not_made_twice(folder: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match="already contains an authority"):
        certs.make_authority(folder, "prod", NOW)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
@pytest.mark.parametrize("how", ["gone", "nonsense", "other"])
def test_authorities_that_cannot_be_opened(
    folder: Path, tmp_path: Path, name: str, how: str
) -> None:
    path = folder / name
    if how == "gone":
        path.unlink()
    elif how == "nonsense":
        path.write_bytes(b"nonsense")
    else:
        certs.make_authority(tmp_path / "other", "prod", NOW)
        path.write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(ConfigError):
        certs.open_authority(folder)


def test_a_folder_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file"):
        certs.make_authority(tmp_path / "file" / "ca", "prod", NOW)


# ---- the commands --------------------------------------------------------------------------------------


def test_the_commands_say_what_to_do_next(tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    assert f"kvpool certs node {folder} NAME" in kvpool("init", folder, "--cluster", "prod")
    said = kvpool(
        "node", folder, "a", "--host", "a.example.org", "--host", "10.0.0.1", "--days", "9"
    )
    assert "kvpool://prod/node/a" in said
    for setting in ("tls_cert = node-a.pem", "tls_key = node-a.key", "tls_ca = ca.pem", "tls_crl"):
        assert setting in said
    assert "kvpool://prod/client/bob" in kvpool("client", folder, "bob")
    assert serial(folder / "node-a.pem") in kvpool("revoke", folder, "a")
    assert "was revoked before" in kvpool("revoke", folder, "a")
    with pytest.raises(InvalidRequest):
        kvpool("revoke", folder, "nobody")
    with pytest.raises(ConfigError, match="kvpool certs init"):
        kvpool("node", tmp_path / "elsewhere", "a")


def test_show(tmp_path: Path) -> None:
    folder = tmp_path / "ca"
    kvpool("init", folder, "--cluster", "prod")
    kvpool("node", folder, "a", "--host", "a.example.org", "--host", "10.0.0.1", "--days", "9")
    text = kvpool("show", folder / "node-a.pem")
    for words in ("kvpool://prod/node/a", "a.example.org, 10.0.0.1"):
        assert words in text
    assert re.search(r"\(in [89] days\)", text)
    found = json.loads(kvpool("show", folder / "node-a.pem", "--json"))
    expected = openssl("x509", "-in", folder / "node-a.pem", "-noout", "-fingerprint", "-sha256")
    assert found["sha256"] == expected.strip().partition("=")[2].replace(":", "").lower()
    assert found["serial"] == serial(folder / "node-a.pem")
    assert found["kind"] == "certificate"
    assert json.loads(kvpool("show", folder / "ca.pem", "--json"))["kind"] == "authority"
    kvpool("revoke", folder, "a")
    listed = json.loads(kvpool("show", folder / "crl.pem", "--json"))["revoked"]
    assert [serial for serial, _ in listed] == [found["serial"]]
    assert found["serial"] in kvpool("show", folder / "crl.pem")
    with pytest.raises(ConfigError, match="neither a certificate nor a revocation list"):
        kvpool("show", folder / "ca.key")
    with pytest.raises(ConfigError, match="No such file"):
        kvpool("show", folder / "absent.pem")


def test_show_says_what_has_expired(folder: Path) -> None:
    certs.issue(certs.open_authority(folder), NODE, "a", NOW - timedelta(days=20), days=10)
    assert "(expired)" in kvpool("show", folder / "node-a.pem")


def test_without_the_extra_it_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        f"sys.argv[1:] = ['certs', 'init', {str(tmp_path / 'ca')!r}]\n"
        "from kvpool.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "pip install '.[cluster]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_neither_the_command_line_nor_a_daemon_loads_cryptography() -> None:
    """Only who makes certificates needs it."""
    loaded = modules_after(
        "import kvpool.cli.verbs, kvpool.daemon.server.server, kvpool.daemon.workers.transfer_worker"
    )
    assert not any(name.partition(".")[0] == "cryptography" for name in loaded)
