"""Worker half: copies between one rank's paged KV and the slots of the pool."""
