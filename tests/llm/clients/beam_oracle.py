"""The beam search of transformers, on its own models or on one with the logits of a `FakeModel`, and random cases to
compare.

    python -m tests.llm.clients.beam_oracle --cases 2000 --first-seed 0      # run the sweep by hand; takes minutes
"""

from __future__ import annotations

import functools
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from pace.llm.configs import SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from tests.llm import sweep
from tests.llm.fake_model import OPS, FakeModel
from tests.llm.generators import check_idle
from tests.llm.models.variants import IN_TRANSFORMERS, save_tiny
from tests.llm.text.tokenizer_zoo import byte_level

VOCAB_SIZE = 120
"""Vocabulary size of `tiny_model`."""

TIE = 1e-5
"""Scores this close are one number rounded in two ways. Which of the two texts ranks first, or survives, is then
chance."""

Rows = list[list[int]]


class FakeTransformer(LlamaForCausalLM):
    """A transformers model with the logits of a `FakeModel`."""

    def __init__(self, fake: FakeModel) -> None:
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        super().__init__(LlamaConfig(vocab_size=fake.vocab_size, **sizes))
        self.fake = fake
        self.num_calls = 0

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any):
        self.num_calls += 1
        rows = [self.fake.logits_of(row) for row in input_ids.tolist()]
        return CausalLMOutputWithPast(logits=torch.stack(rows)[:, None])


def theirs(
    model: Any, prompt: list[int], fields: dict[str, Any], tokenizer: Any = None, copies: int = 1
) -> tuple[Rows, list[float]]:
    """Runs transformers' search with these `fields` of GenerationConfig, on a batch of `copies` of the prompt. Returns
    the generated tokens without padding and the scores, best first."""
    ids = torch.tensor([prompt] * copies)
    asked = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True} | fields
    asked |= {"tokenizer": tokenizer} if tokenizer else {}
    nothing_said = GenerationConfig(use_cache=not isinstance(model, FakeTransformer))
    with torch.no_grad(), mock.patch.object(model, "generation_config", nothing_said):  # other tests share the model
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **asked)
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    rows = [row[len(prompt) :][:length] for row, length in zip(out.sequences.tolist(), lengths)]
    return rows, out.sequences_scores.tolist()


def ours(generator: Any, prompts: Rows, fields: dict[str, Any]) -> Any:
    """Returns the output of a Generator or an LLMModel for the same fields. Without `eos_token_id` no token ends a
    text."""
    return generator.generate(prompts, SamplingConfig(ignore_eos="eos_token_id" not in fields, **fields))


def refusal(error: ValueError, their_scores: list[float]) -> str | None:
    """Returns None if our search was right to raise that it found too few texts, else a message. It was right if
    transformers filled its result with forbidden texts, whose scores are at most -1e7."""
    is_right = "no more are possible" in str(error) and not min(their_scores) > -1e7
    return None if is_right else f"refused: {error}, but there were {their_scores}"


def difference(
    rows: Rows, scores: list[float], their_rows: Rows, their_scores: list[float], tolerance: float = 1e-4
) -> str | None:
    """Returns None if rows and scores agree or the rows are ties, else a message."""
    apart = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(scores, their_scores, strict=True))
    if apart > tolerance:
        return f"scores are {apart:g} apart: {scores} {their_scores}; {rows} {their_rows}"
    if rows != their_rows and apart > TIE:
        return f"texts differ: {rows} {their_rows}; {scores} {their_scores}"
    return None


def random_fields(chance: random.Random, vocab_size: int, banned: list[list[int]]) -> dict[str, Any]:
    """Returns fields of a search with 2 to 6 beams and random values of the other options."""
    num_beams, num_new = chance.randint(2, 6), chance.randint(1, 14)
    fields: dict[str, Any] = {
        "num_beams": num_beams,
        "max_new_tokens": num_new,
        "num_return_sequences": chance.randint(1, num_beams),
        "early_stopping": chance.choice([False, True, "never"]),
        "length_penalty": chance.choice([1.0, 1.0, 0.0, 0.3, 2.0, 5.0, -0.5, -2.0]),
    }
    if chance.random() < 0.8:
        fields["eos_token_id"] = chance.sample(range(vocab_size), chance.randint(1, 4))
        fields["min_new_tokens"] = chance.choice([0, 0, chance.randint(0, num_new)])
    if chance.random() < 0.3:
        fields["repetition_penalty"] = chance.choice([0.8, 1.1, 1.5])
    if chance.random() < 0.3:
        fields["no_repeat_ngram_size"] = chance.randint(1, 3)
    if banned or chance.random() < 0.3:
        fields["bad_words_ids"] = banned + [
            [chance.randrange(vocab_size) for _ in range(chance.randint(1, 2))] for _ in range(chance.randint(1, 5))
        ]
    return fields


