"""Who lives (membership) and who holds what (directory), and the choices that follow from both.

Membership is small and must be right: etcd, or static for one machine. The directory is large and a
hint: Redis, or embedded. Neither ever carries a block's bytes. Both are asked through the ports in
`membership.py` and `directory.py`; the choices (`sources.py`, `targets.py`) are rules without I/O.
"""
