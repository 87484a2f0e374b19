"""The README, the quick start and the runbook, as somebody goes through them who types each command that they show.

Each section with commands is gone through in order, on hosts that are folders with an empty home. A command runs as it
is written, but for what its scene swaps: addresses and ports become free ones of loopback, sizes small ones. What a page
shows below a command is compared with what the command prints, in shape: see `NORMAL`. What cannot run here is in
`LEFT_OUT`, with the reason; a command that is not there is run. Entries of these tables that no page has are errors.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from kvpool.admin.tokens import add_token
from kvpool.client import Client
from kvpool.types import NamespaceRecord
from tests.documents import Block, Command, commands, prose, section
from tests.support.local_cluster import UNHURRIED, LocalCluster
from tests.support.programs import program
from tests.support.servers.etcd import Etcd, free_port
from tests.support.servers.find import find_server
from tests.support.servers.redis import Redis
from tests.support.waiting import PATIENCE_S, until
from tests.terminals import SCP, SSH, Done, Host, Service, answers, closing, make_programs

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "quickstart.md"
OPERATIONS = ROOT / "docs" / "operations.md"
PAGES = (README, QUICKSTART, OPERATIONS)

needs_programs = pytest.mark.skipif(
    any(shutil.which(name) is None for name in ("openssl", "make")), reason="needs openssl and make"
)

# ---- the tables ----------------------------------------------------------------------------------

VLLM = "needs vLLM: tests/integration/vllm/test_quickstart.py runs it"
LEFT_OUT = {
    "pip install": "takes packages from a network: all of it is installed",
    "/opt/kvpool/bin/pip install": "takes packages from a network: all of it is installed",
    "make demo": "needs vLLM: the bench of engines, bench/engine.py, runs the same",
    "vllm serve": VLLM,
    "CUDA_VISIBLE_DEVICES=": VLLM,
    "KVPOOL_MOONCAKE=1 ": "needs vLLM: tests/integration/vllm/test_mooncake_facade.py runs that connector",
    "curl -s http://127.0.0.1:8000/": VLLM,
    "curl -s http://127.0.0.1:8080/": VLLM,
    "kvpool explain first": VLLM,
    "python -m sglang.launch_server": "needs SGLang: tests/integration/sglang/test_engines.py runs its engine",
    "lmcache server": "needs LMCache: tests/integration/lmcache/test_processes.py runs its server",
    "systemctl ": "needs systemd: the scene stops and starts the daemon instead",
    "docker ": "needs docker: tests/integration/test_deploy_compose.py runs what the image does",
}
"""How commands begin that are not run, and why."""

SERVERS = {
    "kvpool serve": " ready: ",
    "kvpool router": " ready: ",
    "etcd ": "ready to serve client requests",
    "redis-server ": "Ready to accept connections",
    "make cluster": "Ctrl-C stops it all.",
}
"""How commands begin that do not end, and what they say when they are ready."""

LOOKS = tuple(f"kvpool {verb} " for verb in ["nodes", "namespaces", "status", "blocks", "plan"])
"""Commands that change nothing, so that they can be typed again until what came before is known everywhere, and what is
measured is not disturbed.
"""

TURNS = {
    "kvpool job start evict --namespace b950 --node a": ("[y/N]", "y\n"),
    "kvpool clear b950": ("[y/N]", "y\n"),
    "kvpool top": ("q ends", "q"),
}
"""Commands that want a terminal: what they wait with, and what is typed then."""

NORMAL = (
    (r"\b\d+ (s|min|h|d)( \d+ (s|min|h))?(?!\w)", "TIME"),
    (r"\b\d+\.\d+\.\d+\.\d+:\d+\b", "ADDRESS"),
    (r"\b[0-9a-f]{12}\b", "DIGEST"),
    (r"[+-]?\b\d[\d,.]*( [KMGT]iB)?%?", "NUMBER"),
    (r"[ \t]+", " "),
)
"""What differs from run to run, and as what it is compared."""


@dataclass(frozen=True)
class Says:
    """Of a command in a section: what the page's text says of it, and what is seen of that. status: its exit status."""

    command: str
    page_says: str
    seen: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()
    status: int = 0


