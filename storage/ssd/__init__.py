"""The SSD tier: blocks in slots of one file, with an index that survives a crash."""
