"""Images are encoded slice by slice between steps, on a model that checks the rows of each step."""

from __future__ import annotations

import random
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.cache.groups import most_bytes
from pace.llm.engine import media as engine_media
from pace.llm.engine.engine import Engine
from pace.llm.sampling.sampler import Sampling
from pace.llm.sequence import MediaSpan, Sequence
from pace.llm.text.stopping_criteria import StoppingCriteria
from pace.media.media import Media
from tests.llm.fake_model import OPS, FakeModel, greedy

FIRST_PLACEHOLDER = 100
"""Image i has the placeholder FIRST_PLACEHOLDER + i, so that a step shows which rows it needs."""
NUM_SLICES = 4


class SeeingModel(FakeModel):
    """Encodes image i to rows (i, 0), (i, 1), ... in `NUM_SLICES` slices."""

    def __init__(self) -> None:
        super().__init__(vocab_size=FIRST_PLACEHOLDER + 40, eos_bias=-50.0)
        self.towers = [SimpleNamespace(width=2)]
        self.failing: set[int] = set()
        self.num_slices = 0
        self.hook = self.check_rows

    def logits_of(self, tokens: list[int]) -> Tensor:
        logits = super().logits_of(tokens)
        logits[FIRST_PLACEHOLDER:] = -50.0
        return logits

    def encode(self, image: Media) -> Iterator[None]:
        number = int(image.features[0, 0])
        for part in range(NUM_SLICES):
            self.num_slices += 1
            if number in self.failing and part == 2:
                raise RuntimeError(f"image {number} cannot be encoded")
            if part + 1 < NUM_SLICES:
                yield
        return torch.tensor([[number, row] for row in range(image.num_tokens)], dtype=torch.float32)

    def angle_positions(self, media: object, start: int, end: int) -> None:
        return None

    @staticmethod
    def row_at(position: int) -> int:
        """Images begin at position 3."""
        return position - 3

    def check_rows(self, batch: ForwardBatch) -> None:
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        places = [place for place, token in enumerate(tokens) if token >= FIRST_PLACEHOLDER]
        given = [] if batch.given is None else batch.given.rows.tolist()
        assert places == ([] if batch.given is None else batch.given.at.tolist())
        for place, (number, row) in zip(places, given, strict=True):
            assert number == tokens[place] - FIRST_PLACEHOLDER
            assert row == self.row_at(positions[place])


def image(number: int, num_tokens: int) -> Media:
    return Media("image", np.full((1, 1), number, np.float32), (1, 1, 1), num_tokens, f"{number} {num_tokens}".encode())


def ask(number: int | None, num_tokens: int = 20, after: int = 2, generated: int = 6) -> Sequence:
    """Three tokens, an image, and `after` others; a prompt without an image for None."""
    prompt, media = [1, 2, 3], ()
    if number is not None:
        prompt += [FIRST_PLACEHOLDER + number] * num_tokens
        media = (MediaSpan(3, image(number, num_tokens)),)
    prompt += [4 + index for index in range(after)]
    limit = len(prompt) + generated
    sequence = Sequence(prompt, Sampling(), StoppingCriteria(limit, end_tokens=[0]), limit)
    sequence.media = media
    return sequence


