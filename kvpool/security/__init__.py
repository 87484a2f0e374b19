"""Certificates: making them, reading them, and the names in them."""
