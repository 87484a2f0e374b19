"""Take the pictures of `docs/dashboard.md` anew: a real cluster of three daemons, with traffic, in a real Chromium.

    .venv/bin/python scripts/document_dashboard.py [SECONDS] [FOLDER]

Runs for so many seconds first (285), so that the charts have something to show. Writes dashboard.png,
dashboard-dark.png and dashboard-phone.png into the folder (docs/).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.admin.tokens import add_token
from tests.support.local_cluster import LocalCluster
from tests.support.servers.chromium import chromium
from tests.support.servers.etcd import free_port
from tests.support.traffic import traffic

if TYPE_CHECKING:
    from playwright.sync_api import Browser

DOCS = Path(__file__).resolve().parent.parent / "docs"
SECONDS = 285.0
RACKS = {"prefill-1": "r1", "prefill-2": "r1", "decode-1": "r2"}


def take(
    browser: Browser, url: str, token: str, path: Path, *, width: int, height: int, scheme: str
) -> None:
    """One picture of the cluster's view."""
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        device_scale_factor=2 if width < 500 else 1.5,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.goto(f"{url}/ui/#token={token}")
    page.wait_for_selector(".plot .series")
    page.wait_for_selector(".ranks li")
    page.screenshot(path=path, full_page=width > 500)
    context.close()


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS
    docs = Path(sys.argv[2]) if len(sys.argv) > 2 else DOCS
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvpool-dashboard-") as name:
        folder = Path(name)
        tokens = folder / "tokens.toml"
        token = add_token(tokens, "maria", "operator", [])
        labels = {node: f"zone=eu-1,rack={rack}" for node, rack in RACKS.items()}
        with LocalCluster(
            folder, nodes=0, memory="512MiB", ssd="4GiB", labels=labels, name="prod-eu"
        ) as cluster:
            for node in list(RACKS)[:-1]:
                cluster.add(node)
            gateway = {"KVPOOL_HTTP": f"127.0.0.1:{port}", "KVPOOL_HTTP_TOKENS": str(tokens)}
            cluster.make("decode-1", environ=gateway).start()
            cluster.wait_acquainted()
            url = f"http://127.0.0.1:{port}"
            with traffic(cluster.nodes), chromium() as browser:
                time.sleep(seconds)
                for file, width, height, scheme in (
                    ("dashboard.png", 1280, 1180, "light"),
                    ("dashboard-dark.png", 1280, 1180, "dark"),
                    ("dashboard-phone.png", 390, 1600, "light"),
                ):
                    take(
                        browser, url, token, docs / file, width=width, height=height, scheme=scheme
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
