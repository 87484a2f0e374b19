"""Certificates: creation, reading, and the names in them."""
