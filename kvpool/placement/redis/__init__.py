"""Our Redis client: connections, shards, batches and their settings."""
