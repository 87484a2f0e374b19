"""Scheduler half: which blocks to look up, load, save and pin. In the scheduling thread of an engine."""
