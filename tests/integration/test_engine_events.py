"""Engines' KV events on a node that is alone: what operators see, and daemons that cannot follow."""

import json
import subprocess
import sys

FOLLOW = """
import zmq
client = Client(SOCKET, timeout_s=60)
ns = client.open(RECORD)
pub = zmq.Context.instance().socket(zmq.PUB)
pub.bind("ipc://" + hear())
endpoint = pub.getsockopt_string(zmq.LAST_ENDPOINT)
say(client.engine.follow_events(ns, endpoint, groups=[0]))
say(client.match(ns, [key(1)]))
hear()
"""


def status(daemon, *more):
    command = [sys.executable, "-m", "kvpool.cli", "status", "--socket", daemon.socket, *more]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_operators_see_the_engines(start, folder, until):
    daemon = start()
    engine = daemon.script(FOLLOW)
    engine.say(str(folder / "e"))
    assert engine.hear() == "True"
    assert engine.hear() == "0"
    until(lambda: daemon.stats().tenants["default"].engines.followed[0].connected)
    (row,) = json.loads(status(daemon, "--json"))["tenants"]["default"]["engines"]["followed"]
    assert (row["endpoint"], row["connected"]) == (f"ipc://{folder}/e", True)
    assert (row["blocks"], row["complete"]) == (0, False)
    shown = status(daemon)
    assert "at least 0" in shown
    assert "has not been heard of yet" in shown
    engine.kill()
    until(lambda: not daemon.stats().tenants["default"].engines.followed)
    assert "gpu" not in status(daemon)


def test_a_client_that_is_idle_is_followed_on(start, folder, until):
    """Its connections are gone, and it holds nothing: its process lives."""
    daemon = start()
    engine = daemon.script(FOLLOW.replace("hear()\n", "client.close(); say('closed'); hear()\n"))
    engine.say(str(folder / "e"))
    assert [engine.hear() for _ in range(3)] == ["True", "0", "closed"]
    until(lambda: daemon.stats().connections == 1)  # this question's own
    assert len(daemon.stats().tenants["default"].engines.followed) == 1
    engine.kill()
    until(lambda: not daemon.stats().tenants["default"].engines.followed)