NODES_OF_CLUSTER = (r"^\* a +serving", "^  b +serving", "^  c +serving", "^directory ")
SAYS = {
    (QUICKSTART, "One node, with vLLM"): (
        Says(
            "kvpool status", "`put` says how many blocks were stored", (r"^put +\d+ blocks stored",)
        ),
    ),
    (QUICKSTART, "Two nodes"): (
        Says("kvpool nodes", "Either shows both", ("host-a +serving", "host-b +serving")),
        Says(
            "kvpool blocks locate 00000000000000000000000000000007",
            "is known on `host-b`",
            ("host-a",),
        ),
    ),
    (OPERATIONS, "A first walk-through"): (
        Says("kvpool nodes", "`nodes` shows a, b and c, all `serving`", NODES_OF_CLUSTER),
        Says("kvpool status --quiet && echo serves", "the second one prints `serves`", ("serves",)),
        Says(
            "kvpool namespaces",
            "The namespace is `b95003652934`, with 100 blocks of 64 KiB",
            ("b95003652934.* 100 ",),
        ),
        Says(
            "kvpool job start warm b950 --from a --node b",
            "ends with `100 blocks brought, 6.2 MiB`",
            ("^100 blocks brought, 6.2 MiB",),
        ),
        Says(
            "kvpool blocks locate 00000000000000000000000000000000",
            "the first block is on a and b",
            (" a ", " b "),
        ),
        Says(
            "kvpool job start evict --namespace b950 --node a --dry-run",
            "The dry run counts 99 blocks, since one is pinned",
            ("99 blocks would be evicted",),
        ),
        Says(
            "kvpool job start evict --namespace b950 --node a",
            "the other asks, and evicts them",
            ("99 blocks evicted",),
        ),
        Says(
            "kvpool nodes",
            "`nodes` no longer lists it, and says so",
            ("b is drained and not here",),
            ("^  b +",),
        ),
        Says(
            "kvpool blocks lookup b950 00000000000000000000000000000000",
            "no node has any of it, and `lookup` ends with 1",
            ("no node has the first of 1 block",),
            status=1,
        ),
        Says(
            "kvpool job list",
            "`job list` has the warm-up and both evictions",
            (r"warm-(.*\n)*", r"evict-(.*\n)*.*evict-"),
        ),
        Says("kvpool events --limit 20", "`events` what was done last", ("clear", "drain")),
    ),
    (OPERATIONS, "Is the network as fast as it should be?"): (
        Says(
            "python bench/node.py transfer b",
            "pulls blocks from node b into the node on which it is typed",
            (r"^pulled from b into a", r"^1 MiB .* tcp *$", r"^checksum failures: 0"),
        ),
    ),
    (OPERATIONS, "Upgrading and going back"): (
        Says("kvpool nodes", "host-7 is serving, with its new version", (r"host-7 +serving",)),
    ),
    (OPERATIONS, "From another machine"): (
        Says("kvpool nodes", "`nodes` shows node-a, `serving`", (r"^\* node-a +serving",)),
        Says("kvpool config set replicas_max=2", "`config set` ends with 4", status=4),
    ),
}
"""In the order of the page; what a section says of no command is that it succeeds."""


# ---- scenes --------------------------------------------------------------------------------------


@dataclass
class Scene:
    """What has to be there for a section, and what is of its machines and not of these.

    swaps: what stands for what in its commands. learnt: what stands for what a reader is to put in, by a pattern of what
    a server says. environ: of its shells. files: in the folder in which they are typed.
    instead: what is done for a command of `LEFT_OUT`'s kind that the next commands build on. afterwards: what else the
    section says, given the hosts by name.
    """

    swaps: Mapping[str, str] = field(default_factory=dict)
    learnt: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    afterwards: Callable[[Mapping[str, Host]], object] = lambda _: None


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Etcd, Redis]]:
    """An etcd and a Redis for sections that have them already."""
    folder = tmp_path_factory.mktemp("servers")
    with Etcd(folder / "etcd") as etcd, Redis(folder / "redis") as redis:
        yield etcd, redis


