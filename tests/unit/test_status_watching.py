"""What `kvpool top`, `events`, `blocks`, `config check` and `explain` make of what they are told. No daemon."""

import io
import os
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpool.cli.asking import check_open, list_some
from kvpool.cli.naming import block_keys, size
from kvpool.cli.render.blocks import blocks_view, prefixes_view
from kvpool.cli.render.events import Feed, chosen, line
from kvpool.cli.render.explain import past_view, possible_view
from kvpool.cli.render.settings import HIDDEN, effective, plain, toml_text
from kvpool.cli.render.top import (
    Asked,
    Seen,
    asked_between,
    view,
)
from kvpool.config import load
from kvpool.errors import ClusterUnavailable, ConfigError, InvalidRequest, NotAuthenticated
from kvpool.router.client import RouterHttp
from kvpool.telemetry.node_stats import NodeStats
from kvpool.telemetry.rates import Counted, Fill, Rates, count, fills, rates
from kvpool.wire import operator as operator_wire
from kvpool.wire.answers import Block, Event, Events
from kvpool.wire.jobs import JobState, JobView
from tests.support.printed import printed
from tests.support.stats import node_stats

# ---- top -------------------------------------------------------------------------------------------


def tenant(put: int, read: int, here: int, missed: int) -> dict:
    reads = {"requests": 1, "local": here, "fetched": 1, "missed": missed}
    traffic = {"put_bytes": put, "read_bytes": read, "device_read_bytes": 5, "reads": reads}
    return {"traffic": traffic, "space": {"size": 4 << 20, "bytes_used": 1 << 20}}


def disk(segment_bytes: int) -> dict:
    return {"used_bytes": 1, "size_bytes": 8, "segment_bytes": segment_bytes}


def stats(**fields) -> NodeStats:
    sections = {
        "incarnation": "i",
        "leases": 3,
        "clients": 2,
        "tenants": {"red": tenant(100, 50, 7, 2), "blue": tenant(1, 1, 0, 0)},
        "counters": {"pulled_bytes": 9},
        "tiers": {"ssd": [disk(7), disk(0)], "device": []},
        "cluster": {"state": "serving", "standing": "member"},
    }
    return node_stats(**sections | fields)


def sums(put=0, read=0, pulled=0, had=0, missed=0, incarnation="i", **tenants) -> Counted:
    return Counted(incarnation, put, read, pulled, had, missed, tenants)


def test_all_tenants_are_summed():
    assert count(stats()) == sums(101, 61, 9, 9, 2, red=55, blue=6)
    assert fills(stats()) == {"dram": Fill(2 << 20, 8 << 20), "ssd": Fill(2, 15)}, (
        "as `status` says"
    )


@given(st.tuples(*[st.integers(0, 1 << 40)] * 5), st.integers(1, 60))
def test_rates_are_what_was_added_in_the_time(added, seconds):
    put, read, pulled, missed, got = added
    after = sums(1 + put, 2 + read, 3 + pulled, 4 + got, 4 + missed)
    found = rates(sums(1, 2, 3, 4, 4), after, seconds)
    assert found.put_bytes_s * seconds == pytest.approx(put, abs=3)
    assert found.pulled_bytes_s * seconds == pytest.approx(pulled, abs=3)
    hit = None if missed + got == 0 else got / (missed + got)
    assert found.hit_rate == (hit if hit is None else pytest.approx(hit, abs=1e-4))


def test_there_are_no_rates_of_a_node_that_was_started_anew():
    assert rates(sums(), sums(8, incarnation="j"), 1.0) == Rates()
    assert rates(sums(), sums(8), 0.0) == rates(None, sums(8), 1.0) == Rates()


