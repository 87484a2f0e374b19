"""A small certificate authority in a folder, for `kvpool certs`. Needs the extra kvpool[cluster].

    ca.pem, ca.key            the authority; anyone who has its key can be any node
    crl.pem                   which certificates are revoked
    node-NAME.pem, .key       a node's, for both ends of a connection
    client-NAME.pem, .key     a client's
    issued.jsonl              a line for each certificate: `revoke` finds it by its name

Keys are EC P-256, files of mode 0600, without a password. Nothing here opens a connection; the folder can be kept
on a machine without a network, which is the best place for the authority's key. One user at a time.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvpool.errors import ConfigError, InvalidRequest
from kvpool.secret_files import write_whole
from kvpool.security.certificate_names import CLIENT, NODE, CertificateName

AUTHORITY_DAYS = 3650
DAYS = 365
DAYS_MAX = 3650
EARLY = timedelta(minutes=5)  # for machines whose clocks are slow
HOSTS_MAX = 64
_HOST = re.compile(
    r"(?=.{1,253}$)(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*"
)
_SERIAL = re.compile(r"[0-9a-f]{16,40}", re.IGNORECASE)
SERIAL_BITS_MAX = 159  # RFC 5280: 20 bytes, not negative


@dataclass(frozen=True, slots=True)
class Authority:
    """The signing key, and its cluster."""

    folder: Path
    cluster: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


@dataclass(frozen=True, slots=True)
class Issued:
    """An issued certificate, and its path."""

    name: CertificateName
    serial: int
    cert: Path
    key: Path
    ends: datetime


@dataclass(frozen=True, slots=True)
class Shown:
    """The contents of a certificate or a revocation list. name: of the owner; None: not issued for kvpool.

    revoked: serials and times; None: this is not a revocation list.
    """

    kind: str
    subject: str
    name: str | None
    hosts: tuple[str, ...]
    serial: str
    begins: datetime | None
    ends: datetime | None
    sha256: str
    revoked: tuple[tuple[str, datetime], ...] | None = None


def make_authority(folder: Path, cluster: str, now: datetime) -> Authority:
    """Create an authority, and an empty revocation list. Raises `ConfigError` if there is one."""
    _check_name(CertificateName(cluster, NODE, "any"))
    if (folder / "ca.key").exists() or (folder / "ca.pem").exists():
        raise ConfigError(
            f"{folder} already contains an authority, which nodes may depend on: use another folder"
        )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create {folder}: {error.strerror}") from None
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("kvpool authority", cluster)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    authority = Authority(folder, cluster, certificate, key)
    write_whole(folder / "ca.key", _pem_of(key), 0o600)
    write_whole(folder / "ca.pem", certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    _write_revoked(authority, [], now)
    return authority


def open_authority(folder: Path) -> Authority:
    """The authority in this folder. Raises `ConfigError`."""
    try:
        certificate = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
        key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.filename} does not exist: create an authority with kvpool certs init {folder} --cluster NAME"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot read {error.filename}: {error.strerror}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"the authority in {folder} cannot be read: {error}") from None
    clusters = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or len(clusters) != 1:
        raise ConfigError(f"the authority in {folder} was not created by kvpool certs init")
    if key.public_key() != certificate.public_key():
        raise ConfigError(f"{folder}/ca.key is not the key of {folder}/ca.pem")
    return Authority(folder, str(clusters[0].value), certificate, key)


def issue(
    authority: Authority,
    role: str,
    name: str,
    now: datetime,
    *,
    hosts: Sequence[str] = (),
    days: int = DAYS,
) -> Issued:
    """Issue a certificate and its key; earlier ones for the same name are replaced, not revoked.

    role: `NODE`, valid for both ends of a connection, or `CLIENT`. hosts: names and addresses that clients, such
    as browsers, connect to. Raises `ConfigError` for invalid values, or if it cannot be written.
    """
    whose = CertificateName(authority.cluster, role, name)
    _check_name(whose)
    if not 1 <= days <= DAYS_MAX:
        raise InvalidRequest(f"a certificate for {days} days: must be from 1 to {DAYS_MAX}")
    if len(hosts) > HOSTS_MAX:
        raise InvalidRequest(f"{len(hosts)} hosts in one certificate: at most {HOSTS_MAX}")
    ends = min(now + timedelta(days=days), authority.certificate.not_valid_after_utc)
    if ends <= now:
        raise ConfigError(
            f"the authority in {authority.folder} has expired: create a new one in another folder"
        )
    key = ec.generate_private_key(ec.SECP256R1())
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role == NODE:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    names = [x509.UniformResourceIdentifier(str(whose)), *map(_host, hosts)]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_subject(name, authority.cluster))
        .issuer_name(authority.certificate.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_signed_by(authority), critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    made = Issued(
        whose,
        certificate.serial_number,
        authority.folder / f"{role}-{name}.pem",
        authority.folder / f"{role}-{name}.key",
        ends,
    )
    # Recorded first: an unrecorded certificate could not be revoked by its name.
    _remember(authority, made)
    write_whole(made.key, _pem_of(key), 0o600)
    write_whole(made.cert, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return made


def revoke(authority: Authority, which: str, now: datetime) -> list[int]:
    """Revoke all certificates of a name, or one by its serial number in hex; returns the newly revoked ones.

    Raises `InvalidRequest` for a name without certificates, or that is both a node's and a client's.
    """
    serials = _serials(authority, which)
    crl = _read_revoked(authority)
    known = {entry.serial_number: entry.revocation_date_utc for entry in crl}
    new = [serial for serial in serials if serial not in known]
    if new:
        _write_revoked(authority, [*known.items(), *((serial, now) for serial in new)], now)
    return new


def look_at(path: Path) -> Shown:
    """The contents of a PEM file: its first certificate, or a revocation list. Raises `ConfigError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    try:
        if b"-----BEGIN X509 CRL-----" in data:
            return _shown_list(x509.load_pem_x509_crl(data))
        return _shown_certificate(x509.load_pem_x509_certificate(data))
    except ValueError:
        raise ConfigError(
            f"{path} contains neither a certificate nor a revocation list, in PEM"
        ) from None


def serial_text(serial: int) -> str:
    """A serial number as it is written: 40 hex digits."""
    return f"{serial:040x}"


def _shown_list(crl: x509.CertificateRevocationList) -> Shown:
    revoked = tuple((serial_text(entry.serial_number), entry.revocation_date_utc) for entry in crl)
    return Shown(
        "list of revoked certificates",
        crl.issuer.rfc4514_string(),
        None,
        (),
        "",
        crl.last_update_utc,
        crl.next_update_utc,
        crl.fingerprint(hashes.SHA256()).hex(),
        revoked,
    )


def _shown_certificate(certificate: x509.Certificate) -> Shown:
    hosts: list[str] = []
    name = None
    with contextlib.suppress(x509.ExtensionNotFound):
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        hosts += found.get_values_for_type(x509.DNSName)
        hosts += map(str, found.get_values_for_type(x509.IPAddress))
        uris = map(CertificateName.parse, found.get_values_for_type(x509.UniformResourceIdentifier))
        name = next((str(uri) for uri in uris if uri is not None), None)
    signs = False
    with contextlib.suppress(x509.ExtensionNotFound):
        signs = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    return Shown(
        "authority" if signs else "certificate",
        certificate.subject.rfc4514_string(),
        name,
        tuple(hosts),
        serial_text(certificate.serial_number),
        certificate.not_valid_before_utc,
        certificate.not_valid_after_utc,
        certificate.fingerprint(hashes.SHA256()).hex(),
    )


def _check_name(name: CertificateName) -> None:
    if CertificateName.parse(str(name)) != name:
        raise InvalidRequest(
            f"{name}: the names of clusters, nodes and clients must be 1 to 63 letters, digits and ._-, beginning with "
            "a letter or digit"
        )


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass  # a name, not an address
    if not _HOST.fullmatch(text):
        raise InvalidRequest(
            f"--host {text!r}: must be a host's name or address, without a port or URL"
        )
    return x509.DNSName(text)


def _subject(name: str, cluster: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _signed_by(authority: Authority) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())


def _remember(authority: Authority, made: Issued) -> None:
    line = {"serial": serial_text(made.serial), "name": str(made.name), "ends": f"{made.ends:%F}"}
    path = authority.folder / "issued.jsonl"
    try:
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _remembered(authority: Authority) -> list[tuple[int, CertificateName | None]]:
    path = authority.folder / "issued.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return [(int(line["serial"], 16), CertificateName.parse(line["name"])) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, the list of issued certificates, cannot be read: {error}"
        ) from None


def _serials(authority: Authority, which: str) -> list[int]:
    """The identity to revoke."""
    made = _remembered(authority)
    named = [(serial, name) for serial, name in made if name is not None and name.name == which]
    roles = {name.role for _, name in named}
    if len(roles) > 1:
        raise InvalidRequest(
            f"{which} is the name of a {NODE} and of a {CLIENT}: give the serial number (kvpool certs show FILE)"
        )
    if named:
        return [serial for serial, _ in named]
    digits = which.replace(":", "")
    if _SERIAL.fullmatch(digits) and int(digits, 16).bit_length() <= SERIAL_BITS_MAX:
        return [int(digits, 16)]
    raise InvalidRequest(
        f"the authority in {authority.folder} has issued no certificate for {which!r}: give a name, or a serial number in "
        f"hex (kvpool certs show FILE)"
    )


def _read_revoked(
    authority: Authority,
) -> x509.CertificateRevocationList | list[x509.RevokedCertificate]:
    path = authority.folder / "crl.pem"
    try:
        crl = x509.load_pem_x509_crl(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read, and is not overwritten: {error}") from None
    if not crl.is_signature_valid(authority.key.public_key()):
        raise ConfigError(f"{path} is not signed by the authority beside it")
    return crl


def _write_revoked(
    authority: Authority, revoked: Sequence[tuple[int, datetime]], now: datetime
) -> None:
    """As valid as the authority: an expired list would shut all nodes out at once."""
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(authority.certificate.subject)
        .last_update(now - EARLY)
        .next_update(authority.certificate.not_valid_after_utc)
        .add_extension(_signed_by(authority), critical=False)
        .add_extension(x509.CRLNumber(int(now.timestamp() * 1000)), critical=False)
    )
    for serial, when in revoked:
        builder = builder.add_revoked_certificate(
            x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when).build()
        )
    crl = builder.sign(authority.key, hashes.SHA256())
    write_whole(authority.folder / "crl.pem", crl.public_bytes(serialization.Encoding.PEM), 0o644)


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
