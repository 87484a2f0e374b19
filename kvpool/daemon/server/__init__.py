"""The control process: client connections, request handlers, and the one place where a daemon is composed."""
