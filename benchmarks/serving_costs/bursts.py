"""Bursts of requests: all clients of a server ask at the same time, with prompts of token ids."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np

from pace.bench.serving.http import Address, Client
from pace.bench.serving.record import Record
from pace.bench.serving.run import find_model, run
from pace.bench.serving.workload import Load

SHARED = 3, 4
"""The share of a prompt that all clients have in common, if they have a prefix in common."""
FIRST_ID = 1000
"""Smaller token ids may have a meaning, such as the end of a text."""
TIMEOUT_SECONDS = 3600.0


@dataclass(frozen=True)
class Burst:
    """One request of each client."""

    clients: int
    prompt: int
    """Tokens of each prompt."""
    generate: int
    """Tokens of each answer."""
    has_prefix: bool = False
    """True if all prompts have the same first tokens, which the server has read before."""

    @property
    def title(self) -> str:
        prefix = ", shared prefix" if self.has_prefix else ""
        return f"{self.clients} x {self.prompt:,} + {self.generate}{prefix}"

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Returns a prompt of each client, preceded by one that brings the prefix to the server's cache. Another seed
        gives other prompts, so that no cache helps otherwise."""
        random = np.random.default_rng([seed, self.clients, self.prompt, self.has_prefix])
        ids = random.integers(FIRST_ID, vocab_size - 1, size=(1 + self.clients, self.prompt))
        if self.has_prefix:
            common = self.prompt * SHARED[0] // SHARED[1]
            ids[:, :common] = ids[0, :common]
        return ids.tolist()


@dataclass(frozen=True)
class Sample:
    """What the clients of one burst measured."""

    tokens_per_s: float
    """Generated tokens of all clients, from the first request to the last answer's end."""
    first_s: list[float]
    """Seconds from each request to its first token."""
    step_s: list[float]
    """Mean seconds between two tokens of each answer."""


async def send(url: str, burst: Burst, prompts: list[list[int]]) -> Sample:
    """Sends a burst to the server at `url`. Raises RuntimeError if an answer fails or has another number of tokens."""
    client = Client(Address.parse(url))
    try:
        model = await find_model(client)
        if burst.has_prefix:
            await _run(client, [_body(model, prompts[0], 1)])
        bodies = [_body(model, prompt, burst.generate) for prompt in prompts[1:]]
        records, seconds = await _run(client, bodies)
    finally:
        client.close()
    if wrong := [r for r in records if (r.input_tokens, r.output_tokens) != (burst.prompt, burst.generate)]:
        counts = f"{wrong[0].input_tokens} + {wrong[0].output_tokens}"
        raise RuntimeError(f"the server counts {counts} tokens of a request of {burst.prompt} + {burst.generate}")
    total = burst.clients * burst.generate
    return Sample(total / seconds, [record.ttft for record in records], [record.tpot for record in records])


async def _run(client: Client, bodies: list[bytes]) -> tuple[list[Record], float]:
    load = Load(num_prompts=len(bodies), max_concurrency=len(bodies))
    done = await run(client, load, bodies, TIMEOUT_SECONDS)
    for record in done.records:
        if record.failure:
            raise RuntimeError(f"a request failed ({record.failure.kind}): {record.failure.message}")
    return done.records, done.duration


def _body(model: str, prompt: list[int], generate: int) -> bytes:
    asked = {"model": model, "prompt": prompt, "max_tokens": generate, "temperature": 0.0, "ignore_eos": True}
    return json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
