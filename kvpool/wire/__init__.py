"""What travels between clients, daemons and their workers: one module for each conversation, `frame` below them all."""
