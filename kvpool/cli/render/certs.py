"""Certificates, for people: what was made and what to do with it, and what is in a file."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from kvpool.cli.render.text import Parts, count, make_table
from kvpool.security.certificate_names import NODE
from kvpool.security.certs import Authority, Issued, Shown, serial_text

SOON_DAYS = 30


def made_authority(authority: Authority) -> str:
    """What to do next with a new authority."""
    folder = authority.folder
    return (
        f"{folder}/ca.pem is the authority of cluster {authority.cluster}, good until "
        f"{authority.certificate.not_valid_after_utc:%F}.\n"
        f"Whoever has {folder}/ca.key can be any node: keep it where no daemon runs, and a copy of it.\n"
        f"Next, for each node, by its name (the setting node): kvpool certs node {folder} NAME"
    )


def made_certificate(made: Issued) -> str:
    """What to do next with a new certificate."""
    lines = [f"{made.cert} is that of {made.name}, good until {made.ends:%F}."]
    if made.name.role == NODE:
        folder = made.cert.parent
        lines += [
            f"On node {made.name.name}, of cluster {made.name.cluster}, with copies of these files:",
            f"  tls_cert = {made.cert.name}",
            f"  tls_key = {made.key.name}  (mode 0600, the daemon's user)",
            "  tls_ca = ca.pem",
            "  tls_crl = crl.pem",
            f"ca.key stays in {folder}. Files that replace these are taken up without a restart.",
        ]
    else:
        lines.append(f"Its key is {made.key}; a node does not take it for a peer.")
    return "\n".join(lines)


def revoked(folder: Path, which: str, serials: list[int]) -> str:
    """What was revoked, and what to do next."""
    if not serials:
        return f"{which} was revoked before; {folder}/crl.pem is as it was"
    return (
        f"{count(len(serials), 'certificate')} of {which} revoked: "
        f"{', '.join(map(serial_text, serials))}\n"
        f"Copy {folder}/crl.pem to all nodes (tls_crl): they take it up without a restart."
    )


def certificate_view(shown: Shown, now: datetime) -> Parts:
    """A table of what is in a certificate or a list."""
    facts = {
        "kind": shown.kind,
        "who": shown.name or "",
        "subject": shown.subject,
        "hosts": ", ".join(shown.hosts),
        "serial": shown.serial,
        "begins": "" if shown.begins is None else f"{shown.begins:%F %T} UTC",
        "ends": "" if shown.ends is None else f"{shown.ends:%F %T} UTC{_left(shown.ends, now)}",
        "sha256": shown.sha256,
    }
    rows = [(what, value) for what, value in facts.items() if value]
    rows += [
        ("revoked", f"{serial} since {when:%F %T} UTC") for serial, when in shown.revoked or ()
    ]
    table = make_table("", "", "")
    for row in rows:
        table.add_row(*row)
    yield table


def _left(ends: datetime, now: datetime) -> str:
    days = (ends - now).days
    if ends <= now:
        return " (expired)"
    return f" (in {count(days, 'day')})" if days < SOON_DAYS else ""