def test_the_screen():
    job = {
        "job": "evict-1",
        "node": "b",
        "state": "running",
        "dry_run": False,
        "error": "",
        "by": "me",
    }
    job |= {"kind": "evict", "tenant": "red"}
    job |= dict.fromkeys(("seen", "total", "blocks", "nbytes", "kept", "age_s", "took_s"), 4)
    running = msgspec.convert(job, JobView)
    old = msgspec.structs.replace(running, state=JobState.DONE, job="old")
    seen = {
        "a": Seen(stats(), rates=Rates(2048.0, 0.0, 1.0, 0.5)),
        "b[x]": Seen(stats(), [running, old], error="silent since"),
        "c": Seen(error="no answer yet (serving)"),
    }
    watch = SimpleNamespace(seen=seen, cluster={"cluster": "prod"})
    text = printed([view(watch, hint="q ends")], width=140)
    lines = text.splitlines()
    assert lines[0] == "cluster prod, 3 nodes, 1 job running"
    (row,) = [each for each in lines if each.startswith("a ")]
    assert row.split() == [
        "a",
        "serving",
        *("25%", "2/8", "MiB", "13%", "2/15", "B"),
        "2",
        "KiB/s",
        "0",
        "B/s",
        "1",
        "B/s",
        "50%",
        "3",
        "2",
    ]
    (row,) = [each for each in lines if each.startswith("b[x] ")]
    assert row.split()[-2:] == ["silent", "since"] and "/s" not in row
    assert any(each.startswith("c ") and "no answer yet" in each for each in lines)
    assert any(each.startswith("evict-1 ") for each in lines)
    assert not any(each.startswith("old") for each in lines)
    assert lines[-1] == "q ends"
    watch.seen = {"a": Seen(stats(), rates=Rates(2048.0, 0.0, 1.0, 0.5))}
    text = printed([view(watch)])
    assert len(text.splitlines()) == 4, "a row is a line"
    busy = {"tiers": {"ssd": [disk(7), disk(0)], "device": [{"used_bytes": 5, "size_bytes": 8}]}}
    full = stats(**busy, leases=12345, clients=16)
    watch.seen = {"gpu-node-12": Seen(full, rates=Rates(1.2e9, 1.2e9, 1.2e9, 0.87))}
    text = printed([view(watch)])
    lines = text.splitlines()
    assert len(lines) == 4 and max(map(len, lines)) <= 80
    assert lines[-1].split()[:2] == ["gpu-node-12", "serving"] and "87%" in lines[-1]


def test_hits_by_namespace_are_those_of_all_nodes_since_the_last_look() -> None:
    mine, other, idle = ("default", "ab" * 16), ("t" * 40, "cd" * 16), ("default", "ef" * 16)
    before = {mine: Asked(10, 10), idle: Asked(7, 3)}
    after = {mine: Asked(30, 15), idle: Asked(7, 3), other: Asked(4, 4)}
    found = asked_between(before, after, 2.0)
    assert found == {mine: Asked(10.0, 2.5), other: Asked(2.0, 2.0)}
    assert asked_between(after, before, 2.0) == asked_between(before, after, 0.0) == {}
    seen = {
        "a": Seen(stats(), namespaces=found),
        "b": Seen(stats(), namespaces={mine: Asked(30.0, 27.5)}),
    }
    watch = SimpleNamespace(seen=seen, cluster={"cluster": "prod"})
    text = printed([view(watch)])
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split() for line in lines[-3:]] == [
        ["namespace", "tenant", "asked/s", "hits"],
        ["ab" * 6, "default", "40", "75%"],
        ["cd" * 6, "t" * 40, "2", "100%"],
    ]


# ---- events ----------------------------------------------------------------------------------------


class EventLog:
    """A node's events; at most `page` in an answer."""

    def __init__(self, page: int = 3) -> None:
        self.numbers: list[int] = []
        self.last = 0
        self.page = page

    def note(self, count: int = 1) -> None:
        self.numbers += range(self.last + 1, self.last + 1 + count)
        self.last += count

    def answer(self, node: str, m: operator_wire.Events) -> Events:
        found = [n for n in self.numbers if n > m.after][: self.page]
        return Events([Event(n, n, node, "k", {}) for n in found], 1, self.last)


class Cluster(dict):
    def ask_node(self, message, *, node="", tenant="", by="", wait_s=0.0):
        if isinstance(self[node], Exception):
            raise self[node]
        return self[node].answer(node, message)


