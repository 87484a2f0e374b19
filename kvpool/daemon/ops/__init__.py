"""What operators ask of a node: jobs, events, settings, lists of blocks."""
