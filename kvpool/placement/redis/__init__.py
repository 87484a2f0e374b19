"""kvpool's Redis client: connections, shards, batches and their settings."""