Servers = tuple[Etcd, Redis]
Making = AbstractContextManager[Scene]


def local(port: int = 0) -> str:
    return f"127.0.0.1:{port or free_port()}"


def a_request(folder: Path, servers: Servers) -> Making:
    def is_of_the_readme(hosts: Mapping[str, Host]) -> None:
        (host,) = hosts.values()
        request = json.loads((host.folder / "request.json").read_text())
        assert request["prompt"] == README.read_text()[:6000]

    return nullcontext(Scene(afterwards=is_of_the_readme))


def two_hosts(folder: Path, servers: Servers) -> Making:
    etcd, redis, members = local(), free_port(), local()
    swaps = {
        "http://10.0.0.5:2379": f"http://{etcd}",
        "etcd://10.0.0.5:2379": f"etcd://{etcd}",
        "redis://10.0.0.5:6379": f"redis://{local(redis)}",
        "--bind 10.0.0.5 --port 6379": f"--bind 127.0.0.1 --port {redis}",
        "tcp://10.0.0.5:7070": f"tcp://{local()}",
        "tcp://10.0.0.6:7070": f"tcp://{local()}",
        # Its port for other members has a default, which another test may have taken.
        "etcd --data-dir": (
            f"etcd --listen-peer-urls http://{members} --initial-cluster default=http://{members} "
            f"--initial-advertise-peer-urls http://{members} --data-dir"
        ),
    }

    def are_a_pool(hosts: Mapping[str, Host]) -> None:
        there = hosts["host-b"]
        assert not (there.folder / "certs" / "ca.key").exists()
        # What is known there can be loaded there.
        with Client(there.socket, timeout_s=PATIENCE_S, connect=True) as client:
            record = NamespaceRecord.simple("quickstart", block_bytes=65536, block_tokens=16)
            assert (
                client.pull(client.open(record), [(7).to_bytes(16, "big")], wait_s=PATIENCE_S) == 1
            )

    return nullcontext(Scene(swaps, afterwards=are_a_pool))


def a_router_of_its_own(folder: Path, servers: Servers) -> Making:
    return nullcontext(Scene({"kvpool router": f"kvpool router --listen {local()}"}))


def a_cluster_to_look_at(folder: Path, servers: Servers) -> Making:
    def leaves_nothing(hosts: Mapping[str, Host]) -> None:
        (host,) = hosts.values()
        (cluster,) = host.services
        (socket,) = (host.swaps[name] for name in learnt)
        assert Path(socket).parent.is_dir()
        cluster.interrupt()
        assert not Path(socket).parent.exists()

    learnt = {"/tmp/kvpool-cluster-we9kkgfx/a.sock": r"(?m)^node a .* socket (\S+)$"}
    swaps = {"make cluster": "make --old-file=venv cluster"}  # the environment is there
    return nullcontext(Scene(swaps, learnt, afterwards=leaves_nothing))


def traces(folder: Path, servers: Servers) -> Making:
    # As a router records it: a document of 3,072 tokens that all requests begin with.
    lines = [
        {
            "timestamp": 500 * number,
            "input_length": 6000,
            "output_length": 100,
            "hash_ids": [*range(6), *range(100 + 6 * number, 106 + 6 * number)],
        }
        for number in range(20)
    ]
    swaps = {"kvpool plan --rate": "kvpool plan --limit 50 --rate"}  # the default is 1,000 requests
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return nullcontext(Scene(swaps, files={"trace.jsonl": text}))


@contextmanager
def a_cluster(
    folder: Path, servers: Servers, *, name: str, **settings: str
) -> Iterator[LocalCluster]:
    etcd, redis = servers
    where = folder / "cluster"
    where.mkdir()
    environ = UNHURRIED | settings
    with LocalCluster(
        where, nodes=2, memory="16MiB", etcd=etcd, redis=redis, name=name, environ=environ
    ) as cluster:
        yield cluster


