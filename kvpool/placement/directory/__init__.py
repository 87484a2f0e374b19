"""Which nodes hold which blocks: the port, its backends, and the announcer that updates it."""
