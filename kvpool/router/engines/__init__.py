"""Engines: which are known, which get requests, and what their caches hold."""
