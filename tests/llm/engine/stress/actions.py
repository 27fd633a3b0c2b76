"""Actions of threads on an engine under stress."""

from __future__ import annotations

import contextlib
import gc
import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import torch

from pace.llm.clients.scoring import score
from pace.llm.clients.session import Session
from pace.llm.clients.streamer import CallbackStreamer
from pace.llm.engine.engine import Engine
from tests.llm.engine.stress.world import BEAMS, CONFIGS, LONGEST_OUTPUT, LONGEST_PROMPT, World, beam_rows, with_length


def draw(world: World, chance: random.Random, one_row: bool = False) -> tuple[int, int, int]:
    """Returns the index of a prompt, the index of a config, and a number of tokens to generate."""
    configs = [
        index
        for index, config in enumerate(CONFIGS)
        if not one_row or config.num_return_sequences == config.num_beams == 1
    ]
    return chance.randrange(len(world.prompts)), chance.choice(configs), chance.choice([1, 2, 9, LONGEST_OUTPUT])


def generate(world: World, chance: random.Random) -> None:
    """Generates for a batch of 1 to 12 prompts."""
    _, config, num_tokens = draw(world, chance)
    prompts = [chance.randrange(len(world.prompts)) for _ in range(chance.choice([1, 2, 5, 12]))]
    out = world.generator.generate(
        [world.prompts[index] for index in prompts], with_length(CONFIGS[config], num_tokens)
    )
    world.check_output(out, prompts, config, num_tokens)


def generate_and_cancel(world: World, chance: random.Random) -> None:
    """Lets the streamer end some rows, and later the cancel event end all of them."""
    _, config, num_tokens = draw(world, chance)
    prompts = [chance.randrange(len(world.prompts)) for _ in range(chance.randint(1, 4))]
    cancel, count, last = threading.Event(), Counter(), chance.randint(1, 60)
    rows: dict[int, list[int | None]] = {}

    def take(event) -> bool | None:
        rows.setdefault(event.row, []).append(event.token)
        count[event.row] += 1
        if count.total() >= last:
            cancel.set()
        return count[event.row] < 7 if event.row % 3 == 1 else None

    out = world.generator.generate(
        [world.prompts[index] for index in prompts],
        with_length(CONFIGS[config], num_tokens),
        CallbackStreamer(take),
        cancel,
    )
    world.check_output(out, prompts, config, num_tokens)
    assert all(rows[row] == [*tokens, None] for row, tokens in enumerate(out.generated_token_ids))


def search(world: World, chance: random.Random) -> None:
    """Runs beam searches and cancels some of them midway."""
    config = chance.randrange(len(BEAMS))
    prompts = [chance.randrange(len(world.prompts)) for _ in range(chance.randint(1, 3))]
    cancel = threading.Event()
    timer = threading.Timer(chance.random() * 0.2, cancel.set)
    if chance.random() < 0.3:
        timer.start()
    out = world.generator.generate([world.prompts[index] for index in prompts], BEAMS[config], cancel=cancel)
    timer.cancel()
    expected = [row for prompt in prompts for row in world.expected_beams(prompt, config)]
    for row, alone in zip(beam_rows(out), expected, strict=True):
        assert row == alone or row[1] == "cancelled" and cancel.is_set(), (
            f"beams {config} of {prompts}: {row}, alone {alone}"
        )


def add_and_wait(world: World, chance: random.Random) -> None:
    prompt, config, num_tokens = draw(world, chance, one_row=True)
    request = world.generator.add_request(
        world.prompts[prompt], with_length(CONFIGS[config], num_tokens), chance.randint(-2, 2)
    )
    world.check_output(request.result(), [prompt], config, num_tokens)


