"""Bringing blocks that are not in memory here: locate, plan, transfer."""
