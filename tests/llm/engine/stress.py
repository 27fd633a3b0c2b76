"""Random stress: several threads do random things to one engine with a small pool, and every token is checked.

    python -m tests.llm.engine.stress --seconds 600 [--world fake] [--seed 1]

What a request gives is compared with what it gives alone, in an engine of its own with a pool that holds everything; a
session's logits with those of its tokens in one piece. At the end nothing may be left in the engine: no sequence, no
block.

To stress something new, add a line to a table: `WORLDS` (how the engine is made), `CONFIGS` (what is asked of it) or
`ACTIONS` (what threads do).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import random
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pace.llm.clients.scoring import score
from pace.llm.clients.session import Session
from pace.llm.clients.streamer import CallbackStreamer
from pace.llm.configs import SamplingConfig
from pace.llm.decoding.logits import LogitsProcessor
from pace.llm.decoding.sampler import Greedy, Sampling
from pace.llm.engine.drafter import Drafter, NoDraft
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.outputs import GenerateOutput
from pace.llm.speculation.draft_length import FixedLength
from pace.llm.speculation.drafter import SpeculativeDrafter
from pace.llm.speculation.prompt_lookup import PromptLookup
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer, greedy
from tests.llm.generators import check_idle
from tests.llm.speculation.drafters import make_source

NUM_THREADS = 6
LONGEST_PROMPT, LONGEST_OUTPUT = 70, 40
VOCAB = 50
"""Prompts hold tokens below."""
PATIENCE = 120.0
"""Seconds after the end for what is under way."""


class Planted(Exception):
    """What the stress raises within steps: whoever's work it was gets it, and everything else must go on."""


class Parity(LogitsProcessor):
    """A processor with a state that must be followed exactly: the parity of the sum of all tokens."""

    def __init__(self) -> None:
        self.odd = 0

    def accept(self, token: int) -> None:
        self.odd ^= token & 1

    def rollback(self, num_tokens: int) -> None:
        for token in self.seen[-num_tokens:]:
            self.odd ^= token & 1

    def apply(self, logits: torch.Tensor) -> None:
        logits[self.odd :: 2] += 1.5


CONFIGS: list[SamplingConfig] = [
    SamplingConfig(),
    SamplingConfig(ignore_eos=True),
    SamplingConfig(repetition_penalty=1.2, no_repeat_ngram_size=3, logprobs=2),
    SamplingConfig(do_sample=True, seed=5, temperature=1.3, top_k=0, prompt_logprobs=1),
    SamplingConfig(do_sample=True, seed=6, top_p=0.9, frequency_penalty=0.5, logits_processors=[Parity()]),
    SamplingConfig(do_sample=True, seed=7, num_return_sequences=3, prompt_logprobs=True),
    SamplingConfig(do_sample=True, seed=8, num_return_sequences=5, ignore_eos=True),
    SamplingConfig(
        stop_strings=["ab", "q"], logits_processors=[lambda ids, logits: logits - (ids.shape[1] % 2) * logits[:, :1]]
    ),
]

BEAMS: list[SamplingConfig] = [
    SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=12, logprobs=1),
    SamplingConfig(
        num_beams=4,
        num_return_sequences=2,
        max_new_tokens=25,
        early_stopping=True,
        length_penalty=0.0,
        stop_strings=["ab", "q"],
    ),
    SamplingConfig(
        num_beams=2,
        max_new_tokens=16,
        do_sample=True,
        seed=3,
        temperature=1.5,
        repetition_penalty=1.2,
        logits_processors=[Parity()],
    ),
]


