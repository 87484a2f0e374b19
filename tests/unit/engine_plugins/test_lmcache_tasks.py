"""Tasks of LMCache's adapter: bounded, each with a result, whatever becomes of its work."""

import threading

import pytest

from kvpool.engine_plugins.lmcache.tasks import Tasks
from tests.support.waiting import PATIENCE_S, until


class Bell:
    """What all results of a test are told to."""

    def __init__(self):
        self.rung = 0

    def notify(self):
        self.rung += 1


@pytest.fixture
def bell():
    return Bell()


@pytest.fixture
def make(bell):
    made = []

    def tasks(threads=1, waiting_max=10, **settings):
        made.append(Tasks("test", threads, waiting_max, bell, **settings))
        return made[-1]

    yield tasks
    for each in made:
        each.close()


def result(tasks, number):
    return until(lambda: tasks.take(number), "a result")


def test_a_result_is_given_once_and_told(make, bell):
    tasks = make()
    number = tasks.submit(lambda: "done", "not done")
    assert result(tasks, number) == "done"
    assert tasks.take(number) is None
    assert bell.rung == 1


def test_all_results_are_given_by_the_numbers_of_their_tasks(make, bell):
    tasks = make(threads=3, waiting_max=20)
    numbers = [tasks.submit(lambda each=each: each, -1) for each in range(20)]
    until(lambda: bell.rung == 20)
    assert tasks.take_all() == {number: each for each, number in enumerate(numbers)}
    assert tasks.take_all() == {}


def test_what_finds_no_place_in_the_queue_ends_at_once(make):
    tasks, go = make(waiting_max=1), threading.Event()
    running = tasks.submit(lambda: go.wait(PATIENCE_S), False)
    until(lambda: len(tasks) == 0, "it runs")
    waiting, refused = tasks.submit(lambda: True, False), tasks.submit(lambda: True, False)
    tasks.submit_aside(lambda: pytest.fail("there was no place for it"))
    assert tasks.take(refused) is False
    assert tasks.take(running) is None
    assert tasks.refused == 2
    go.set()
    assert result(tasks, running) and result(tasks, waiting)


def test_work_whose_result_nobody_wants_leaves_none(make):
    tasks, done = make(), threading.Event()
    tasks.submit_aside(done.set)
    assert done.wait(PATIENCE_S)
    assert tasks.take_all() == {}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_mistake_ends_its_thread_and_leaves_nobody_waiting(make):
    tasks, go = make(threads=1), threading.Event()

    def wrong():
        go.wait(PATIENCE_S)
        raise AssertionError("a mistake")

    numbers = [tasks.submit(wrong, "failed"), tasks.submit(lambda: "done", "left")]
    assert tasks.alive
    go.set()
    assert [result(tasks, number) for number in numbers] == ["failed", "left"]
    until(lambda: not tasks.alive)
    assert result(tasks, tasks.submit(lambda: "done", "refused")) == "refused"


def test_results_that_nobody_fetches_are_bounded(make, bell):
    tasks = make(results_max=3)
    numbers = [tasks.submit(lambda each=each: each, None) for each in range(5)]
    until(lambda: bell.rung == 5)
    assert tasks.take_all() == {number: number for number in numbers[2:]}


def test_the_end_waits_for_work_in_progress_and_drops_the_rest(make, bell):
    tasks, ended = make(), []
    started, go = threading.Event(), threading.Event()

    def work():
        started.set()
        go.wait(PATIENCE_S)
        ended.append(tasks.closing)

    tasks.submit(work, None)
    tasks.submit(lambda: pytest.fail("it was not begun"), None)
    assert started.wait(PATIENCE_S)
    tasks.stop()
    assert not ended
    go.set()
    tasks.close()
    assert ended == [True]
    rung = bell.rung
    tasks.submit(lambda: pytest.fail("it has ended"), None)
    assert bell.rung == rung, "who was told is gone"
