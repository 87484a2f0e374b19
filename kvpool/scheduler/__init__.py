"""Which engine serves a request: estimates, the prefix index, policies, the queue. No I/O, no clock."""
