"""Mistral 3, Pixtral and LLaVA: rows of the towers and greedy text are those of transformers."""

from __future__ import annotations

import pytest
import torch

from tests.llm.models.towers.checks import (
    check_bfloat16_rows,
    check_drafts,
    check_every_way_to_run,
    check_greedy_text,
    check_preemption,
    check_rows,
    check_text_alone,
    load_layers,
    oracle_rows,
)
from tests.llm.models.towers.llava.making import (
    CASES,
    IMAGE,
    batch_of,
    inputs_of,
    media_inputs,
    rename,
    rows_of_image,
    save_llava,
)
from tests.llm.models.towers.prompts import together
from tests.llm.models.towers.seeing import NEW, load, results, run
from tests.plugins.tiers import sample
from tests.support import backends

pytest.importorskip("transformers")

ALWAYS = ("mistral3", "llava")
IMAGES = [[(2, 3)], [], [(1, 1), (4, 2)], [(3, 3), (1, 5), (2, 2)]]
"""Rows and columns of tokens of the images of each prompt."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistral3")
    return save_llava(folder, CASES["mistral3"]), folder


@pytest.fixture(scope="module")
def model(seeing):
    with load(seeing[1]) as model:
        yield model


SIZES = [(2, 3), (1, 1), (5, 2)]


@pytest.mark.parametrize("name", sample(list(CASES), lambda name: name in ALWAYS))
def test_rows_are_those_of_transformers(name, tmp_path) -> None:
    case = CASES[name]
    oracle, inputs = save_llava(tmp_path, case), media_inputs(case, SIZES, 0)
    expected = oracle_rows(oracle, inputs)
    check_rows(tmp_path, inputs, expected)
    for published in (True, False):
        rename(tmp_path, published)
        check_rows(tmp_path, inputs, expected)


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_bfloat16_rows_are_as_near_as_those_of_transformers(name, tmp_path) -> None:
    case = CASES[name]
    check_bfloat16_rows(tmp_path, media_inputs(case, SIZES, 0), save_llava(tmp_path, case))


@pytest.mark.parametrize("name", sample(list(CASES), lambda name: name in ALWAYS))
def test_greedy_text_is_that_of_transformers(name, tmp_path) -> None:
    case = CASES[name]
    oracle = save_llava(tmp_path, case)
    prompts = [inputs_of(case, images, index) for index, images in enumerate(IMAGES)]
    with load(tmp_path, prefix_cache_bytes=0) as model:
        counts = [16] * (len(IMAGES) - 1) + [NEW]  # transformers takes most of the time
        check_greedy_text(model, oracle, prompts, batch_of(case, IMAGES), counts)


@pytest.mark.thorough
def test_every_way_to_run_it_gives_the_same_text(seeing, model) -> None:
    batch = batch_of(CASES["mistral3"], IMAGES)
    check_every_way_to_run(seeing[1], batch)
    check_drafts(seeing[1], model, batch)
    batch = batch_of(CASES["mistral3"], [[(4, 5), (3, 3)], [(5, 5)], [(6, 2), (2, 2)], [(5, 4)]])
    check_preemption(seeing[1], batch, run(model, batch, 90), 250_000)


def test_the_cache_tells_images_of_several_rows_apart(seeing) -> None:
    """A prefix may end in any row of an image. Blocks before the first image that differs are reused."""
    case, sizes = CASES["mistral3"], [(5, 4), (2, 3)]
    prompt = [*range(2, 14), *rows_of_image(5, 4), *range(40, 50), *rows_of_image(2, 3), *range(60, 70)]
    images = {seed: media_inputs(case, sizes, seed) for seed in (1, 2)}
    mixed = images[1] | {"pixel_values": torch.cat([images[1]["pixel_values"][:1], images[2]["pixel_values"][1:]])}
    ends = {"ids": torch.tensor([prompt]), "other": torch.tensor([[*prompt[:30], 7, 8]])}
    with load(seeing[1], prefix_cache_bytes=0) as fresh, load(seeing[1]) as cached:
        for given, reused in ((images[1], 0), (images[1], 64), (images[2], 0), (mixed, 32), (mixed, 64)):
            inputs = given | {"input_ids": ends["ids"]}
            expected = results(fresh.generate(inputs, max_new_tokens=8, logprobs=0))
            output = cached.generate(inputs, max_new_tokens=8, logprobs=0)
            assert results(output) == expected
            assert output.metrics.num_reused_tokens == reused
        cached._engine.check_idle()
        assert cached._engine.media.num_encoded <= 4


@pytest.mark.thorough
def test_sessions_keep_all_rows_of_an_image(seeing, model, tmp_path) -> None:
    """Images in two turns: the second one is dropped, appended to a fork, and to a session that was saved."""
    case, sizes = CASES["mistral3"], [(4, 3), (2, 5)]
    images = [media_inputs(case, [size], seed) for seed, size in enumerate(sizes)]
    parts = [[*range(2, 9), *rows_of_image(4, 3), *range(20, 25)], [*range(30, 34), *rows_of_image(2, 5), 40, 41]]
    turns = [image | {"input_ids": torch.tensor([part])} for image, part in zip(images, parts)]
    cut, whole = len(parts[0]), together(images, pad_value=7.0) | {"input_ids": torch.tensor([parts[0] + parts[1]])}
    with model.session() as session:
        expected = session.append(whole, "all")
        session.truncate(cut)
        with pytest.raises(ValueError, match="the tokens 7 to 21 are an image or a clip, which truncate keeps or"):
            session.truncate(12)
        with session.fork() as fork:
            assert torch.equal(fork.append(turns[1], "all"), expected[cut:])
        session.save(tmp_path / "saved")
    with load(seeing[1], prefix_cache_bytes=0) as other:
        with other.load_session(tmp_path / "saved") as session:
            assert torch.equal(session.append(turns[1], "all"), expected[cut:])
        with other.session() as session:
            assert torch.equal(session.append(turns[0], "all"), expected[:cut])


def test_text_alone_has_the_bits_of_a_model_without_a_tower(seeing, model) -> None:
    check_text_alone(seeing[1], model, inputs_of(CASES["mistral3"], IMAGES[0], 0))


def test_blocks_after_the_last_feature_layer_are_not_loaded(tmp_path) -> None:
    case = CASES["llava"]
    save_llava(tmp_path, case)
    tower = load_layers(tmp_path, backends()[0]).towers[0]
    assert len(tower.blocks) == case.vision["num_hidden_layers"] - 1
    assert sum("encoder.layers" in name for name in tower.targets()) == 16 * len(tower.blocks)


def changed(**tensors):
    inputs = inputs_of(CASES["mistral3"], IMAGES[2], 2)
    return {name: value for name, value in (inputs | tensors).items() if value is not None}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"pixel_values": None, "image_sizes": None}, "the prompt has 9 tokens of id 90, but 0 images must have 0"),
        ({"image_sizes": None}, "pixel_values and image_sizes; image_sizes is missing"),
        ({"pixel_values": None}, "pixel_values is missing"),
        ({"image_sizes": torch.tensor([[8, 8], [32, 20]])}, r"image 1 must be multiples of 8 .*got \[32, 20\]"),
        ({"image_sizes": torch.tensor([[8, 8], [40, 16]])}, r"image 1 .* up to \[32, 16\].*got \[40, 16\]"),
        ({"image_sizes": torch.tensor([[8, 0], [32, 16]])}, "image 0 must be multiples of 8"),
        ({"image_sizes": torch.tensor([[8, 8]])}, r"image_sizes must be integers \[2, 2\]"),
        ({"image_sizes": torch.ones(2, 2)}, "image_sizes must be integers"),
        ({"pixel_values": torch.zeros(2, 4, 32, 16)}, r"pixel_values must be floats \[images, 3, H, W\]"),
        ({"pixel_values": torch.zeros(2, 3, 32, 16).int()}, "pixel_values must be floats"),
        ({"image_sizes": torch.tensor([[8, 16], [32, 16]])}, "has 9 tokens of id 90, but 2 images must have 10"),
        (
            {"image_sizes": torch.tensor([[32, 16], [8, 8]])},
            "image 0 needs 2 tokens of id 90 in a row; those from token 0 of prompt 0 on have others between them",
        ),
    ],
)
def test_inputs_that_are_refused(model, inputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(changed(**inputs), max_new_tokens=2)


def test_images_of_a_square_tower_that_are_refused(tmp_path) -> None:
    case = CASES["llava"]
    save_llava(tmp_path, case)
    tower = load_layers(tmp_path, backends()[0]).towers[0]
    with pytest.raises(ValueError, match=r"pixel_values must be floats \[images, 3, 14, 14\]; got .*\[1, 3, 14, 13\]"):
        tower.read_inputs({"pixel_values": torch.zeros(1, 3, 14, 13)})
    assert tower.placeholder == IMAGE