def test_each_event_is_told_once_and_in_order():
    nodes = Cluster(a=EventLog(), b=EventLog())
    feed = Feed(nodes, ["a", "b"])
    nodes["a"].note(5)
    nodes["b"].note(2)
    found = [(e.node, e.number) for e in feed.news()]
    assert found == [("a", 1), ("b", 1), ("a", 2), ("b", 2), ("a", 3), ("a", 4), ("a", 5)]
    assert feed.news() == []
    nodes["b"].note()
    assert [(e.node, e.number) for e in feed.news()] == [("b", 3)]


def test_a_node_that_was_started_anew_is_followed_from_its_beginning():
    nodes = Cluster(a=EventLog())
    feed = Feed(nodes, ["a"])
    nodes["a"].note(5)
    feed.news()
    nodes["a"] = EventLog()
    nodes["a"].note(2)
    assert [e.number for e in feed.news()] == [1, 2]
    assert feed.news() == []


def test_nodes_that_do_not_answer_are_known_until_they_do():
    nodes = Cluster(a=ClusterUnavailable("away"), b=EventLog())
    feed = Feed(nodes, ["a", "b"])
    nodes["b"].note()
    assert len(feed.news()) == 1
    assert feed.silent == {"a": "away"}
    nodes["a"] = EventLog()
    feed.news()
    assert feed.silent == {}
    nodes["a"] = NotAuthenticated("operators only")
    with pytest.raises(NotAuthenticated):
        feed.news()


def test_an_event_is_a_line():
    details = {"by": "[red]", "keys": 3, "tier": "", "to": {"ttl_s": 1.0}}
    event = Event(1, 0.5, "a", "change", details)
    assert (
        line(event).plain == '1970-01-01T00:00:00Z  a  change  by=[red]  keys=3  to={"ttl_s": 1.0}'
    )
    events = [Event(1, 0.5, "a", kind, {}) for kind in "xyxyx"]
    assert [e.kind for e in chosen(events, ["x"], 2)] == ["x", "x"]
    assert [e.kind for e in chosen(events, [], 2)] == ["y", "x"]


# ---- blocks ----------------------------------------------------------------------------------------


def test_blocks_are_asked_for_in_pages():
    asked = []

    class Pages:
        def ask_node(self, message, *, node="", tenant="", by="", wait_s=0.0):
            asked.append((message.cursor, message.count))
            at = int(message.cursor or 0)
            blocks = list(range(at, at + min(message.count, 400)))
            return SimpleNamespace(
                blocks=blocks, cursor=str(at + len(blocks)) if at < 1200 else None
            )

    found, after = list_some(Pages(), "n", "dram", b"", "", 1000)
    assert (found, after) == (list(range(1000)), "1000")
    assert asked == [("", 1000), ("400", 600), ("800", 200)]
    found, after = list_some(Pages(), "n", "dram", b"", after, 1000)
    assert (found[0], after) == (1000, None)


def test_blocks_and_prefixes_as_tables():
    block = Block(
        node="a",
        tier="dram",
        key="ab" * 16,
        namespace="cd" * 16,
        parent="",
        depth=1200,
        parts=2,
        bytes=2048,
        pin="none",
        copy=True,
        reused=True,
        age_s=61.0,
    )
    text = printed(blocks_view([block], "0.7"), width=140)
    assert text.startswith(f"namespace {'cd' * 6} ")
    wide = msgspec.structs.replace(
        block, pin="soft", copy=False, age_s=86_400.0 + 3600 * 11, bytes=1000 << 10
    )
    narrow = printed(blocks_view([block, wide], None))
    assert "pin soft" in narrow and "1 d 11 h" in narrow
    assert text.splitlines()[2].split()[1:] == [
        "1,200",
        "2",
        "2",
        "KiB",
        "1",
        "min",
        "1",
        "s",
        "a",
        "copy,",
        "read",
        "again",
    ]
    assert text.splitlines()[-1] == "there is more: --cursor 0.7"
    assert printed(blocks_view([], None), width=140) == "no blocks here\n"
    text = printed(blocks_view([block], None, of_one=True))
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"{block.key} ") for line in lines), "to be copied"
    assert "cdcd" not in text
    text = printed(prefixes_view({"a": (0, 3), "b": (3, 3), "c": (9, 9)}, 9), width=140)
    assert [row.split()[0] for row in text.splitlines()[1:]] == ["c", "b", "a"]


