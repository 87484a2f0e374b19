"""The contents of engines' own caches, from their KV events."""
