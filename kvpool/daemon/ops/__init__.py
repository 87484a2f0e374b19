"""Operators' requests to a node: jobs, events, settings, lists of blocks."""