def test_blocks_of_a_namespace_that_is_not_on_the_node():
    class Two:
        def ask_node(self, message, *, node="", tenant="", by="", wait_s=0.0):
            assert isinstance(message, operator_wire.Cluster)
            return {"node": "a", "nodes": [{"node": name, "state": "serving"} for name in "ab"]}

        def inspect(self, node=""):
            spaces = {"ab": {}} if node == "b" else {}
            return node_stats(node=node or "a", tenants={"red": {"namespaces": spaces}})

    check_open(Two(), "b", "red", "ab")
    with pytest.raises(InvalidRequest, match=r"node a has nothing of namespace ab; .*: b \("):
        check_open(Two(), "", "red", "ab")


# ---- what is typed ---------------------------------------------------------------------------------


def test_keys_from_a_file(tmp_path, monkeypatch):
    one, two = "01" * 16, "AB" * 16
    file = tmp_path / "keys"
    file.write_text(f"{two}\n\n  {one}\n{two.lower()}\n")
    assert block_keys([one], file) == [bytes.fromhex(one), bytes.fromhex(two)]
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{one}\n"))
    assert block_keys([], type(file)("-")) == [bytes.fromhex(one)]
    file.write_text("x\n")
    for path, hint in ((file, "line 1: 'x' is no block key"), (tmp_path, "Is a directory")):
        with pytest.raises(InvalidRequest, match=hint):
            block_keys([], path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidRequest, match="not text"):
        block_keys([], file)
    file.write_text("\n".join(f"{n:032x}" for n in range((1 << 16) + 1)))
    with pytest.raises(InvalidRequest, match="keys: at most 65,536"):
        block_keys([], file)
    file.write_text("\n" * ((1 << 16) * 64 + 1))
    with pytest.raises(InvalidRequest, match="too long: at most 65,536"):
        block_keys([], file)


def test_sizes():
    assert (size("10GiB"), size("5")) == (10 << 30, 5)
    for text in ("25%", "0", "many", ""):
        with pytest.raises(InvalidRequest, match="10GiB"):
            size(text)


# ---- settings --------------------------------------------------------------------------------------


def test_where_each_setting_comes_from(tmp_path):
    file = tmp_path / "kvpool.toml"
    file.write_text(
        'memory = "1GiB"\ntransfer_workers = 3\nlabels = { zone = "z" }\n'
        '[tenants.red]\ntoken = "a long secret of red"\nmemory = "25%"\n'
    )
    file.chmod(0o600)
    secret = tmp_path / "secret"
    secret.write_text("s" * 32)
    environ = {
        "KVPOOL_TRANSFER_WORKERS": "2",
        "KVPOOL_CLUSTER_SECRET_FILE": str(secret),
        "KVPOOL_JOIN_PASSWORD_FILE": str(secret),
        "KVPOOL_DIRECTORY": "redis://:hush@r",
        "KVPOOL_PLAINTEXT_PASSWORDS": "true",
        "KVPOOL_SOCKET": "/s",
    }
    found = plain(effective(str(file), environ))
    assert found["memory"] == {"value": 1 << 30, "source": str(file)}
    assert found["transfer_workers"] == {"value": 2, "source": "KVPOOL_TRANSFER_WORKERS"}
    assert found["labels"] == {"value": {"zone": "z"}, "source": str(file)}
    assert found["cluster_secret_file"] == {
        "value": str(secret),
        "source": "KVPOOL_CLUSTER_SECRET_FILE",
    }
    assert found["join_password"] == {"value": HIDDEN, "source": "KVPOOL_JOIN_PASSWORD_FILE"}
    assert found["directory"] == {"value": HIDDEN, "source": "KVPOOL_DIRECTORY"}
    assert found["operator_token"]["source"] == "default"
    assert found["tenants"]["source"] == str(file)
    text = str(found) + toml_text(effective(str(file), environ))
    for hidden in ("hush", "secret of red", "ssss"):
        assert hidden not in text
    assert plain(effective(None, {"KVPOOL_CONFIG": str(file)}))["transfer_workers"]["value"] == 3


