"""`kvpool version`."""

from __future__ import annotations

from kvpool import __version__
from kvpool.cli import base
from kvpool.cli.base import AsJson, app


@app.command()
def version(as_json: AsJson = False) -> None:
    """Print the version.

    Example: kvpool version
    """
    base.show({"version": __version__}, __version__, as_json=as_json)
