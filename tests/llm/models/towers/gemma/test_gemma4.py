"""Gemma 4 with images: rows of its towers and greedy text are those of transformers, with every way of running it."""

from __future__ import annotations

import pytest
import torch

from tests.llm.models.towers.checks import (
    check_bfloat16_rows,
    check_blank_images,
    check_every_way_to_run,
    check_greedy_text,
    check_rows,
    oracle_rows,
)
from tests.llm.models.towers.gemma.gemma4_models import (
    IMAGE,
    MODELS,
    SAMPLES,
    SOUND,
    P,
    arrays,
    inputs_of,
    save_gemma4,
)
from tests.llm.models.towers.seeing import load, oracle_tokens, results, run
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

GRIDS = [(1, 1), (2, 8), (4, 3), (1, 16), (4, 4)]
"""Rows and columns of tokens."""
ROWS = [[(3, 4)], [], [(1, 2), (4, 4)], [(2, 2), (1, 9), (3, 5)]]
BY_SIZE = sample(list(MODELS), lambda name: name == "e2b")


@pytest.mark.parametrize(
    "name, vision",
    [
        ("e2b", {}),
        ("26b", {}),
        ("26b", {"pooling_kernel_size": 4, "num_key_value_heads": 4, "hidden_activation": "silu"}),
        ("12b", {}),
    ],
)
def test_rows_are_those_of_transformers(name, vision, tmp_path) -> None:
    """Sums of about 100 terms in 3 layers differ by a few rounding errors of the largest value."""
    oracle = save_gemma4(tmp_path, name, vision=vision)
    grids = GRIDS if not vision else [(2, 2), (2, 8), (4, 2)]
    given = arrays(grids, 3, name == "12b")
    check_rows(tmp_path, given, oracle_rows(oracle, given))
    check_blank_images(tmp_path, {11: 9})  # 3 rows of 3


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_rows_are_as_near_as_those_of_transformers(name, tmp_path) -> None:
    check_bfloat16_rows(tmp_path, arrays(GRIDS, 3, name == "12b"), save_gemma4(tmp_path, name))


@torch.no_grad()
def check_first_logits(model, oracle, inputs) -> None:
    """Log-probabilities of the token after a prompt. They move by 0.1 with what rows of an image see, and by 1e-5 with
    rounding."""
    ((first,),) = model.generate(**inputs, max_new_tokens=1, logprobs=20).logprobs
    wanted = oracle.generate(
        **inputs, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
    ).logits[0][0].log_softmax(-1)  # fmt: skip
    assert len(first.top) == 20
    for token, value in first.top:
        assert value == pytest.approx(float(wanted[token]), abs=2e-4)


@pytest.mark.parametrize("name", BY_SIZE)
def test_greedy_text_is_that_of_transformers(name, tmp_path) -> None:
    oracle = save_gemma4(tmp_path, name)
    each = [inputs_of([grids], name, index) for index, grids in enumerate(ROWS)]
    with load(tmp_path, prefix_cache_bytes=0) as model:
        batch = inputs_of(ROWS, name)
        for inputs in each:
            check_first_logits(model, oracle, inputs)
        alone = check_greedy_text(model, oracle, each, batch, budgets=(7, 1))
    with load(tmp_path) as model:
        for _ in range(2):
            assert run(model, batch) == alone, "with prefixes"
        assert model._engine.media.num_encoded == 6
        scores = model.score([inputs["input_ids"][0].tolist() for inputs in each[1:2]])
        assert len(scores) == 1


@pytest.mark.thorough
@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_run_it_gives_the_same_text(name, tmp_path) -> None:
    save_gemma4(tmp_path, name)
    check_every_way_to_run(tmp_path, inputs_of(ROWS, name))


@pytest.mark.parametrize("name", BY_SIZE)
def test_prefixes_that_end_within_an_image(name, tmp_path) -> None:
    """The text after an image of three blocks differs, so that only its first two blocks are known. Where an image is
    seen beyond windows, it is then computed as a whole."""
    save_gemma4(tmp_path, name)
    first = {**inputs_of([[(4, 8), (2, 2)]], name, 1)}
    other = {**first, "input_ids": first["input_ids"].clone()}
    other["input_ids"][0, -12] = 7
    position = int((first["input_ids"] != other["input_ids"])[0].nonzero())
    end = 6 + 32
    assert end < position and position // 16 * 16 < end, "the block has both the end of the image and the change"
    with load(tmp_path, prefix_cache_bytes=0) as fresh, load(tmp_path) as cached:
        for inputs in (first, other, first):
            output = cached.generate(**inputs, max_new_tokens=8, logprobs=0)
            assert results(output) == run(fresh, inputs, 8)
            if inputs is other:
                assert output.metrics.num_reused_tokens == (0 if name == "12b" else 32)
        cached._engine.check_idle()


