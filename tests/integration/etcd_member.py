"""A member in a process of its own, to be stopped and killed; says on stdout how it is doing.

Usage: etcd_member.py URL CLUSTER NODE PORT TTL_S. One line each time its standing changes, and
`joined INCARNATION`. A lost lease makes it join again, as the daemon does.
"""

import asyncio
import logging
import sys
import time

import uvloop

from kvpool.placement.etcd.settings import EtcdSettings
from kvpool.placement.membership.etcd import EtcdMembership
from tests.contract.suites.membership import record, standing


async def main() -> None:
    url, cluster, node, port, ttl_s = sys.argv[1:]
    member = EtcdMembership(EtcdSettings.from_url(url), cluster, protocol=1, ttl_s=float(ttl_s))
    lost = asyncio.Event()
    member.on_lost(lost.set)
    await member.start()

    async def join() -> None:
        made = record(node, int(port))
        await member.join(made)
        say(f"joined {made.incarnation}")

    await join()
    shown = None
    while True:
        # The first thing that this process does after it was stopped is to look.
        if (now := standing(member)) is not shown:
            shown = now
            say(now.value)
        if lost.is_set():
            lost.clear()
            await join()
        await asyncio.sleep(0.001)


def say(text: str) -> None:
    sys.stdout.write(f"{time.monotonic():.3f} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    logging.disable()  # so that what is left on stderr is noise
    uvloop.run(main())
