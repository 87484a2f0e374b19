"""Jobs on several nodes as an operator follows them, and what is printed of them. No daemon."""

from typing import Any

import msgspec
import pytest

from kvpool.cli.asking import holders, nodes_of
from kvpool.cli.jobs import PATIENCE_S, Job, complaints, follow, jobs_on
from kvpool.cli.render.jobs import job_view, jobs_view, summary
from kvpool.errors import ClusterUnavailable, InvalidRequest
from kvpool.wire import operator as operator_wire
from kvpool.wire.jobs import JobState, JobView, job_name
from tests.support.printed import printed
from tests.support.stats import node_stats


def view(node: str, state: str = "running", kind: str = "evict", **fields) -> JobView:
    plain: dict[str, Any] = dict.fromkeys(("seen", "total", "blocks", "nbytes", "kept"), 0)
    plain |= {"age_s": 1.0, "took_s": 1.0, "error": "", "dry_run": False, "tenant": "red"}
    told = {"job": "j", "node": node, "kind": kind, "state": state, "by": "uid 0"}
    return msgspec.convert(told | plain | fields, JobView)


class Nodes:
    """Nodes that answer with the next of what is scripted for them; an exception is raised."""

    def __init__(self, **script: list) -> None:
        self.script = script
        self.stopped: list[str] = []

    def ask_node(self, message, *, node="", tenant="", by="", wait_s=0.0):
        if isinstance(message, operator_wire.StopJob):
            self.stopped.append(node)
            return 1
        answer = self.inspect(node)
        return (
            [answer]
            if isinstance(message, operator_wire.Jobs) and isinstance(answer, JobView)
            else answer
        )

    def inspect(self, node=""):
        answers = self.script[node]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def job_on(nodes: Nodes, *names: str, clock=lambda: 0.0) -> Job:
    job = Job(nodes, "j", clock=clock)
    job.begin(names, {"kind": "evict"})
    return job


AWAY = ClusterUnavailable("it does not answer")


def test_a_job_is_followed_until_it_runs_nowhere():
    nodes = Nodes(
        a=[view("a"), view("a", seen=5), view("a", "done", blocks=7, nbytes=1 << 20)],
        b=[view("b"), view("b", "done", blocks=3, kept=1)],
    )
    job = job_on(nodes, "a", "b")
    seen = []
    follow(job, lambda job: seen.append(job.running), sleep=lambda seconds: None)
    assert seen == [["a", "b"], ["a"], []]
    assert job.good
    assert summary(job) == "10 blocks evicted, 1 MiB; 1 block stays, pinned"
    assert complaints(job) == {}
    text = printed(job_view(job), width=140)
    assert text.splitlines()[-1] == summary(job)
    assert [line.split()[1] for line in text.splitlines()[1:3]] == ["a", "b"]


def test_it_goes_on_where_it_can_begin():
    job = job_on(Nodes(a=[view("a", "done")], b=[AWAY]), "a", "b")
    assert (job.good, complaints(job)) == (False, {"b": "it does not answer"})


def test_where_it_can_begin_nowhere_the_first_reason_is_raised():
    nodes = Nodes(a=[InvalidRequest("no job")], b=[AWAY])
    with pytest.raises(InvalidRequest, match="no job"):
        job_on(nodes, "a", "b")


def test_a_node_may_fail_to_answer_for_a_while():
    now = [0.0]
    nodes = Nodes(a=[view("a"), AWAY, AWAY, view("a", "done")])
    job = job_on(nodes, "a", clock=lambda: now[0])
    for at in (1.0, PATIENCE_S - 1):
        now[0] = at
        job.look()
        assert job.running == ["a"]
    job.look()
    assert job.good


def test_a_node_that_fell_silent_is_given_up():
    now = [0.0]
    job = job_on(Nodes(a=[view("a"), AWAY]), "a", clock=lambda: now[0])
    now[0] = PATIENCE_S
    job.look()
    assert (job.running, job.good) == ([], False)
    assert job.views["a"].state is JobState.SILENT
    assert complaints(job) == {"a": "it does not answer"}


def test_a_node_that_was_started_anew_knows_nothing_of_it():
    job = job_on(Nodes(a=[view("a"), []]), "a")
    job.look()
    assert (job.good, complaints(job)) == (
        False,
        {"a": "node a knows nothing of it: it was started anew"},
    )


def test_it_is_stopped_where_it_runs():
    nodes = Nodes(a=[view("a", "done")], b=[view("b")])
    job = job_on(nodes, "a", "b")
    assert job.stop() == nodes.stopped == ["b"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"blocks": 1}, "1 block evicted"),
        ({"blocks": 2, "dry_run": True, "nbytes": 2048}, "2 blocks would be evicted, 2 KiB"),
        ({"kind": "warm", "blocks": 2}, "2 blocks brought"),
        ({"kind": "scrub", "seen": 1200, "blocks": 3}, "1,200 blocks seen, 3 bad and dropped"),
        ({"state": "cancelled"}, "0 blocks evicted; it was stopped before its end"),
        ({"kept": 2}, "0 blocks evicted; 2 blocks stay, pinned"),
    ],
)
def test_what_came_of_it_in_a_line(fields, text):
    job = job_on(Nodes(a=[view("a", **{"state": "done"} | fields)]), "a")
    assert summary(job) == text


def test_a_table_of_jobs():
    failed = view("b", "failed", error="etcd [away]", total=10, seen=4, by="[red]x")
    text = printed(jobs_view([view("a", dry_run=True), failed]), width=140)
    assert "running, dry run" in text
    assert "4 of 10" in text
    assert "[red]x" in text
    assert text.splitlines()[-1] == "j on b: etcd [away]"
    name = job_name("evict", 1)
    told = view(
        "gpu-host-17",
        "done",
        nbytes=1 << 29,
        job=name,
        dry_run=True,
        total=9,
        seen=9,
        by="token local on host-7",
    )
    text = printed(jobs_view([told]))
    assert name in text, "`jobs show` takes the whole name"
    assert "done, dry run" in text
    assert printed(jobs_view([]), width=140) == "no node remembers a job\n"


def test_jobs_of_several_nodes_the_youngest_first():
    nodes = Nodes(a=[[view("a", age_s=9.0)]], b=[[view("b", age_s=2.0)]], c=[AWAY])
    views, silent = jobs_on(nodes, ["a", "b", "c"])
    assert [each.node for each in views] == ["b", "a"]
    assert silent == {"c": "it does not answer"}


def test_only_nodes_that_have_something_of_it_are_asked():
    have = node_stats(tenants={"red": {"namespaces": {"ab": {}}}})
    lack = node_stats(tenants={"red": {}})
    nodes = Nodes(a=[have], b=[lack], c=[node_stats()], d=[AWAY])
    assert holders(nodes, "abcd", "red", "ab") == (["a"], {"d": "it does not answer"})
    assert holders(nodes, "abc", "red", "") == (["a", "b"], {})
    with pytest.raises(InvalidRequest, match="namespace ff open"):
        holders(nodes, "ab", "red", "ff")


def test_the_node_that_is_asked_is_named_first():
    record = {"state": "serving"}
    nodes = [{"node": n} | record for n in "cab"] + [{"node": "d", "state": "gone"}]
    assert nodes_of({"node": "b", "nodes": nodes}) == ["b", "a", "c"]
    assert nodes_of({"node": "x", "nodes": []}) == ["x"], "even if it is no member"


def test_names_are_good_for_the_wire():
    assert job_name("evict", 10) == "evict-0000000a"