@contextmanager
def a_prompt_that_is_half_there(folder: Path, servers: Servers) -> Iterator[Scene]:
    """Of two namespaces that share a node's memory, the second one has evicted a part of the first one's prompt."""
    with a_cluster(folder, servers, name="misses", KVPOOL_FORWARD="false") as cluster:
        a, b = cluster.nodes
        mine, other = (
            NamespaceRecord.simple(model, block_bytes=256 << 10, block_tokens=32)
            for model in ("one", "another")
        )
        keys = [(1 + number).to_bytes(16, "big") for number in range(40)]
        with b.client(connect=True) as there, a.client(connect=True) as client:
            there.open(mine)
            space = client.open(mine)
            block = bytes(256 << 10)
            client.put(space, keys, [block] * len(keys))
            others = client.open(other)
            number = 1000
            while client.match(space, keys) == len(keys):
                client.put(others, [number.to_bytes(16, "big")], [block])
                number += 1
            client.get(space, keys)
            # A longer prompt that nobody has put.
            client.get(others, [(number + each).to_bytes(16, "big") for each in range(40)])
            digest = mine.digest().hex()
            yield Scene(
                {"lookup 3fa9": f"lookup {digest[:8]}"},
                environ={"KVPOOL_SOCKET": a.socket},
                files={"prompt.keys": "".join(f"{key.hex()}\n" for key in keys)},
            )


@contextmanager
def two_nodes(folder: Path, servers: Servers) -> Iterator[Scene]:
    with a_cluster(folder, servers, name="transfer") as cluster:
        cluster.wait_acquainted()
        yield Scene(
            {"python bench": f"{sys.executable} bench"},
            environ={"KVPOOL_SOCKET": cluster.nodes[0].socket},
        )


@contextmanager
def a_node_to_upgrade(folder: Path, servers: Servers) -> Iterator[Scene]:
    with a_cluster(folder, servers, name="upgrade") as cluster:
        node = cluster.add("host-7")
        settings = folder / "kvpool.toml"
        settings.write_text('memory = "64GiB"\n')
        yield Scene(
            {"/etc/kvpool/kvpool.toml": str(settings)},
            environ={"KVPOOL_SOCKET": node.socket},
            instead={"systemctl stop kvpool": node.stop, "systemctl start kvpool": node.start},
        )


@contextmanager
def a_node_with_an_engine(folder: Path, servers: Servers) -> Iterator[Scene]:
    with a_cluster(folder, servers, name="scale-in") as cluster, ExitStack() as stack:
        node = cluster.add("host-7")
        line = stack.enter_context(program("tests.support.stub_engine", "--port", "0"))
        engine = f"{json.loads(line)['url']},node=host-7"
        place = local()
        words = ("router", "--listen", place, "--no-daemon", "--engine", engine)
        stack.enter_context(program("kvpool.cli", *words))
        swaps = {"http://routers.example.org:8080": f"http://{place}"}
        yield Scene(swaps, environ={"KVPOOL_SOCKET": node.socket})


@contextmanager
def a_gateway_elsewhere(folder: Path, servers: Servers) -> Iterator[Scene]:
    with a_cluster(folder, servers, name="elsewhere") as cluster:
        tokens, place = folder / "tokens.toml", local()
        add_token(tokens, "first", "viewer", [])  # it begins with a file
        cluster.make(
            "node-a", environ={"KVPOOL_HTTP": place, "KVPOOL_HTTP_TOKENS": str(tokens)}
        ).start()
        until(answers(f"http://{place}/healthz"), "the gateway answers")
        yield Scene(
            {
                "/etc/kvpool/tokens.toml": str(tokens),
                "https://node-a.example.org:7071": f"http://{place}",
            }
        )


def nothing_special(folder: Path, servers: Servers) -> Making:
    return nullcontext(Scene())