@dataclass
class World:
    """An engine under stress, and one like it where each request is alone."""

    generator: Generator
    alone: Generator
    deadline: float
    num_done: Counter[str] = field(default_factory=Counter)
    """Of each action."""
    happened: Counter[str] = field(default_factory=Counter)
    """Counts of the metrics of all outputs."""
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    fail_next: bool = False
    """Has a step fail; never two in a row, of which the third would end the engine."""

    def __post_init__(self) -> None:
        chance = random.Random(0)
        stems = [[chance.randrange(1, VOCAB) for _ in range(48)] for _ in range(3)]
        self.prompts = [chance.choice(stems)[: chance.choice([0, 16, 31, 48])] for _ in range(40)]
        self.prompts = [
            stem + [chance.randrange(1, VOCAB) for _ in range(chance.randint(1, LONGEST_PROMPT - len(stem)))]
            for stem in self.prompts
        ]
        self._known: dict[tuple[int, int], GenerateOutput] = {}
        self._known_beams: dict[tuple[int, int], list[tuple]] = {}
        self._known_logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._lock = threading.Lock()
        build = self.engine.batches.build

        has_failed = False

        def build_or_fail(*arguments):
            nonlocal has_failed
            has_failed, self.fail_next = self.fail_next and not has_failed, False
            if has_failed:
                raise Planted
            return build(*arguments)

        self.engine.batches.build = build_or_fail

    @property
    def engine(self) -> Engine:
        return self.generator.engine

    def expected(self, prompt: int, config: int) -> GenerateOutput:
        """What prompt and config of these indices give alone."""
        with self._lock:
            if (prompt, config) not in self._known:
                self._known[prompt, config] = self.alone.generate(
                    self.prompts[prompt], with_length(CONFIGS[config], LONGEST_OUTPUT)
                )
            return self._known[prompt, config]

    def expected_beams(self, prompt: int, config: int) -> list[tuple]:
        """The rows that a search gives alone."""
        with self._lock:
            if (prompt, config) not in self._known_beams:
                self._known_beams[prompt, config] = beam_rows(self.alone.generate(self.prompts[prompt], BEAMS[config]))
            return self._known_beams[prompt, config]

    def expected_logits(self, tokens: list[int]) -> torch.Tensor:
        """`[V]`: what follows these tokens."""
        with self._lock:
            if tuple(tokens) not in self._known_logits:
                with Session(self.alone.driver) as session:
                    self._known_logits[tuple(tokens)] = session.append(tokens)[0]
            return self._known_logits[tuple(tokens)]

    def check_row(
        self, tokens: list[int], reason: str, prompt: int, config: int, row: int = 0, num_tokens: int = LONGEST_OUTPUT
    ) -> None:
        """A row that was to have at most `num_tokens`, or had fewer because it was cancelled."""
        whole = self.expected(prompt, config)
        expected, ending = whole.generated_token_ids[row][:num_tokens], whole.finish_reasons[row]
        if len(whole.generated_token_ids[row]) > num_tokens:
            ending = "length"
        if reason == "cancelled":
            expected, ending = expected[: len(tokens)], reason
        assert (tokens, reason) == (expected, ending), (
            f"prompt {prompt}, config {config}, row {row}, {num_tokens} tokens: {tokens} {reason}, alone {expected} {ending}"
        )
        with self._lock:
            self.num_tokens += len(tokens)

    def check_output(self, out: GenerateOutput, prompts: list[int], config: int, num_tokens: int) -> None:
        with self._lock:
            self.happened.update(
                {
                    name: getattr(out.metrics, name)
                    for name in ("num_preemptions", "num_accepted_tokens", "num_reused_tokens")
                }
            )
        samples = CONFIGS[config].num_return_sequences
        for row, (tokens, reason) in enumerate(zip(out.generated_token_ids, out.finish_reasons)):
            prompt = prompts[row // samples]
            whole = self.expected(prompt, config)
            self.check_row(tokens, reason, prompt, config, row % samples, num_tokens)
            if out.logprobs is not None:
                assert out.logprobs[row] == whole.logprobs[row % samples][: len(tokens)]
            if out.prompt_logprobs is not None and tokens:
                assert out.prompt_logprobs[row] == whole.prompt_logprobs[row % samples]


def with_length(config: SamplingConfig, num_tokens: int) -> SamplingConfig:
    config = config.copy()
    config.max_new_tokens = num_tokens
    return config


def beam_rows(out: GenerateOutput) -> list[tuple]:
    return list(zip(out.generated_token_ids, out.finish_reasons, out.sequence_scores, out.logprobs or out.texts))


# -- what threads do
# -----------------------------------------------------------------------------------------------------


def draw(world: World, chance: random.Random, one_row: bool = False) -> tuple[int, int, int]:
    """A prompt, a config, and how many tokens to ask for."""
    configs = [
        index
        for index, config in enumerate(CONFIGS)
        if not one_row or config.num_return_sequences == config.num_beams == 1
    ]
    return chance.randrange(len(world.prompts)), chance.choice(configs), chance.choice([1, 2, 9, LONGEST_OUTPUT])


def generate(world: World, chance: random.Random) -> None:
    """A batch of any size."""
    _, config, num_tokens = draw(world, chance)
    prompts = [chance.randrange(len(world.prompts)) for _ in range(chance.choice([1, 2, 5, 12]))]
    out = world.generator.generate(
        [world.prompts[index] for index in prompts], with_length(CONFIGS[config], num_tokens)
    )
    world.check_output(out, prompts, config, num_tokens)


def generate_and_cancel(world: World, chance: random.Random) -> None:
    """Some rows end by their streamer, then all by the event."""
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
    """Beams, some of them cancelled on their way."""
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
    """Requests that go with the last reference to them, some in a cycle that the collector finds."""
    prompt, config, num_tokens = draw(world, chance, one_row=True)
    request = world.generator.add_request(world.prompts[prompt], with_length(CONFIGS[config], num_tokens))
    time.sleep(chance.choice([0.0, 0.001, 0.01]))
    if chance.random() < 0.5:
        cycle = [request]
        cycle.append(cycle)
    del request


def stream(world: World, chance: random.Random) -> None:
    """To its end, or left before it."""
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
    """Append, truncate and fork, with other things going on between; the caches of idle ones may be dropped at any
    time."""
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
    """Sends any running sequence back to the queue, with its blocks or without."""

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
    generate: 10,
    generate_and_cancel: 10,
    search: 8,
    add_and_wait: 10,
    add_several_and_cancel_some: 10,
    add_and_drop: 4,
    stream: 6,
    session: 8,
    score_texts: 3,
    preempt: 12,
    fail_a_step: 1,
    collect: 1,
}
"""What a thread does next, by weight."""


