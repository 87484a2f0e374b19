"""Tiers: where blocks rest. DRAM segments, slot allocation, eviction policies."""
