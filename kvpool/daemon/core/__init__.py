"""What may happen to a block on this node: namespaces, reservations, leases, pins, eviction order. No I/O."""
