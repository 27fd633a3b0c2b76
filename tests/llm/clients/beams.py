"""Beam searches on fake models, and the rows they find."""

from __future__ import annotations

from typing import Any

from pace.llm import SamplingConfig
from pace.llm.clients.beam_search import BeamSearch
from pace.llm.generator import Generator
from pace.llm.sequences import make_beam_search
from tests.llm import generators
from tests.llm.fake_model import FakeModel

BEAMS = SamplingConfig(num_beams=4, num_return_sequences=3, max_new_tokens=20)


def make_generator(num_blocks: int = 1000, model: FakeModel | None = None, **limits: Any) -> Generator:
    return generators.make_generator(model or FakeModel(eos_bias=1.0), num_blocks, **limits)


def rows_of(out) -> list[tuple]:
    return list(zip(out.generated_token_ids, out.finish_reasons, out.sequence_scores))


def searches_of(generator: Generator, prompts: list[list[int]], config: SamplingConfig = BEAMS) -> list[BeamSearch]:
    call = generator.prepare_for_generate(prompts, config)
    return [make_beam_search(call, index, generator.tokenizer) for index in range(len(prompts))]


def rows_found(searches: list[BeamSearch]) -> list[tuple]:
    return [(row.generated, row.finish_reason, row.score) for search in searches for row in search.rows]
