"""Replicas outside of memory on this node: SSD, spare device memory, object storage, engines' own caches."""