make_tokenizer = functools.cache(byte_level)


def check_fake_case(seed: int) -> str | None:
    """Compares a random search on random logits, with up to four end tokens. Every third case has stop strings."""
    chance = random.Random(seed)
    tokenizer = make_tokenizer() if seed % 3 == 0 else None
    fake = FakeModel(len(tokenizer) if tokenizer else chance.choice([14, 30, 50]))
    fake.sharpness = chance.choice([0.3, 1.0, 2.0])
    banned = [[token] for token in tokenizer.all_special_ids] if tokenizer else []
    fields = random_fields(chance, fake.vocab_size, banned)
    prompt = [chance.randrange(fake.vocab_size) for _ in range(chance.randint(1, 20))]
    if tokenizer:
        # The prompt must not end with the start of a stop string: transformers also finds those that begin in it.
        prompt[-1] = tokenizer("!")["input_ids"][0]
        num_stops = chance.randint(1, 6)
        fields["stop_strings"] = ["".join(chance.choices("otriush ", k=chance.randint(1, 2))) for _ in range(num_stops)]
    generator = Generator(Engine.create(fake, OPS, chance.choice([12, 1000]) * fake.kv_spec.block_bytes), tokenizer)
    their_rows, their_scores = theirs(FakeTransformer(fake), prompt, fields, tokenizer)
    try:
        out = ours(generator, [prompt], fields)
    except ValueError as error:
        wrong = refusal(error, their_scores)
    else:
        wrong = difference(out.generated_token_ids, out.sequence_scores, their_rows, their_scores)
    check_idle(generator)
    return wrong and f"{fields} after {prompt}: {wrong}"


def check_real_case(seed: int, model: Any, oracle: Any, vocab_size: int) -> str | None:
    """Compares a random search on a batch of prompts, with a tiny model of one architecture."""
    chance = random.Random(seed)
    fields = random_fields(chance, vocab_size, [])
    lengths = [chance.randint(1, 40) for _ in range(chance.randint(1, 3))]
    prompts = [[chance.randrange(2, vocab_size) for _ in range(length)] for length in lengths]
    out = ours(model, prompts, fields)
    check_idle(model)
    num_rows = fields["num_return_sequences"]
    for index, prompt in enumerate(prompts):
        mine = slice(index * num_rows, (index + 1) * num_rows)
        wrong = difference(out.generated_token_ids[mine], out.sequence_scores[mine], *theirs(oracle, prompt, fields))
        if wrong:
            return f"{fields} after {prompt}: {wrong}"
    return None


@functools.cache
def tiny_model(family: str) -> tuple[Any, Any]:
    """Returns our model and transformers' with the same random weights and `VOCAB_SIZE` tokens."""
    from pace.llm import LLMModel

    fields = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128}
    fields |= {"original_max_position_embeddings": 128} if family == "phi3" else {}
    with tempfile.TemporaryDirectory() as folder:
        oracle = save_tiny(Path(folder), family, fields)
        return LLMModel(folder, dtype=torch.float32, progress=False, num_threads=1), oracle


def check_case(seed: int) -> str | None:
    """Compares one case: odd seeds use random logits, even ones the architectures in turn."""
    if seed % 2:
        return check_fake_case(seed // 2)
    family = IN_TRANSFORMERS[seed // 2 % len(IN_TRANSFORMERS)]
    wrong = check_real_case(seed, *tiny_model(family), VOCAB_SIZE)
    return wrong and f"{family}: {wrong}"


if __name__ == "__main__":
    sweep.main("Compare beam search with transformers' on random cases.", check_case, num_cases=2000)
