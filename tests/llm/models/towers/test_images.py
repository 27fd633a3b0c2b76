"""Prompts with images: greedy text is that of transformers, alone and in a batch, with every way of running a model."""

from __future__ import annotations

import shutil

import pytest
import torch

from pace.llm import LLMModel
from tests.editing import edit_tensors
from tests.llm.models.towers.checks import (
    check_copies_and_codes,
    check_drafts,
    check_every_way_to_run,
    check_greedy_text,
    check_preemption,
    check_samples_and_beams,
    check_text_alone,
)
from tests.llm.models.towers.seeing import (
    IMAGE,
    MODELS,
    NATIVE,
    inputs_of,
    load,
    results,
    run,
    save_seeing,
    with_other_names,
)
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

ROWS = [
    [(4, 6)],
    [],
    [(2, 2), (8, 4)],
    [(4, 4), (2, 10), (6, 2)],
    [(2, 2), (2, 4), (12, 6), (4, 2)],
]
"""Grids of the images of each prompt."""


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    oracle = save_seeing(folder, "qwen3_vl")
    return oracle, folder


@pytest.fixture(scope="module")
def model(seeing):
    with load(seeing[1]) as model:
        yield model


@pytest.mark.parametrize("model_type", sample(list(MODELS), lambda name: name in ("qwen3_vl", "qwen3_5")))
def test_greedy_text_is_that_of_transformers(model_type, tmp_path) -> None:
    oracle, batch = save_seeing(tmp_path, model_type), inputs_of(ROWS)
    with load(tmp_path, prefix_cache_bytes=0) as model:
        check_greedy_text(model, oracle, [inputs_of([grids], index) for index, grids in enumerate(ROWS)], batch)
        assert run(model, {name: tensor.numpy() for name, tensor in batch.items()}) == run(model, batch)


def test_a_mapping_is_taken_as_well(model) -> None:
    inputs = inputs_of([ROWS[0]])
    expected = run(model, inputs, 8)
    assert results(model.generate(inputs, max_new_tokens=8, logprobs=0)) == expected
    request = model.add_request(inputs, max_new_tokens=8)
    assert request.result().generated_token_ids[0] == expected[0][0]


def test_every_way_to_run_it_gives_the_same_text(seeing) -> None:
    check_every_way_to_run(seeing[1], inputs_of(ROWS))


def test_drafts_change_no_token(seeing, model) -> None:
    check_drafts(seeing[1], model, inputs_of(ROWS))


def test_preempted_prompts_are_computed_again(seeing, model) -> None:
    rows = [[(8, 8), (4, 6)], [(6, 10)], [(12, 4), (4, 4)], [(10, 10)]]
    expected = [run(model, inputs_of([grids], index), 60)[0] for index, grids in enumerate(rows)]
    check_preemption(seeing[1], inputs_of(rows), expected, 200_000)


def test_samples_and_beams_see_the_images(model) -> None:
    check_samples_and_beams(model, inputs_of([ROWS[2]], 2), IMAGE)


