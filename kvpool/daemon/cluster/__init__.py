"""This node as one of many: membership, announcing, replication, draining, and serving its peers."""