# -- the engines
# -----------------------------------------------------------------------------------------------------------


class TrueDrafts(NoDraft):
    """Proposes the greedy continuation, with a wrong token at random places."""

    def __init__(self, model: FakeModel) -> None:
        self.model, self.chance = model, random.Random(1)

    def extend(self, spans, cache) -> None:
        for span in spans:
            sequence = span.sequence
            room = min(self.chance.randint(0, 4), sequence.max_length - len(sequence.tokens) - 1)
            if (
                isinstance(sequence.strategy, (Greedy, Sampling))
                and span.num_rows == 1
                and room > 0
                and cache.reserve(sequence, len(sequence.tokens) + room)
            ):
                span.drafts = [
                    token if self.chance.random() < 0.7 else (token + 1) % VOCAB
                    for token in greedy(self.model, sequence.tokens, room)
                ]


def true_drafts() -> Drafter:
    return TrueDrafts(FakeModel(eos_bias=-2.0))


def draft_model() -> Drafter:
    """One that is right half of the time, with a cache of its own that is too small for all."""
    source = make_source("half", num_blocks=12)
    return SpeculativeDrafter(source, FixedLength(4), 4)


def prompt_lookup() -> Drafter:
    return SpeculativeDrafter(PromptLookup(1, 3), FixedLength(5), 5)


def fake(
    num_blocks: int = 14, drafter: Drafter | None = None, windows: tuple[int | None, ...] = (None, None), **options: Any
) -> tuple[Generator, Generator]:
    """Engines on models whose logits show every mistake in the cache."""

    def make(blocks: int, drafter: Drafter | None = None, **options: Any) -> Generator:
        model = FakeModel(eos_bias=-2.0, windows=windows)
        engine = Engine.create(model, OPS, blocks * model.kv_spec.block_bytes, drafter, **options)
        return Generator(engine, FakeTokenizer(), SamplingConfig(eos_token_id=0))

    return make(num_blocks, drafter, **options), make(10_000)


@functools.cache
def tiny_model(kv_cache_dtype: str):
    from pace.assets import TINY
    from pace.llm import LLMModel

    return [
        LLMModel(TINY, dtype="float32", kv_cache_dtype=kv_cache_dtype, progress=False, prefix_cache_bytes=0)
        for _ in range(2)
    ]


