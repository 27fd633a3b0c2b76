"""Gemma 3 with images: rows of the tower and greedy text are those of transformers, and images are seen whole."""

from __future__ import annotations

import pytest
import torch

from pace.llm import PromptLookupConfig
from pace.llm.models.model_list import read_config
from tests.editing import rename_tensors
from tests.llm.models.towers.checks import (
    check_bfloat16_rows,
    check_drafts,
    check_every_way_to_run,
    check_greedy_text,
    check_preemption,
    check_refused_config,
    check_rows,
    check_samples_and_beams,
    check_text_alone,
    oracle_rows,
)
from tests.llm.models.towers.gemma.looking import (
    BEGIN,
    END,
    IMAGE,
    NEW_NAMES,
    PUBLISHED_NAMES,
    TEXT,
    TOKENS,
    VISION,
    inputs_of,
    pixels,
    save_looking,
)
from tests.llm.models.towers.seeing import load, oracle_tokens, results, run
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

COUNTS = [1, 0, 3, 2, 1]
"""Images of each prompt."""
VARIANTS = {
    "plain": ({}, {}),
    "head": ({"vision_use_head": True}, {}),
    "border": ({"image_size": 31, "num_attention_heads": 3, "hidden_act": "gelu"}, {"mm_tokens_per_image": 4}),
    "every patch": ({"num_hidden_layers": 1}, {"mm_tokens_per_image": 36}),
}
"""Fields of `vision_config` and of the whole. "border": patches do not fill the image, and pools not the patches."""


@pytest.fixture(scope="module")
def looking(tmp_path_factory):
    folder = tmp_path_factory.mktemp("looking")
    return save_looking(folder), folder


@pytest.fixture(scope="module")
def model(looking):
    with load(looking[1]) as model:
        yield model


@pytest.mark.parametrize("name", sample(list(VARIANTS), lambda name: name == "border"))
def test_rows_are_those_of_transformers(name, tmp_path) -> None:
    vision, fields = VARIANTS[name]
    oracle = save_looking(tmp_path, vision=vision, **fields)
    inputs = {"pixel_values": pixels(3, 1, (VISION | vision)["image_size"])}
    expected = oracle_rows(oracle, inputs)
    check_rows(tmp_path, inputs, expected)
    for names in (PUBLISHED_NAMES, NEW_NAMES):
        rename_tensors(tmp_path, names)
        check_rows(tmp_path, inputs, expected)


@pytest.mark.parametrize("counts", [(3, 0), pytest.param(COUNTS, marks=pytest.mark.thorough)])
def test_greedy_text_is_that_of_transformers(looking, counts) -> None:
    """Also in steps with fewer tokens than an image has."""
    oracle, folder = looking
    prompts = [inputs_of([count], index) for index, count in enumerate(counts)]
    with load(folder, prefix_cache_bytes=0) as model:
        check_greedy_text(model, oracle, prompts, inputs_of(counts), budgets=(7, 13, 1))


def test_rows_of_an_image_see_those_after_them(looking, model) -> None:
    """Placeholders alone say where images are; without `token_type_ids`, transformers sees them row by row."""
    inputs = inputs_of([2], 1)
    without = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    ((tokens, numbers),) = run(model, without, 1)
    with torch.no_grad():
        seen, unseen = [looking[0](**given).logits[0, -1].log_softmax(0)[tokens[0]] for given in (inputs, without)]
    assert abs(numbers[0] - seen) < 1e-4 and abs(seen - unseen) > 1e-3


@pytest.mark.thorough
def test_every_way_to_run_it_gives_the_same_text(looking, model) -> None:
    check_every_way_to_run(looking[1], inputs_of(COUNTS))
    check_drafts(looking[1], model, inputs_of(COUNTS))
    inputs = inputs_of([3, 2, 3, 1], 5)
    check_preemption(looking[1], inputs, run(model, inputs, 90), 250_000)