def test_the_cache_tells_images_apart(seeing) -> None:
    """Prompts have the same tokens, and one, the other or both images differ. Blocks before the first image that
    differs are reused, and all of them if none does."""
    tokens = [*range(2, 42), *[IMAGE] * 12, *range(42, 62), *[IMAGE] * 6, *range(62, 72)]
    images = {
        name: torch.randn(48, 96, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("ab")
    }
    images |= {
        name: torch.randn(24, 96, generator=torch.Generator().manual_seed(9 + seed)) for seed, name in enumerate("cd")
    }

    def inputs(names: str, first_grid=(8, 6)):
        return {
            "input_ids": torch.tensor([tokens]),
            "pixel_values": torch.cat([images[name] for name in names]),
            "image_grid_thw": torch.tensor([(1, *first_grid), (1, 4, 6)]),
        }

    with load(seeing[1], prefix_cache_bytes=0) as fresh, load(seeing[1]) as cached:
        for names, grid, reused in [
            ("ac", (8, 6), 0),
            ("ac", (8, 6), 80),
            ("bc", (8, 6), 32),
            ("ad", (8, 6), 64),
            ("bd", (8, 6), 64),
            ("ad", (8, 6), 80),
            ("ac", (6, 8), 32),
        ]:
            expected = results(fresh.generate(inputs(names, grid), max_new_tokens=8, logprobs=0))
            output = cached.generate(inputs(names, grid), max_new_tokens=8, logprobs=0)
            assert results(output) == expected, names
            assert output.metrics.num_reused_tokens == reused, (names, grid)
        cached._engine.check_idle()
        assert cached._engine.media.num_encoded <= 5, "each image is encoded once in each size"


def test_text_alone_has_the_bits_of_a_model_without_a_tower(seeing, model) -> None:
    check_text_alone(seeing[1], model, inputs_of([ROWS[0]]))
    text = {"input_ids": torch.arange(2, 60)[None]}
    with load(seeing[1], media=False) as plain:
        assert plain.memory_report().weights.keys() | {"Qwen3VisionTower"} == model.memory_report().weights.keys()
        if NATIVE:
            ours, theirs = (each._engine.model.program for each in (plain, model))
            kinds = [type(instruction).__name__ for instruction in ours.instructions]
            assert "PlaceRows" not in kinds
            assert [name for name in map(type, theirs.instructions) if name.__name__ != "PlaceRows"] == [
                *map(type, ours.instructions)
            ]
            for each in (plain, model):
                each.generate(**text, max_new_tokens=1)
            assert ours.num_barriers == theirs.num_barriers


def test_a_checkpoint_without_the_tower_is_a_text_model(seeing, tmp_path, caplog) -> None:
    folder = shutil.copytree(seeing[1], tmp_path / "text")
    with edit_tensors(folder) as state:
        for name in [name for name in state if "visual" in name]:
            del state[name]
    with load(folder) as model:
        model.generate([1, 2, 3], max_new_tokens=2)
        with pytest.raises(ValueError, match="takes no images"):
            model.generate(**inputs_of([ROWS[0]]))


def test_both_spellings_of_names(seeing, model, tmp_path) -> None:
    save_seeing(tmp_path, "qwen3_vl")
    with_other_names(tmp_path)
    batch = inputs_of(ROWS[:3])
    with load(tmp_path) as other:
        assert run(other, batch, 5) == run(model, batch, 5)


@pytest.mark.skipif(not NATIVE, reason="needs the kernels")
def test_packed_copies_and_quantised_weights_have_the_tower(seeing, tmp_path) -> None:
    check_copies_and_codes(seeing[1], inputs_of([ROWS[2]], 2), tmp_path)
    with load(seeing[1], quantization="int8") as quantised:
        assert not quantised._engine.model.towers[0].merger.mlp.mlp.up.plan.layouts


def test_a_tower_that_raises_fails_its_own_prompt(seeing) -> None:
    with load(seeing[1]) as model:
        tower, inputs = model._engine.model.towers[0], inputs_of([ROWS[0]])
        expected = run(model, inputs, 4)
        read = tower.positions_of

        def broken(grid):
            raise RuntimeError("no position")

        tower.positions_of = broken
        request = model.add_request([1, 2, 3], max_new_tokens=30)
        with pytest.raises(RuntimeError, match="no position"):
            model.generate(**inputs_of([ROWS[2]], 2), max_new_tokens=4)
        assert len(request.result().generated_token_ids[0]) == 30
        tower.positions_of = read
        assert run(model, inputs, 4) == expected
        model._engine.check_idle()


# -- what is refused


def changed(**tensors):
    inputs = inputs_of([ROWS[2]], 2)
    return {name: value for name, value in (inputs | tensors).items() if value is not None}


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            lambda: changed(pixel_values=None, image_grid_thw=None),
            "the prompt has 9 tokens of id 90, but 0 images must have 0",
        ),
        (
            lambda: changed(input_ids=inputs_of([ROWS[0]])["input_ids"], attention_mask=None),
            "the prompt has 6 tokens of id 90, but 2 images must have 9",
        ),
        (lambda: changed(image_grid_thw=None), "pixel_values and image_grid_thw; image_grid_thw is missing"),
        (lambda: changed(pixel_values=None), "pixel_values is missing"),
        (
            lambda: changed(image_grid_thw=torch.tensor([[1, 2, 2], [1, 8, 3]])),
            r"image 1 must be one frame.*\[1, 8, 3\]",
        ),
        (lambda: changed(image_grid_thw=torch.tensor([[2, 2, 2], [1, 8, 4]])), "image 0 must be one frame"),
        (lambda: changed(image_grid_thw=torch.tensor([[1, 2, 2], [1, -8, -4]])), "image 1 must be one frame"),
        (lambda: changed(pixel_values=torch.zeros(36, 95)), r"pixel_values must be floats \[36, 96\].*\[36, 95\]"),
        (lambda: changed(pixel_values=torch.zeros(35, 96)), r"pixel_values must be floats \[36, 96\]"),
        (lambda: changed(pixel_values=torch.zeros(36, 96).int()), "pixel_values must be floats"),
        (
            lambda: {
                "input_ids": torch.tensor([[1, IMAGE, 2, IMAGE]]),
                "pixel_values": torch.zeros(8, 96),
                "image_grid_thw": torch.tensor([[1, 2, 4]]),
            },
            "image 0 needs 2 tokens of id 90 in a row; those from token 1 of prompt 0 on have others between them",
        ),
        (lambda: changed(pixel_values_videos=torch.zeros(1)), "pixel_values_videos"),
    ],
)
def test_inputs_that_are_refused(model, inputs, message) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(inputs(), max_new_tokens=2)


def test_inputs_in_two_forms_or_none(model) -> None:
    with pytest.raises(TypeError, match="given twice"):
        model.generate([1, 2], **inputs_of([ROWS[0]]))
    with pytest.raises(TypeError, match="none are given"):
        model.generate(max_new_tokens=3)
    with pytest.raises(TypeError, match="media must be True or False"):
        LLMModel("x", media="image")


def test_a_model_of_text_refuses_images(tmp_path) -> None:
    from tests.llm.models.variants import save_tiny

    save_tiny(tmp_path, "qwen3", {})
    with load(tmp_path) as model, pytest.raises(ValueError, match="Qwen3ForCausalLM takes no images"):
        model.generate(**inputs_of([ROWS[0]]))