def test_text_alone_needs_no_tower(tmp_path) -> None:
    save_gemma4(tmp_path, "e2b")
    text = {"input_ids": torch.arange(6, 50)[None]}
    with load(tmp_path, media=False) as plain, load(tmp_path) as model:
        assert run(plain, text, 8) == run(model, text, 8)
        assert (
            plain.memory_report().weights.keys() | {"Gemma4VisionTower", "Gemma4AudioTower"}
            == model.memory_report().weights.keys()
        )
        with pytest.raises(ValueError, match="takes no image"):
            plain.generate(**inputs_of([[(2, 2)]], "e2b"))


def clips(name: str, *frames: int) -> dict[str, torch.Tensor]:
    """The arrays of clips of these frames."""
    features = torch.randn(len(frames), max(frames), SAMPLES, generator=torch.Generator().manual_seed(len(frames)))
    mask = torch.arange(max(frames)) < torch.tensor(frames)[:, None]
    return {"input_features": features * mask[..., None], "input_features_mask": mask}


def num_tokens(name: str, frames: int) -> int:
    return frames if name == "12b" else -(-frames // 4)


@pytest.mark.parametrize(
    "audio",
    [
        {},
        *(
            pytest.param(fields, marks=pytest.mark.thorough)
            for fields in (
                {"use_clipped_linears": False},
                {"attention_chunk_size": 7, "attention_context_left": 3, "attention_context_right": 3},
                {"hidden_act": "gelu"},
            )
        ),
    ],
    ids=str,
)
def test_rows_of_sound_are_those_of_transformers(audio, tmp_path) -> None:
    oracle = save_gemma4(tmp_path, "e2b", audio=audio)
    given = clips("e2b", 61, 5, 1, 34)
    with torch.no_grad():
        out = oracle.model.get_audio_features(**given, return_dict=True)
    expected = [rows[mask] for rows, mask in zip(out.pooler_output, out.attention_mask)]
    check_rows(tmp_path, given, expected, tower=1, bound=4e-5)


@pytest.mark.parametrize("name", sample(["e2b", "12b"], lambda name: name == "e2b"))
def test_sound_and_images_in_a_prompt(name, tmp_path) -> None:
    """Rows of a clip see those before them."""
    oracle = save_gemma4(tmp_path, name)
    given = inputs_of([[(3, 4)]], name, 2)
    for frames in ([9, 5], [5]):
        first, *rest = [[7, *[SOUND] * num_tokens(name, count), 8] for count in frames]
        ids = torch.tensor([[*first, *given["input_ids"][0].tolist(), *sum(rest, [])]])
        inputs = {
            **given,
            **clips(name, *frames),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "mm_token_type_ids": (ids == IMAGE).int() + 3 * (ids == SOUND).int(),
        }
        with load(tmp_path) as model:
            assert [tower.kind for tower in model._engine.model.towers] == ["image", "audio"]
            ((tokens, _),) = found = run(model, inputs)
            assert tokens == oracle_tokens(oracle, inputs)
            check_first_logits(model, oracle, inputs)
            model._engine.scheduler.max_tokens_per_step = 3
            assert run(model, inputs) == found
            with pytest.raises(ValueError, match=r"input_features must be floats \[clips, frames, 16\]"):
                model.generate(**{**inputs, "input_features": torch.zeros(1, 9, 15)})
            with pytest.raises(ValueError, match="input_features_mask of clip 0"):
                model.generate(**{**inputs, "input_features_mask": torch.zeros_like(inputs["input_features_mask"])})


def changed(**tensors):
    return {**inputs_of([[(1, 2), (2, 2)]], "e2b"), **tensors}


def places(*rows) -> torch.Tensor:
    return torch.tensor(rows)[None]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_position_ids": None}, "image_position_ids is missing"),
        ({"pixel_values": None}, "pixel_values is missing"),
        ({"pixel_values": torch.zeros(2, P, 47)}, r"pixel_values must be floats \[images, P, 48\]"),
        ({"pixel_values": torch.zeros(2, 60, 48)}, r"image_position_ids must be integers \[2, 60, 2\]"),
        ({"image_position_ids": torch.zeros(2, P, 2)}, "must be integers"),
        ({"image_position_ids": torch.zeros(2, P, 2).long()}, "image_position_ids of image 0 must be column and row"),
        ({"image_position_ids": torch.full((2, P, 2), -1)}, "image_position_ids of image 0 must be column and row"),
        ({"pixel_values_videos": torch.zeros(1)}, "video is not supported"),
        ({"input_features": torch.zeros(1)}, "input_features_mask is missing"),
    ],
    ids=str,
)
def test_inputs_that_are_refused(fields, message, refusing) -> None:
    with pytest.raises(ValueError, match=message):
        refusing.generate(**{name: value for name, value in changed(**fields).items() if value is not None})


@pytest.fixture(scope="module")
def refusing(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refusing")
    save_gemma4(folder, "e2b")
    with load(folder) as model:
        yield model
