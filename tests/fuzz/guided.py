"""One target, guided by the lines of kvpool that inputs reach. Runs in a process of its own, which atheris ends.

python -m tests.fuzz.guided TARGET -runs=100000 -seed=1 CORPUS
"""

from __future__ import annotations

import logging
import random
import sys

import atheris

with atheris.instrument_imports(include=["kvpool"]):
    from tests.fuzz import targets


def main() -> None:
    logging.disable()
    name = sys.argv.pop(1)
    target = targets.TARGETS[name]

    def changed(data: bytes, size_max: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.3:
            return bytes(atheris.Mutate(data, size_max))
        return target.mutated(data or rng.choice(target.seeds), rng)[:size_max]

    atheris.Setup(sys.argv, lambda data: targets.run(name, data), custom_mutator=changed)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
