"""What engines' own caches hold, from the KV events that they publish."""
