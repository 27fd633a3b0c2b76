"""An engine under stress, the configs of its requests, and their expected outputs."""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field

import torch

from pace.llm.clients.session import Session
from pace.llm.configs import SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.outputs import GenerateOutput
from pace.llm.sampling.logits import LogitsProcessor

LONGEST_PROMPT, LONGEST_OUTPUT = 70, 40
VOCAB = 50
"""Prompts hold tokens below this."""


class Planted(Exception):
    """Raised by the stress test within steps. The requests of that step get it, and all others must continue."""


class Parity(LogitsProcessor):
    """A processor whose state must be kept exactly: the parity of the sum of all tokens."""

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
    """An engine under stress, and a similar one (`alone`) where each request runs alone."""

    generator: Generator
    alone: Generator
    num_prompts: int = 40
    num_done: Counter[str] = field(default_factory=Counter)
    """Number of times each action was done."""
    happened: Counter[str] = field(default_factory=Counter)
    """Sums of the metrics of all outputs."""
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    fail_next: bool = False
    """Makes the next step fail. Never two in a row, because the third failure in a row would end the engine."""

    def __post_init__(self) -> None:
        chance = random.Random(0)
        stems = [[chance.randrange(1, VOCAB) for _ in range(48)] for _ in range(3)]
        self.prompts = [chance.choice(stems)[: chance.choice([0, 16, 31, 48])] for _ in range(self.num_prompts)]
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
        """Returns the output for the prompt and config of these indices, run alone."""
        with self._lock:
            if (prompt, config) not in self._known:
                self._known[prompt, config] = self.alone.generate(
                    self.prompts[prompt], with_length(CONFIGS[config], LONGEST_OUTPUT)
                )
            return self._known[prompt, config]

    def expected_beams(self, prompt: int, config: int) -> list[tuple]:
        """Returns the rows of a search that runs alone."""
        with self._lock:
            if (prompt, config) not in self._known_beams:
                self._known_beams[prompt, config] = beam_rows(self.alone.generate(self.prompts[prompt], BEAMS[config]))
            return self._known_beams[prompt, config]

    def expected_logits(self, tokens: list[int]) -> torch.Tensor:
        """Returns the logits after these tokens, `[V]`."""
        with self._lock:
            if tuple(tokens) not in self._known_logits:
                with Session(self.alone.driver) as session:
                    self._known_logits[tuple(tokens)] = session.append(tokens)[0]
            return self._known_logits[tuple(tokens)]

    def check_row(
        self, tokens: list[int], reason: str, prompt: int, config: int, row: int = 0, num_tokens: int = LONGEST_OUTPUT
    ) -> None:
        """Checks a row of at most `num_tokens` tokens, which has fewer if it was cancelled."""
        whole = self.expected(prompt, config)
        expected, ending = whole.generated_token_ids[row][:num_tokens], whole.finish_reasons[row]
        if len(whole.generated_token_ids[row]) > num_tokens:
            ending = "length"
        if reason == "cancelled":
            expected, ending = expected[: len(tokens)], reason
        assert (tokens, reason) == (expected, ending), (
            f"prompt {prompt}, config {config}, row {row}, {num_tokens} tokens: {tokens} {reason}, alone "
            f"{expected} {ending}"
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
