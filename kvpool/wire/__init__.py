"""Messages between clients, daemons and their workers: one module per conversation, `frame` below them all."""