def add_several_and_cancel_some(world: World, chance: random.Random) -> None:
    drawn = [draw(world, chance, one_row=True) for _ in range(chance.randint(2, 6))]
    requests = [
        world.generator.add_request(world.prompts[prompt], with_length(CONFIGS[config], n), chance.randint(-1, 1))
        for prompt, config, n in drawn
    ]
    time.sleep(chance.choice([0.0, 0.001, 0.01]))
    for request in chance.sample(requests, len(requests) // 2):
        request.cancel()
    for request, (prompt, config, num_tokens) in zip(requests, drawn):
        if request.finish_reason == "cancelled":
            world.check_row(request.tokens, "cancelled", prompt, config)
        else:
            world.check_output(request.result(), [prompt], config, num_tokens)


def add_and_drop(world: World, chance: random.Random) -> None:
    """Drops the last reference to a request, sometimes in a cycle that only the garbage collector frees."""
    prompt, config, num_tokens = draw(world, chance, one_row=True)
    request = world.generator.add_request(world.prompts[prompt], with_length(CONFIGS[config], num_tokens))
    time.sleep(chance.choice([0.0, 0.001, 0.01]))
    if chance.random() < 0.5:
        cycle = [request]
        cycle.append(cycle)
    del request


def stream(world: World, chance: random.Random) -> None:
    """Reads a stream to its end, or leaves it before."""
    prompt, config, num_tokens = draw(world, chance, one_row=True)
    pieces = world.generator.stream(world.prompts[prompt], with_length(CONFIGS[config], num_tokens))
    if chance.random() < 0.5:
        text = world.alone.tokenizer and "".join(pieces)
        whole = world.expected(prompt, config)
        if len(whole.generated_token_ids[0]) <= num_tokens:
            assert text == whole.texts[0]
        return
    for _, _ in zip(range(chance.randint(0, 6)), pieces):
        pass
    if chance.random() < 0.5:
        pieces.close()


def session(world: World, chance: random.Random) -> None:
    """Appends to, truncates and forks sessions, with requests in between. The engine may drop the cache of an idle
    session at any time."""
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(Session(world.generator.driver))]
        for _ in range(chance.randint(2, 8)):
            one = chance.choice(sessions)
            what = chance.random()
            if what < 0.6 or not one.tokens:
                length, prompt = len(one), chance.choice(world.prompts)
                new = prompt[: chance.choice([1, 5, 30])] if length else prompt
                if length + len(new) > LONGEST_PROMPT + LONGEST_OUTPUT:
                    one.truncate(0)
                    length = 0
                num_rows = chance.randint(1, min(3, len(new)))
                rows = one.append(new, num_rows)
                for row in range(num_rows):
                    assert torch.equal(rows[row], world.expected_logits(one.tokens[: len(one) - num_rows + row + 1])), (
                        "logits of a session"
                    )
            elif what < 0.8:
                one.truncate(chance.randint(0, len(one)))
            elif len(sessions) < 4:
                sessions.append(stack.enter_context(one.fork()))
            if chance.random() < 0.3:
                add_and_wait(world, chance)


def score_texts(world: World, chance: random.Random) -> None:
    prompt = chance.randrange(len(world.prompts))
    tokens = world.prompts[prompt] + world.expected(prompt, 0).generated_token_ids[0]
    assert torch.equal(score(world.generator.driver, [tokens])[0], score_alone(world, tuple(tokens)))


def score_alone(world: World, tokens: tuple[int, ...]) -> torch.Tensor:
    with world._lock:
        return score(world.alone.driver, [list(tokens)])[0]


def preempt(world: World, chance: random.Random) -> None:
    """Sends a random running sequence back to the queue, with or without its blocks."""

    def give_way(engine: Engine) -> None:
        scheduler = engine.scheduler
        if scheduler.running:
            sequence = chance.choice(list(scheduler.running))
            scheduler._preempt(sequence)
            if chance.random() < 0.5:
                scheduler.cache.free(sequence)

    world.generator.driver.call(give_way).result(60)


def fail_a_step(world: World, chance: random.Random) -> None:
    world.fail_next = True
    generate(world, chance)


def collect(world: World, chance: random.Random) -> None:
    gc.collect()


ACTIONS: dict[Callable[[World, random.Random], None], int] = {
    generate: 10, generate_and_cancel: 10, search: 8, add_and_wait: 10, add_several_and_cancel_some: 10,
    add_and_drop: 4, stream: 6, session: 8, score_texts: 3, preempt: 12, fail_a_step: 1, collect: 1,
}  # fmt: skip
"""The actions of threads, with their weights."""
