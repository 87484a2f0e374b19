"""How many engines of which kind, and how large a pool, a workload needs: found by simulating it."""
