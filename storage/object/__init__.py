"""The object tier: blocks packed into objects of an object store that all nodes share."""
