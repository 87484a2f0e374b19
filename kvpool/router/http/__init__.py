"""HTTP: what requests and answers look like, without knowledge of engines."""
