"""`kvpool namespaces`: lists the namespaces of the cluster."""

from __future__ import annotations

from kvpool.cli.base import OPERATORS, Session, asks


@asks(panel=OPERATORS)
def namespaces(at: Session) -> None:
    """Show the namespaces of the cluster: epochs, settings, and their blocks and hit rates on this node.

    Example: kvpool namespaces
    """
    from kvpool.cli.asking import namespace_rows
    from kvpool.cli.render.cluster import namespaces_view

    rows = namespace_rows(at.client.cluster(), at.client.stats(), at.tenant)
    at.show(rows, namespaces_view(rows))
