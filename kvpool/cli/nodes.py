"""`kvpool nodes`: lists the nodes of the cluster."""

from __future__ import annotations

from kvpool.cli.base import OPERATORS, Session, asks


@asks(panel=OPERATORS)
def nodes(at: Session) -> None:
    """Show the nodes of the cluster, as seen by this node.

    Example: kvpool nodes
    """
    from kvpool.cli.render.cluster import nodes_view

    cluster = at.client.cluster()
    at.show(cluster, nodes_view(cluster))