SCENES: dict[tuple[Path, str], Callable[[Path, Servers], Making]] = {
    (QUICKSTART, "One node, with vLLM"): a_request,
    (QUICKSTART, "Two nodes"): two_hosts,
    (QUICKSTART, "Prefill and decode apart"): a_router_of_its_own,
    (OPERATIONS, "A first walk-through"): a_cluster_to_look_at,
    (OPERATIONS, "Sizing"): traces,
    (OPERATIONS, "Is the network as fast as it should be?"): two_nodes,
    (OPERATIONS, "Why was it a miss?"): a_prompt_that_is_half_there,
    (OPERATIONS, "Upgrading and going back"): a_node_to_upgrade,
    (OPERATIONS, "Scaling in"): a_node_with_an_engine,
    (OPERATIONS, "From another machine"): a_gateway_elsewhere,
}


# ---- the walk ------------------------------------------------------------------------------------

CHECKOUT = ("Makefile", "README.md", "bench", "engine_plugins", "kvpool", "storage", "tests")
MEMORY = {"KVPOOL_MEMORY": "32MiB"}  # the default is a share of this machine's


def reason(command: Command) -> str:
    """Why it is left out; or ""."""
    return next((why for begin, why in LEFT_OUT.items() if command.text.startswith(begin)), "")


@cache
def sections() -> dict[tuple[Path, str], list[Block]]:
    """Those that have commands."""
    found = {}
    for page in PAGES:
        for heading in re.findall(r"^## (.+)$", prose(page.read_text()), re.MULTILINE):
            there = section(page, heading)
            if any(block.language == "console" for block in there):
                found[page, heading] = there
    return found


def commands_of(where: tuple[Path, str]) -> list[Command]:
    """Of its console blocks."""
    consoles = [block for block in sections()[where] if block.language == "console"]
    return [command for block in consoles for command in commands(block)]


def bare(command: Command) -> str:
    """Without the comment behind it."""
    return re.sub(r"\s+# .*", "", command.text)


WALKS = [
    pytest.param(where, id=f"{where[0].stem.lower()}: {where[1]}")
    for where in sections()
    if not all(map(reason, commands_of(where)))
]


class Walk:
    """One that is under way."""

    def __init__(self, scene: Scene, says: tuple[Says, ...], hosts: Mapping[str, Host]) -> None:
        self.left = deque(says)
        self._scene = scene
        self._hosts = hosts

    def block(self, block: Block) -> None:
        host = self._hosts[block.said("on")]
        if block.language == "python":
            name = block.said("file") or "block.py"
            (host.folder / name).write_text(block.text)
            if not block.said("file"):
                host.run(f"python3 {name}")
        elif block.language == "console":
            for command in commands(block):
                self._command(host, command)

    def _command(self, host: Host, command: Command) -> None:
        text = bare(command)
        if text in self._scene.instead:
            self._scene.instead[text]()
        elif reason(command):
            assert not command.printed, f"{command.where}: what it prints is compared with nothing"
        elif ready := next((said for begin, said in SERVERS.items() if text.startswith(begin)), ""):
            says = self._says(text)
            service = host.start(command.text).wait_said(ready, PATIENCE_S)
            self._learn(host, service)
            service.wait_until(
                lambda: not wrong(Done(says.status, service.said, ""), says, command), PATIENCE_S
            )
        else:
            says = self._says(text)
            look = f"{text} ".startswith(LOOKS)
            seen: list[Done] = []

            def is_right() -> bool:
                turns = TURNS.get(text)
                seen.append(
                    host.converse(command.text, turns) if turns else host.type(command.text)
                )
                return not wrong(seen[-1], says, command)

            if not (is_right() or (look and poll(is_right))):
                raise AssertionError(f"{command.where}: {wrong(seen[-1], says, command)}")

    def _says(self, text: str) -> Says:
        """Of this command."""
        if self.left and self.left[0].command == text:
            return self.left.popleft()
        return Says(text, "")

    def _learn(self, host: Host, service: Service) -> None:
        for name, pattern in self._scene.learnt.items():
            found = re.search(pattern, service.said)
            assert found, service.said
            host.swaps[name] = found[1]


def poll(condition: Callable[[], bool]) -> bool:
    try:
        return until(condition)
    except AssertionError:
        return False


