"""A cluster of engines and its pool, simulated over a trace: the scheduler that runs here is the real one."""