def test_a_prefix_may_end_within_an_image(looking) -> None:
    """The rest of the image sees all of it, as its cached rows do."""
    image = [BEGIN, *[IMAGE] * TOKENS, END]
    start = [*range(2, 12), *image]  # the block of 16 ends with its fifth row
    ends = [[*range(20, 30)], [*range(40, 70)], [*range(20, 30), *image, 7]]

    def inputs(end: list[int], seed: int) -> dict[str, torch.Tensor]:
        tokens = start + end
        return {"input_ids": torch.tensor([tokens]), "pixel_values": pixels(tokens.count(BEGIN), seed)}

    with load(looking[1], prefix_cache_bytes=0) as fresh, load(looking[1]) as cached:
        for seed, end, reused in [(1, 0, 0), (1, 1, 16), (2, 1, 0), (1, 2, 16), (1, 0, 16), (1, 2, 32)]:
            expected = results(fresh.generate(inputs(ends[end], seed), max_new_tokens=8, logprobs=0))
            output = cached.generate(inputs(ends[end], seed), max_new_tokens=8, logprobs=0)
            assert results(output) == expected, (seed, end)
            assert output.metrics.num_reused_tokens >= reused, (seed, end)
        cached._engine.check_idle()


@pytest.mark.thorough
def test_beams_are_those_of_transformers(looking, model) -> None:
    inputs = inputs_of([2], 3)
    with torch.no_grad():
        expected = looking[0].generate(**inputs, max_new_tokens=12, num_beams=3, do_sample=False)
    found = model.generate(**inputs, max_new_tokens=12, num_beams=3, do_sample=False)
    assert torch.equal(found.output_token_ids, expected)


@pytest.mark.thorough
def test_bfloat16_rows_are_as_near_as_those_of_transformers(looking) -> None:
    check_bfloat16_rows(looking[1], {"pixel_values": pixels(4, 3)}, looking[0])


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"dtype": "bfloat16"}])
def test_batches_and_steps_change_no_bit_in_other_formats(looking, options) -> None:
    with load(looking[1], prefix_cache_bytes=0, **options) as model:
        alone = [run(model, inputs_of([count], index), 8)[0] for index, count in enumerate(COUNTS)]
        for budget in (512, 11):
            model._engine.scheduler.max_tokens_per_step = budget
            assert run(model, inputs_of(COUNTS), 8) == alone, budget


