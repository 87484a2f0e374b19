"""A whole cluster in one thread and no time: the real rules, nodes that die, messages that get lost.

`run_seed(seed)` makes a scenario of a number and lives it: daemons with their membership, directory,
replication, drain, and clients beside them. Everything is as real as it can be without sockets, processes
and clocks. The same seed takes the same steps, in every process.

`python -m tests.sim.simulation SEED` replays one and tells what happens.
"""

from __future__ import annotations

from tests.sim.simulation.world import Result, World, plan_of, run_seed

__all__ = ["Result", "World", "plan_of", "run_seed"]
