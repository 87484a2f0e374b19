"""What the nodes of compose.yaml need before they start, made once: certificates, and the gateways' tokens.

Arguments: the nodes' names. /authority: the authority, which no node sees. /nodes/NAME: what node NAME reads.
/public: what those need who check the nodes' certificates. What is there is left as it is, but for the tokens.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

USER = 10001  # of the daemons, as the image has it


def give(source: bytes, target: Path, mode: int, user: int) -> None:
    """Written beside its place first: a daemon that runs reads the old one or the new one."""
    partial = target.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(fd, "wb") as file:
        file.write(source)
        os.fchmod(fd, mode)  # whatever the mask
    os.chown(partial, user, user)
    partial.rename(target)


def tokens(token: str) -> bytes:
    """The list of who may ask the gateways: Prometheus, to look only."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return (
        f'[[token]]\nname = "prometheus"\nsha256 = "{digest}"\nrole = "viewer"\ntenants = ["*"]\n'
    ).encode()


def main(names: list[str], root: Path = Path("/"), user: int = USER) -> None:
    os.umask(0o077)
    authority, public = root / "authority" / "cluster", root / "public"
    if not (authority / "ca.pem").exists():
        shutil.rmtree(authority, ignore_errors=True)
        subprocess.run(["kvpool", "certs", "init", str(authority)], check=True)
    listed = tokens((root / "run/secrets/metrics_token").read_text().removesuffix("\n"))
    ca = (authority / "ca.pem").read_bytes()
    give(ca, public / "ca.pem", 0o644, user)
    for name in names:
        if not (authority / f"node-{name}.pem").exists():
            hosts = ["--host", name, "--host", "localhost", "--host", "127.0.0.1"]
            subprocess.run(["kvpool", "certs", "node", str(authority), name, *hosts], check=True)
        folder = root / "nodes" / name
        give(ca, folder / "ca.pem", 0o644, user)
        give((authority / f"node-{name}.pem").read_bytes(), folder / "node.pem", 0o644, user)
        give((authority / f"node-{name}.key").read_bytes(), folder / "node.key", 0o600, user)
        give(listed, folder / "http-tokens.toml", 0o600, user)


if __name__ == "__main__":
    main(sys.argv[1:])