def test_what_is_shown_of_a_configuration_sets_the_same(tmp_path):
    file = tmp_path / "kvpool.toml"
    file.write_text(
        'memory = "12.5%"\nsocket_mode = 0o660\nlabels = { zone = "z", "rack" = "7" }\nreplicas_max = 2\n'
        'ssd = ["/tmp/a long name of a folder for blocks=8MiB", "/tmp/another quite long name=3000000KiB"]\n'
        'listen = ["tcp://127.0.0.1:0", "tcp://127.0.0.1:1"]\nrails = ["a", "-"]\nforward = false\n'
        'device = "cpu=4MiB"\nlease_s_max = 0.1\nnode = "b"\nsocket = "/s"\nhttp_tokens = ""\n'
        '[tenants.red]\nmemory = 4097\nssd = "30%"\n[tenants.blue]\nmemory = "25%"\nannounce = true\n'
        '[publish_events.one]\nmodel = "m \\"q\\""\nendpoint = "ipc:///tmp/e"\n'
    )
    before = load(file=str(file), environ={})
    shown = toml_text(effective(str(file), {}))
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert load(file=str(again), environ={}) == before
    named = str(tmp_path)
    assert max(len(line) for line in shown.splitlines() if named not in line) <= 80


@pytest.mark.parametrize("variable", ["KVPOOL_MEMROY", "KVPOOL_LISTN", "KVPOOL_NODES"])
def test_a_mistyped_variable_is_no_silence(variable):
    with pytest.raises(ConfigError, match=rf"{variable}: no such setting\. Did you mean KVPOOL_"):
        effective(None, {variable: "1"})


def test_variables_of_others_are_left_alone():
    others = ("KVPOOL_PORT_7071_TCP", "KVPOOL_SERVICE_HOST", "KVPOOL_TENANT", "KVPOOL_ROUTER", "X")
    assert effective(None, dict.fromkeys(others, "1"))


def test_what_is_wrong_in_a_configuration_is_named(tmp_path):
    file = tmp_path / "kvpool.toml"
    file.write_text('memroy = "1GiB"')
    with pytest.raises(ConfigError, match=r"memroy: no such setting\. Did you mean memory\?"):
        effective(str(file), {})
    with pytest.raises(ConfigError, match="cannot read"):
        effective(str(tmp_path / "none"), os.environ)


# ---- explain ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["", "localhost:8080", "file:///etc/passwd", "ftp://h", "http://"])
def test_only_http_is_asked(url):
    with pytest.raises(InvalidRequest, match="give a router's URL"):
        RouterHttp(url)


OUTLOOK = {
    "engine": "e[1]",
    "cached_blocks": 3,
    "loaded_blocks": 0,
    "pulled_blocks": 0,
    "source": None,
    "waits_for_blocks": False,
    "load_s": 0.0,
    "starts_s": 0.5,
    "prefill_s": 0.25,
    "ttft_s": None,
    "cost": 1.0,
}


def test_where_a_prompt_would_go():
    told = {"prompt_tokens": 1000, "prompt_blocks": 62, "output_tokens": 5, "engine": "e[1]"}
    told |= {"expected": OUTLOOK, "candidates": [OUTLOOK], "decode_candidates": []}
    lines = printed(possible_view(told), width=140).splitlines()
    assert lines[0] == "1,000 tokens of prompt, 62 blocks: would go to e[1]"
    assert lines[3].split() == ["*", "e[1]", "3", "0", "0", "0.500", "s", "0.250", "s", "1.000"]
    why = {"code": "slo", "reason": "too [late]", "retry_after_s": 1.0}
    refused = {"prompt_tokens": 1, "prompt_blocks": 0, "output_tokens": 5, "rejected": why}
    assert "would be refused, slo: too [late]" in printed(possible_view(refused), width=140)


def test_what_became_of_a_request():
    steps = [
        {"at_s": 0.001, "what": "order", "engine": "e[1]", "candidates": [OUTLOOK]},
        {"at_s": 1.5, "what": "answered", "tokens": 2},
    ]
    told = {"request": "r", "model": "m[x]", "tenant": "t", "outcome": "answered", "steps": steps}
    text = printed(past_view(told), width=140)
    assert text.startswith("request r: answered\nmodel=m[x], tenant=t\n")
    assert "* e[1]" in text
    assert "    1.500 s  answered  tokens=2" in text
