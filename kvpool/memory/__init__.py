"""Shared memory between processes of one machine: segments, views of buffers, and whether their owner lives."""
