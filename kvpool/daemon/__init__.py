"""A node's daemon: the rules of a block (`core`), the tiers, the cluster, and the processes that move bytes."""
