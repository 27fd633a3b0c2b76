"""Which texts a step takes, and who gets its result or error, on a queue without a model."""

from __future__ import annotations

import pytest
import torch

from pace.llm.encoding.embedder import LOGITS, TextTokens
from pace.llm.encoding.text_queue import MAX_WAIT, Job, TextQueue

MEAN = ("mean",)


class Ran:
    """Computes the length and the first token of each text, and records the steps. Raises for a text that begins
    with -1."""

    def __init__(self) -> None:
        self.steps: list[tuple[object, list[int]]] = []

    def __call__(self, texts, what):
        self.steps.append((what, [len(text) for text in texts]))
        if any(text.tokens[0] == -1 for text in texts):
            raise RuntimeError("a wrong text")
        return torch.tensor([[float(len(text)), float(text.tokens[0])] for text in texts])


@pytest.fixture
def ran() -> Ran:
    return Ran()


@pytest.fixture
def queue(ran) -> TextQueue:
    return TextQueue(ran, max_tokens=100, max_texts=4)


def job(*lengths: int, what=MEAN, first: int = 7) -> Job:
    return Job([TextTokens((first, *[0] * (length - 1))) for length in lengths], what)


def finish(queue: TextQueue) -> None:
    while queue.step():
        pass


def test_the_shortest_come_first_and_a_long_one_is_alone(queue, ran):
    jobs = [job(90, 20, 250), job(30, 60, 5)]
    for each in jobs:
        queue.submit(each)
    assert queue.metrics().waiting_texts == 6 and queue.metrics().waiting_tokens == 455
    finish(queue)
    assert [lengths for _, lengths in ran.steps] == [[5, 20, 30], [60], [90], [250]]
    assert jobs[0].future.result().tolist() == [[90, 7], [20, 7], [250, 7]]
    assert jobs[1].future.result().tolist() == [[30, 7], [60, 7], [5, 7]]
    found = queue.metrics()
    assert (found.steps, found.texts, found.tokens, found.waiting_texts, found.waiting_tokens) == (4, 6, 455, 0, 0)


def test_a_step_has_a_maximum_of_texts(queue, ran):
    queue.submit(job(*[1] * 10))
    finish(queue)
    assert [len(lengths) for _, lengths in ran.steps] == [4, 4, 2]


def test_a_long_text_waits_for_a_bounded_number_of_steps(queue, ran):
    long = job(100)
    queue.submit(long)
    while not long.future.done():
        queue.submit(job(60, 60))
        assert queue.step() and len(ran.steps) <= MAX_WAIT + 1
    assert len(ran.steps) == MAX_WAIT + 1
    finish(queue)
    assert sum(sum(lengths) for _, lengths in ran.steps) == 100 + 120 * (MAX_WAIT + 1)


def test_results_of_different_kinds_are_in_steps_of_their_own(queue, ran):
    jobs = [job(10, 20), job(5, what=LOGITS), job(10, what=("max",)), job(1)]
    for each in jobs:
        queue.submit(each)
    finish(queue)
    assert ran.steps == [(MEAN, [1, 10, 20]), (LOGITS, [5]), (("max",), [10])]
    assert all(each.future.done() for each in jobs)


def test_a_cancelled_job_is_not_computed(queue, ran):
    first, second = job(50, 60), job(20, 70)
    queue.submit(first), queue.submit(second)
    assert queue.step() and ran.steps == [(MEAN, [20, 50])]
    assert first.future.cancel(), "also after one of its texts was computed"
    finish(queue)
    assert ran.steps[1:] == [(MEAN, [70])] and second.future.result().shape == (2, 2)
    found = queue.metrics()
    assert (found.waiting_texts, found.waiting_tokens) == (0, 0)


def test_an_error_fails_only_the_job_of_its_text(queue, ran):
    good, bad, other = job(5, 6), job(7, 50, first=-1), job(8)
    for each in (good, bad, other):
        queue.submit(each)
    assert queue.step() and len(queue.failures) == 1
    with pytest.raises(RuntimeError, match="a wrong text"):
        bad.future.result(0)
    assert good.future.result(0).tolist() == [[5, 7], [6, 7]] and other.future.result(0).tolist() == [[8, 7]]
    finish(queue)
    assert [50] not in [lengths for _, lengths in ran.steps], "the rest of a failed job is not computed"
    assert queue.metrics().failures == 2 and not queue.failures


def test_all_end_with_the_queue(queue):
    jobs = [job(5, 6), job(150)]
    for each in jobs:
        queue.submit(each)
    queue.step()
    queue.fail_all(ValueError("closed"))
    assert jobs[0].future.result(0).shape == (2, 2)
    with pytest.raises(ValueError, match="closed"):
        jobs[1].future.result(0)
    third = job(3)
    queue.submit(third)
    queue.abandon()
    assert third.future.cancelled() and not queue.step() and queue.metrics().waiting_texts == 0
