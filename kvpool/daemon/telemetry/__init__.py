"""Counters of one node and its background tasks."""
