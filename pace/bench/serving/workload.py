"""Requests of a load test and when they arrive, reproducible from a seed on any machine."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pace.assets import TINY

if TYPE_CHECKING:
    import numpy

ENDPOINTS = {"/v1/completions": "openai", "/v1/chat/completions": "openai-chat"}
"""Maps the path of a kind of request to its backend name in `vllm bench serve`."""

ARRIVALS, LENGTHS, WORDS = range(3)
"""Independent random streams: other arrivals change no prompt."""


@dataclass(frozen=True)
class Load:
    """A load test: the number of requests, their lengths, and how they arrive."""

    num_prompts: int = 100
    input_len: int = 128
    """Words of a prompt, each about one token. Reports use the server's count."""
    output_len: int = 64
    """Maximum number of tokens of an answer."""
    range_ratio: float = 0.0
    """Spread of both lengths: uniform between 1 - ratio and 1 + ratio times the length."""
    request_rate: float = math.inf
    """Requests that arrive per second, however many are still unanswered. Infinite: all at once, or with
    `max_concurrency` one whenever another ends."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between arrivals: 1 for a Poisson process, less for bursts."""
    max_concurrency: int | None = None
    """Maximum number of requests in flight. Others wait; with a finite `request_rate` the wait counts as part of their
    time."""
    seed: int = 0
    endpoint: str = "/v1/completions"
    ignore_eos: bool = False
    """Continue every answer up to `output_len`; an extension of pace, vLLM, SGLang and llama.cpp."""
    extra_body: dict[str, Any] = field(default_factory=dict)
    """Additional fields of every request, which override those made here."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ValueError(f"max_concurrency must be at least 1, got {self.max_concurrency}")
        if not 0 <= self.range_ratio < 1:
            raise ValueError(f"range_ratio must be at least 0 and less than 1, got {self.range_ratio}")
        if not self.request_rate > 0:
            raise ValueError(f"request_rate must be more than 0, got {self.request_rate}")
        if not 0 < self.burstiness < math.inf:
            raise ValueError(f"burstiness must be more than 0 and finite, got {self.burstiness}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.endpoint not in ENDPOINTS:
            raise ValueError(f"endpoint must be {' or '.join(ENDPOINTS)}, got {self.endpoint!r}")

    @property
    def is_open_loop(self) -> bool:
        """True if arrivals follow a schedule, and not the end of other requests."""
        return self.request_rate < math.inf or self.max_concurrency is None

    def arrivals(self) -> list[float]:
        """Seconds from the start at which each request of an open loop is due; the first at 0."""
        if self.request_rate == math.inf:
            return [0.0] * self.num_prompts
        scale = 1 / (self.request_rate * self.burstiness)
        gaps = self._random(ARRIVALS).gamma(self.burstiness, scale, self.num_prompts - 1)
        return [0.0, *gaps.cumsum().tolist()]

    def bodies(self, model: str, num_warmups: int = 0) -> list[bytes]:
        """Returns the requests as JSON, preceded by `num_warmups` that are not counted. Prompts differ from the first
        word on, and between seeds."""
        count = num_warmups + self.num_prompts
        lengths = self._random(LENGTHS)
        inputs, outputs = (self._lengths(lengths, length, count) for length in (self.input_len, self.output_len))
        words, random = common_words(), self._random(WORDS)
        prompts = [" ".join(words[i] for i in random.integers(len(words), size=length)) for length in inputs]
        return [json.dumps(self._body(model, *each)).encode() for each in zip(prompts, outputs)]

    def _body(self, model: str, prompt: str, output_len: int) -> dict[str, Any]:
        asked: dict[str, Any] = (
            {"prompt": prompt}
            if self.endpoint == "/v1/completions"
            else {"messages": [{"role": "user", "content": prompt}]}
        )
        asked |= {"model": model, "max_tokens": output_len, "temperature": 0.0}
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked | ({"ignore_eos": True} if self.ignore_eos else {}) | self.extra_body

    def _lengths(self, random: numpy.random.Generator, length: int, count: int) -> list[int]:
        low, high = (length * (1 + sign * self.range_ratio) for sign in (-1, 1))
        return random.integers(max(1, math.floor(low)), math.ceil(high), size=count, endpoint=True).tolist()

    def _random(self, what: int) -> numpy.random.Generator:
        import numpy  # not needed by `pace bench --help`

        return numpy.random.default_rng([self.seed, what])


def common_words() -> list[str]:
    """Words that are one token of the bundled vocabulary: common enough to be one token in most vocabularies."""
    vocabulary = json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return [token[1:] for token in vocabulary if re.fullmatch("\u0120[a-z]{2,}", token)]
