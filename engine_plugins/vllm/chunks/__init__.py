"""Tier: chunks of vLLM's own offloading, kept in the pool."""