def make_engine(media_cache_bytes: int = 1 << 20, num_blocks: int = 100, **limits: int) -> Engine:
    model = SeeingModel()
    options = {"prefix_cache_bytes": num_blocks // 4 * model.kv_spec.block_bytes}
    cache_bytes = num_blocks * model.kv_spec.block_bytes
    return Engine.create(model, OPS, cache_bytes, cache_options=options, media_cache_bytes=media_cache_bytes, **limits)


def run(engine: Engine, *sequences: Sequence) -> None:
    engine.submit(sequences)
    for _ in range(3000):
        if not engine.step():
            break
        engine.cache.check_integrity(engine.scheduler.sequences())
    assert all(sequence.is_finished for sequence in sequences)


def assert_right(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        assert sequence.error is None
        prompt = sequence.tokens[: sequence.num_prompt_tokens]
        assert sequence.generated == greedy(engine.model, prompt, sequence.num_generated)
        assert sequence.num_generated == sequence.max_length - len(prompt)


@pytest.fixture(autouse=True)
def one_slice_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_media, "SLICE_SECONDS", 0.0)


@pytest.mark.parametrize("max_tokens_per_step", [1, 2, 7, 22, 512])
@pytest.mark.parametrize("num_tokens, after", [(1, 0), (16, 0), (20, 2), (45, 30)])
def test_a_prompt_is_computed_up_to_missing_rows(max_tokens_per_step: int, num_tokens: int, after: int) -> None:
    engine = make_engine(max_tokens_per_step=max_tokens_per_step)
    sequence = ask(5, num_tokens, after)
    run(engine, sequence)
    assert_right(engine, sequence)
    assert engine.model.num_slices == NUM_SLICES


def test_others_generate_between_two_slices() -> None:
    engine = make_engine()
    writer, sequence = ask(None, generated=30), ask(1)
    engine.submit([writer])
    engine.step()
    engine.submit([sequence])
    for part in range(NUM_SLICES):
        before = writer.num_generated
        assert engine.step()
        assert writer.num_generated == before + 1 and engine.model.num_slices == part + 1
        assert sequence.num_computed == 3
    run(engine)
    assert_right(engine, writer, sequence)


def test_an_image_is_encoded_once() -> None:
    engine = make_engine()
    first, second, other = ask(1), ask(1, after=5), ask(2)
    run(engine, first, second, other)
    assert engine.media.num_encoded == 2
    run(engine, ask(1, after=9), ask(2, after=9))
    assert engine.media.num_encoded == 2, "the rows were kept"
    salted = ask(1)
    salted.cache_salt = "another tenant"
    run(engine, salted)
    assert engine.media.num_encoded == 3
    assert_right(engine, first, second, other, salted)


def test_an_image_in_the_prefix_cache_is_not_encoded() -> None:
    engine = make_engine(media_cache_bytes=0)
    run(engine, ask(1, num_tokens=29))
    assert engine.media.num_encoded == 1
    again = ask(1, num_tokens=29, after=7)
    run(engine, ask(2), again)
    assert again.stats.num_reused == 32 and engine.media.num_encoded == 2
    longer = ask(1, num_tokens=30)
    run(engine, longer)
    assert longer.stats.num_reused == 0, "another image with the same placeholders"
    assert_right(engine, again, longer)


def test_rows_are_bounded() -> None:
    bound = 3 * 20 * 8
    engine = make_engine(media_cache_bytes=bound)
    sequences = [ask(number) for number in range(12)]
    engine.submit(sequences)
    while engine.step():
        assert engine.media.num_bytes <= bound + 20 * 8
    assert_right(engine, *sequences)
    recent = ask(11, after=3)
    run(engine, recent)
    assert engine.media.num_encoded == 12, "the last ones are kept"


def test_a_tower_that_raises_fails_its_sequence_alone() -> None:
    engine = make_engine()
    engine.model.failing = {3}
    writer, bad, good = ask(None, generated=20), ask(3), ask(4)
    run(engine, writer, bad, good)
    assert isinstance(bad.error, RuntimeError) and "image 3" in str(bad.error)
    assert bad.finish_reason == "error"
    assert_right(engine, writer, good)
    engine.model.failing = set()
    again = ask(3)
    run(engine, again)
    assert_right(engine, again)


def test_an_aborted_sequence_is_encoded_no_further() -> None:
    engine = make_engine()
    gone, next_one = ask(1), ask(2)
    engine.submit([gone, next_one])
    engine.step()
    engine.step()
    engine.abort([gone])
    run(engine)
    assert_right(engine, next_one)
    assert engine.media.num_encoded == 1
    assert not engine.step() and engine.media._encoding is None


def test_rows_are_encoded_again_after_a_step_that_failed() -> None:
    engine = make_engine()
    sequence = ask(1)
    engine.submit([sequence])
    engine.model.hook = lambda batch: 1 / 0
    with pytest.raises(ZeroDivisionError):
        while engine.step():
            pass
    assert isinstance(sequence.error, ZeroDivisionError) and engine.media.num_bytes == 0
    engine.model.hook = engine.model.check_rows
    again = ask(1)
    run(engine, again)
    assert_right(engine, again)


@pytest.mark.parametrize("seed", range(6))
def test_random_arrivals_in_a_small_cache(seed: int) -> None:
    """Sequences are preempted and aborted, rows are dropped, and every token is right."""
    rng = random.Random(seed)
    engine = make_engine(rng.choice([0, 500, 5000]), num_blocks=14, max_tokens_per_step=rng.choice([3, 20, 60]))
    kept, aborted = [], []
    for _ in range(40):
        number = rng.choice([None, *range(8)])
        sequence = ask(number, rng.randint(1, 50), rng.randint(1, 20), rng.randint(1, 30))
        sequence.priority = rng.choice([0, 0, 1])
        engine.submit([sequence])
        kept.append(sequence)
        for _ in range(rng.randint(0, 12)):
            engine.step()
        if rng.random() < 0.1:
            aborted.append(kept.pop(rng.randrange(len(kept))))
            engine.abort([aborted[-1]])
        engine.cache.check_integrity(engine.scheduler.sequences())
    run(engine)
    assert_right(engine, *kept)
    assert sum(sequence.stats.num_preemptions for sequence in kept) > 0


class WholeModel(SeeingModel):
    """Checks that the rows of an image are in one step, unless the cache has the others, and see its last row."""

    def __init__(self) -> None:
        super().__init__()
        self.whole_media = True
        self.ends: dict[int, int] = {}
        """Number of an image -> position of its last token."""

    def check_rows(self, batch: ForwardBatch) -> None:
        super().check_rows(batch)
        tokens, positions = batch.tokens.tolist(), batch.positions.tolist()
        seen = positions if batch.spans.newest is None else batch.spans.newest.tolist()
        for token, position, newest in zip(tokens, positions, seen, strict=True):
            assert newest == self.ends.get(token - FIRST_PLACEHOLDER, position)
        for number, end in self.ends.items():
            own = [place for token, place in zip(tokens, positions) if token == FIRST_PLACEHOLDER + number]
            assert not own or max(own) == end, "a step has an image up to its end"


@pytest.mark.parametrize("max_tokens_per_step", [1, 2, 7, 22, 512])
def test_a_step_has_whole_images(max_tokens_per_step: int) -> None:
    model = WholeModel()
    cache_options = {"prefix_cache_bytes": 25 * model.kv_spec.block_bytes}
    engine = Engine.create(
        model,
        OPS,
        100 * model.kv_spec.block_bytes,
        cache_options=cache_options,
        max_tokens_per_step=max_tokens_per_step,
    )
    model.ends = {1: 22, 2: 22, 3: 22}
    writer, *others = ask(None, generated=30), ask(1), ask(2), ask(3, after=30)
    run(engine, writer, *others)
    again = ask(1, after=9)
    run(engine, again)
    assert again.stats.num_reused == 16, "a part of the image is in the cache"
    assert_right(engine, writer, *others, again)


def test_a_whole_image_has_room_in_layers_with_a_window() -> None:
    """In the smallest cache that takes the prompt. A larger image than a step may have is refused."""
    model = WholeModel()
    windowed = FakeModel(windows=(None, 20)).kv_spec
    model.kv_spec, model.seen = windowed, model.max_position_embeddings
    length, image_tokens = 3 + 1120 + 2 + 6, 1120
    num_bytes = most_bytes(windowed, length, 1120)
    engine = Engine.create(model, OPS, num_bytes, cache_options={"prefix_cache_bytes": 0}, max_tokens_per_step=7)
    model.ends = {1: 2 + image_tokens}
    sequence, larger = ask(1, image_tokens), ask(2, image_tokens + 1)
    larger.max_length = sequence.max_length
    larger.tokens = larger.tokens[: sequence.max_length]
    run(engine, sequence)
    assert_right(engine, sequence)
    engine.submit([larger])
    assert not engine.step() and larger.is_finished
    assert "1121 tokens, but this model computes an image at once, and at most 1120" in str(larger.error)


def test_an_image_in_several_runs() -> None:
    engine = make_engine(max_tokens_per_step=7)
    rows = {3: 0, 4: 1, 6: 2, 7: 3, 8: 4, 11: 5} | {20 + place: 6 + place for place in range(20)}
    engine.model.row_at = rows.__getitem__
    prompt = [1, 2, 3, *[FIRST_PLACEHOLDER + 4 if place in rows else 5 for place in range(3, 45)]]
    medium = Media("image", np.full((1, 1), 4, np.float32), (1, 1, 1), 26, b"four", runs=(2, 3, 1, 20))
    starts, first, media = (3, 6, 11, 20), 0, []
    for start, length in zip(starts, medium.runs):
        media.append(MediaSpan(start, medium, first, length=length))
        first += length
    sequences = []
    for _ in range(2):
        sequence = Sequence(list(prompt), Sampling(), StoppingCriteria(50, end_tokens=[0]), 50)
        sequence.media = tuple(media)
        run(engine, sequence)
        sequences.append(sequence)
    assert_right(engine, *sequences)
    assert engine.media.num_encoded == 1 and sequences[1].stats.num_reused == 32
