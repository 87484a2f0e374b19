"""Upstream: calls to engines, what an engine is, and what a failed call says."""
