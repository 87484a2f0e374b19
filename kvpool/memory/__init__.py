"""Shared memory between processes of one machine: segments, views of buffers, and liveness of their owner."""
