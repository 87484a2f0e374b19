"""What a daemon makes of the events of its rules: accounts, reasons of misses, sessions, metrics. No request waits for it."""
