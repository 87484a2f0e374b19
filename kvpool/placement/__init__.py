"""Which nodes live (membership) and which blocks they hold (directory), and the decisions based on both.

Membership is small and must be right: etcd, or static for one machine. The directory is large and a
hint: Redis, or embedded. Neither ever carries a block's bytes. Both are used through the ports in
`membership/base.py` and `directory/base.py`; the decisions (`peer_selection.py`, `replica_targets.py`) are rules
without I/O.
"""
