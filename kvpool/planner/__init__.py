"""Finds how many engines of each role, and how large a pool, a workload needs, by simulation."""