def tiny(num_blocks: int = 16, kv_cache_dtype: str = "auto", **options: Any) -> tuple[Generator, Generator]:
    """Engines on the bundled model and the native kernels, both with keys and values in the same dtype."""
    model, other = tiny_model(kv_cache_dtype)
    engine = Engine.create(
        model._engine.model, model._engine.ops, num_blocks * model._engine.cache.spec.block_bytes, **options
    )
    return Generator(engine, model.tokenizer, model._generator.defaults), other._generator


WORLDS: dict[str, Callable[[], tuple[Generator, Generator]]] = {
    "fake": lambda: fake(max_tokens_per_step=48, max_sequences_per_step=6),
    "drafts": lambda: fake(drafter=true_drafts(), max_tokens_per_step=40, max_sequences_per_step=5),
    "draft model": lambda: fake(
        drafter=draft_model(),
        max_tokens_per_step=40,
        max_sequences_per_step=6,
        cache_options={"prefix_cache_bytes": None},
    ),
    "bmc": lambda: fake(
        18,
        true_drafts(),
        max_tokens_per_step=40,
        max_sequences_per_step=5,
        cache_options={"kv_cache_type": "bmc", "bmc_rows": 24},
    ),
    "prefix": lambda: fake(
        drafter=true_drafts(),
        max_tokens_per_step=40,
        max_sequences_per_step=5,
        cache_options={"prefix_cache_bytes": None},
    ),
    "windows": lambda: fake(
        10,
        true_drafts(),
        (None, 20, None, 20),
        max_tokens_per_step=40,
        max_sequences_per_step=5,
        cache_options={"prefix_cache_bytes": None},
    ),
    "windows everywhere": lambda: fake(
        drafter=true_drafts(),
        windows=(20, 20),
        max_tokens_per_step=40,
        max_sequences_per_step=5,
        cache_options={"prefix_cache_bytes": None},
    ),
    "tiny": lambda: tiny(
        drafter=prompt_lookup(),
        max_tokens_per_step=64,
        max_sequences_per_step=6,
        cache_options={"prefix_cache_bytes": None},
    ),
    "int8": lambda: tiny(
        14,
        "int8",
        drafter=prompt_lookup(),
        max_tokens_per_step=40,
        max_sequences_per_step=6,
        cache_options={"prefix_cache_bytes": None},
    ),
}


# -- the run
# -----------------------------------------------------------------------------------------------------------------


def run(name: str, seconds: float, seed: int) -> World:
    """Stresses the world of that name; returns it with its counts. Raises AssertionError for anything wrong."""
    world = World(*WORLDS[name](), time.monotonic() + seconds)
    shares = [list(ACTIONS)[index::NUM_THREADS] for index in range(NUM_THREADS)]
    threads = [
        threading.Thread(target=_work, args=(world, random.Random(f"{seed} {share}"), share), daemon=True)
        for share in shares
    ]
    for thread in threads:
        thread.start()
    while (
        any(thread.is_alive() for thread in threads)
        and time.monotonic() < world.deadline + PATIENCE
        and not world.errors
    ):
        time.sleep(0.05)
    assert not world.errors, "\n".join(world.errors)
    if any(thread.is_alive() for thread in threads):
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError("a thread does not come back: see the stacks above")
    check_idle(world.generator)
    assert not list(world.engine.scheduler.sequences())
    return world


def _work(world: World, chance: random.Random, first: list[Callable]) -> None:
    """Does the `first` actions, so that all are done by someone, and then random ones."""
    while (first or time.monotonic() < world.deadline) and not world.errors:
        action = first.pop() if first else chance.choices(list(ACTIONS), ACTIONS.values())[0]
        try:
            action(world, chance)
        except Planted:
            pass
        except BaseException:
            world.errors.append(f"{action.__name__}: {traceback.format_exc()}")
            return
        with world._lock:
            world.num_done[action.__name__] += 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Random stress of the engine; ends with an error for any wrong token or leaked block."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for all worlds together")
    parser.add_argument("--world", choices=WORLDS, help="default: all, one after the other")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    names = [arguments.world] if arguments.world else list(WORLDS)
    for name in names:
        world = run(name, arguments.seconds / len(names), arguments.seed)
        counts = ", ".join(f"{count} {what}" for what, count in (world.happened + world.num_done).most_common())
        print(f"{name}: {world.num_tokens} tokens as alone; {counts} (seed {arguments.seed})", flush=True)


if __name__ == "__main__":
    main()
