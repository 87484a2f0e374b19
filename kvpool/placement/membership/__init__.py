"""Which nodes live, with their records: the port and its backends, static and etcd."""