def wrong(done: Done, says: Says, command: Command) -> str:
    """What is not as the page has it; or ""."""
    if done.status != says.status:
        return f"ended with {done.status}, not {says.status}: {done.all}"
    for pattern in says.seen:
        if not re.search(pattern, done.out, re.MULTILINE):
            return f"{says.page_says!r}, but there is no {pattern!r} in: {done.out}"
    for pattern in says.unseen:
        if re.search(pattern, done.out, re.MULTILINE):
            return f"{says.page_says!r}, but there is {pattern!r} in: {done.out}"
    shown, printed = "\n".join(command.printed), done.out
    if shown and not same(shown, printed):
        return f"the page shows\n{normal(shown)}\nand not\n{normal(printed)}\nof\n{printed}"
    return ""


def normal(text: str) -> str:
    """As what it is compared, without empty lines."""
    for pattern, name in NORMAL:
        text = re.sub(pattern, name, text)
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def same(shown: str, printed: str) -> bool:
    """In shape. What is shown may leave something out: `...`."""
    parts = map(re.escape, normal(shown).split("..."))
    return bool(re.fullmatch(".*".join(parts), normal(printed)))


@needs_programs
@pytest.mark.parametrize("where", WALKS)
def test_a_section_works_as_it_is_written(
    where: tuple[Path, str], folder: Path, servers: Servers
) -> None:
    there = sections()[where]
    programs = make_programs(
        folder / "bin",
        {name: find_server(name) for name in ("etcd", "redis-server")} | {"ssh": SSH, "scp": SCP},
    )
    with SCENES.get(where, nothing_special)(folder, servers) as scene:
        hosts = {
            name: Host(
                folder / (name or "host"), programs, scene.swaps, {**MEMORY, **scene.environ}
            )
            for name in sorted({block.said("on") for block in there})
        }
        for host in hosts.values():
            for name in CHECKOUT:
                (host.folder / name).symlink_to(ROOT / name)
            (host.folder / ".venv").symlink_to(sys.prefix)
            for name, text in scene.files.items():
                (host.folder / name).write_text(text)
        with closing(*hosts.values()):
            walk = Walk(scene, SAYS.get(where, ()), hosts)
            for block in there:
                walk.block(block)
            scene.afterwards(hosts)
    assert not walk.left, "the page has no such command any more, or in another order"
    swapped = {name for host in hosts.values() for name in host.swapped}
    assert swapped == {*scene.swaps, *scene.learnt}


# ---- the tables are those of the pages -----------------------------------------------------------


def test_no_table_has_what_no_page_has() -> None:
    everything = [command for where in sections() for command in commands_of(where)]
    texts = [bare(command) for command in everything]
    for table in (LEFT_OUT, SERVERS, TURNS):
        stale = [begin for begin in table if not any(text.startswith(begin) for text in texts)]
        assert not stale
    stale = [verb for verb in LOOKS if not any(f"{text} ".startswith(verb) for text in texts)]
    assert not stale
    assert SCENES.keys() | SAYS.keys() <= sections().keys()
    for (page, _), says in SAYS.items():
        words = " ".join(page.read_text().split())
        assert [each.page_says for each in says if each.page_says not in words] == []


def test_what_is_said_to_be_run_elsewhere_is_there() -> None:
    named = [
        name for why in LEFT_OUT.values() for name in re.findall(r"(?:tests|bench)/[\w/]+\.py", why)
    ]
    assert named and all((ROOT / name).exists() for name in named)


def test_the_comparison_sees_what_differs() -> None:
    shown = "node  in memory\na  11\na: evicted, 34 s ago, 12 min 5 s after its last use, by 81c07d5e1f2a"
    assert same(
        shown,
        "node in memory\na 7\n\na: evicted, 2 s ago, 1 h after its last use, by 0123456789ab\n",
    )
    assert not same(shown, "node in memory\na 7\n")
    assert not same(shown, shown.replace("evicted", "removed"))
    assert same("drained: 10.0.0.7:8000; left: ...", "drained: 127.0.0.1:123; left: 3 blocks")
    assert not same("drained: 10.0.0.7:8000; left: ...", "drained: none; left: 3 blocks")
