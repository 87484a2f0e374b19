"""A real cluster under faults that a seed chooses, a history of all that happened, and a checker of that history.

`python -m tests.chaos` (`make chaos`) runs it; `docs/chaos.md` says which faults there are and what is proven.
"""