def test_sessions_see_images_whole(looking, model, tmp_path) -> None:
    """Images in two turns. The second is dropped, then appended to a fork, and to a session that was saved."""
    whole = inputs_of([2], 1)
    tokens, images = whole["input_ids"][0], whole["pixel_values"]
    cut = len(tokens) - tokens.tolist()[::-1].index(BEGIN) - 1
    turns = [
        {"input_ids": part[None], "pixel_values": image[None]}
        for part, image in zip((tokens[:cut], tokens[cut:]), images, strict=True)
    ]
    with model.session() as session:
        expected = session.append(whole, "all")
        assert session.append([5]).log_softmax(1).isfinite().all()
        session.truncate(cut)
        with pytest.raises(ValueError, match="an image or a clip, which truncate keeps or drops as a whole"):
            session.truncate(cut - len(tokens) // 4)
        with session.fork() as fork:
            assert torch.equal(fork.append(turns[1], "all"), expected[cut:])
        session.save(tmp_path / "saved")
    with load(looking[1], prefix_cache_bytes=0) as other:
        with other.load_session(tmp_path / "saved") as session:
            assert torch.equal(session.append(turns[1], "all"), expected[cut:])
            assert session.tokens == tokens.tolist()
        with other.session() as session:
            assert torch.equal(session.append(turns[0], "all"), expected[:cut])
            assert torch.equal(session.append(turns[1], "all"), expected[cut:])


@pytest.mark.thorough
def test_a_placeholder_outside_of_the_vocabulary(looking, model, tmp_path) -> None:
    """Its embedding is never asked for, which is so in transformers, too. Penalties and drafts do not meet it."""
    oracle = save_looking(tmp_path, image_token_index=262144)
    inputs = inputs_of([2, 0, 1], 1)
    expected = run(model, inputs, 12)
    inputs["input_ids"] = inputs["input_ids"].where(inputs["input_ids"] != IMAGE, 262144)
    with load(tmp_path, spec_config=PromptLookupConfig()) as other:
        assert run(other, inputs, 12) == expected
        one = {name: value[:1] if name != "pixel_values" else value[:2] for name, value in inputs.items()}
        assert (
            oracle_tokens(oracle, {name: one[name] for name in one if name != "attention_mask"}, 12) == expected[0][0]
        )
        output = other.generate(**inputs, max_new_tokens=12, repetition_penalty=1.2, no_repeat_ngram_size=3)
        assert torch.equal(output.output_token_ids[:, : inputs["input_ids"].shape[1]], inputs["input_ids"])
        with other.session() as session:
            session.append(one)
            session.save(tmp_path / "saved")
        other.load_session(tmp_path / "saved").close()
        with pytest.raises(ValueError, match="holds the token id 262144"):
            other.generate([[5, 262144]], max_new_tokens=1)


def test_samples_and_text_alone(looking, model) -> None:
    inputs = inputs_of([2], 2)
    check_samples_and_beams(model, inputs, IMAGE)
    check_text_alone(looking[1], model, inputs)


def test_inputs_that_are_refused(model) -> None:
    inputs = inputs_of([2], 2)
    for images, message in (
        (torch.zeros(2, 3, 24, 20), r"floats \[images, 3, 24, 24\]; got torch.float32 \[2, 3, 24, 20\]"),
        (torch.zeros(2, 3, 24, 24).int(), "pixel_values must be floats"),
        (torch.zeros(3, 24, 24), "pixel_values must be floats"),
        (torch.zeros(1, 3, 24, 24), "the prompt has 18 tokens of id 90, but 1 image must have 9"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**inputs | {"pixel_values": images}, max_new_tokens=1)


@pytest.mark.parametrize(
    ("fields", "vision", "error", "message"),
    [
        ({"mm_tokens_per_image": 8}, {}, ValueError, "mm_tokens_per_image must be a square; got 8"),
        ({"image_token_index": "x"}, {}, ValueError, "image_token_index must be a token's id"),
        ({}, {"image_size": [24, 20]}, NotImplementedError, r"vision_config.image_size: \[24, 20\] .* equal sides"),
        ({}, {"image_size": 3}, ValueError, "image_size must be at least patch_size; got 3 and 4"),
        ({}, {"num_attention_heads": 5}, ValueError, "must be a multiple of num_attention_heads; got 24 and 5 heads"),
        ({}, {"hidden_act": "mish"}, NotImplementedError, r"vision_config\.hidden_act.*mish"),
        ({}, {"model_type": "clip_vision_model"}, NotImplementedError, "model_type = 'clip_vision_model'"),
        ({}, {"spatial_merge_size": 2}, NotImplementedError, "vision_config.spatial_merge_size = 2 is not implemented"),
    ],
)
def test_configs_that_are_refused(fields, vision, error, message) -> None:
    config = {
        "model_type": "gemma3", "text_config": TEXT, "vision_config": VISION | vision, "mm_tokens_per_image": TOKENS,
        "image_token_index": IMAGE, **fields,
    }  # fmt: skip
    check_refused_config(config, error, message)


@pytest.mark.parametrize("num_tokens", sample([49, 25], lambda count: count == 25))
def test_a_tower_that_cannot_be_used_is_left_out(num_tokens, tmp_path, caplog) -> None:
    """Text works, which is so in transformers, too."""
    oracle = save_looking(tmp_path, mm_tokens_per_image=num_tokens)
    with load(tmp_path) as model:
        assert f"mm_tokens_per_image = {num_tokens} is not the square of a part of 6" in caplog.text
        text = {"input_ids": torch.arange(2, 20)[None]}
        assert run(model, text, 8)[0][0] == oracle_tokens(oracle, text, 8)
        with pytest.raises(ValueError, match="takes no images"):
            model.generate(**inputs_of([1]))


def test_fields_that_are_left_out_have_the_defaults_of_transformers() -> None:
    from transformers import Gemma3Config

    whole = Gemma3Config(vision_config=VISION).to_dict()
    assert whole["mm_tokens_per_image"] == 256 and whole["image_token_index"] == 262144
    published = {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "model_type": "siglip_vision_model",
        "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
    }  # fmt: skip
    text = {"model_type": "gemma3_text", "hidden_size": 2560}
    short = {"model_type": "gemma3", "text_config": text, "vision_config": published}
    written = Gemma3Config(text_config=text, vision_config=published).to_dict()
    vision, other = (read_config(each, media=True)[1].vision for each in (short, written))
    assert vision == other and (vision.patches_per_side, vision.tokens_per_side, vision.head_dim) == (64, 16, 72)
