"""Which blocks are in which object of object storage: the port and its backends."""
