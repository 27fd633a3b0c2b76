"""What holds for every model with a tower: its rows and texts are those of transformers, and have the same bits however
they are computed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig
from pace.llm.models.model_list import read_config
from pace.llm.processors.registry import load_processors
from pace.llm.runners import EagerRunner, ProgramRunner
from pace.media.media import Media
from tests.llm.models.towers.seeing import NATIVE, NEW, load, oracle_tokens, results, run, run_to_end
from tests.support import backend, backends, load_model

Inputs = dict[str, Any]

# -- rows of towers


def load_layers(folder: Path, ops: str, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a folder, with its towers, for these operations."""
    return load_model(folder, dtype, backend(ops), media=True)


def rows_of(runner: Any, inputs: Inputs) -> list[Tensor]:
    """Rows of each image in the arrays of a processor."""
    return [run_to_end(runner.encode(media)) for media in runner.towers[0].read_inputs(inputs)]


@torch.no_grad()
def oracle_rows(oracle: torch.nn.Module, inputs: Inputs) -> list[Tensor]:
    """The same in transformers."""
    given = inputs | {"pixel_values": inputs["pixel_values"].to(oracle.dtype)}
    return list(oracle.model.get_image_features(**given, return_dict=True).pooler_output)


def check_rows(folder: Path, inputs: Inputs, expected: Sequence[Tensor], tower: int = 0, bound: float = 1e-5) -> None:
    """The rows of each image or clip are the `expected` ones, up to `bound` times the largest. A program gives the bits
    of single operations, with any number of threads and in any order of media."""
    for ops in backends():
        model = load_layers(folder, ops)
        runner, media = EagerRunner(model), model.towers[tower].read_inputs(inputs)
        ours = [run_to_end(runner.encode(medium)) for medium in media]
        for found, wanted in zip(ours, expected, strict=True):
            assert found.shape == wanted.shape == (len(wanted), model.towers[tower].width)
            assert (found - wanted).abs().max() <= bound * wanted.abs().max()
        spreads = {found.std().item() for found in ours}
        assert len(spreads) == len(ours) and max(spreads) > 0.1
        if ops == "native":
            from pace import _C

            program, pairs = ProgramRunner(model), list(zip(media, ours))
            for threads, ordered in ((1, pairs), (2, pairs[::-1])):
                _C.set_num_threads(threads)
                for medium, found in ordered:
                    assert torch.equal(run_to_end(program.encode(medium)), found), threads


def check_bfloat16_rows(
    folder: Path,
    inputs: Inputs,
    oracle: torch.nn.Module,
    oracle_rows: Callable[[torch.nn.Module, Inputs], Sequence[Tensor]] = oracle_rows,
) -> None:
    """Rows of weights in bfloat16 are as near to the exact ones as those of transformers. The weights are the same
    numbers, and activations are float32 here."""
    from transformers import AutoModelForImageTextToText

    half = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    exact, usual = oracle_rows(oracle, inputs), oracle_rows(half, inputs)
    for ops in backends():
        ours = rows_of(EagerRunner(load_layers(folder, ops, torch.bfloat16)), inputs)
        for found, theirs, wanted in zip(ours, usual, exact, strict=True):
            assert (found - wanted).square().mean() <= (theirs.float() - wanted).square().mean()


def check_prepared_image(folder: Path, image: Any) -> tuple[Media, list[Media]]:
    """An image that pace's processor prepared has the rows of its arrays. Returns it, and what the tower reads of its
    arrays."""
    processor = load_processors(folder, json.loads((folder / "config.json").read_text())).image
    runner, media = EagerRunner(load_layers(folder, backends()[-1])), processor.prepare(image)
    tiles = runner.towers[0].read_inputs(processor.arrays([media]))
    rows = run_to_end(runner.encode(media))
    assert rows.shape == (media.num_tokens, runner.towers[0].width)
    assert torch.equal(rows, torch.cat([run_to_end(runner.encode(tile)) for tile in tiles]))
    return media, tiles


def check_blank_images(folder: Path, num_tokens: dict[int, int]) -> None:
    """An image for measurements has nearly the wanted number of tokens. `num_tokens`: wanted -> its own."""
    runner = EagerRunner(load_layers(folder, backends()[-1]))
    for wanted, expected in num_tokens.items():
        media = runner.towers[0].blank(wanted)
        assert media.num_tokens == len(run_to_end(runner.encode(media))) == expected, wanted


# -- texts


def check_greedy_text(
    model: LLMModel,
    oracle: torch.nn.Module,
    prompts: Sequence[Inputs],
    batch: Inputs,
    counts: Sequence[int] = (),
    budgets: Sequence[int] = (7,),
) -> list[tuple[list[int], list[float]]]:
    """Texts about prompts alone are those of transformers, and about different prompts they differ. In a batch that is
    padded on the left, and in steps of at most `budgets` tokens, they have the same bits. `counts`: tokens of each
    prompt that are compared with transformers, by default all. Returns the results of the prompts."""
    alone = []
    for inputs, count in zip(prompts, counts or [NEW] * len(prompts), strict=True):
        alone += run(model, inputs)
        assert alone[-1][0][:count] == oracle_tokens(oracle, inputs, count), f"prompt {len(alone) - 1}"
    assert len({tuple(tokens) for tokens, _ in alone}) == len(prompts)
    assert run(model, batch) == alone
    for budget in budgets:
        model._engine.scheduler.max_tokens_per_step = budget
        assert run(model, batch) == alone, budget
    return alone


WAYS = ({"kv_cache_type": "dynamic"}, {"num_threads": 1}, {"num_threads": 5}, {"spec_config": PromptLookupConfig()})


def check_every_way_to_run(folder: Path, inputs: Inputs, ways: Sequence[dict[str, Any]] = WAYS) -> None:
    """Other backends give the same texts. Single operations and options (`ways`) also give the same bits."""
    from pace import _C

    with load(folder) as model:
        expected = run(model, inputs, 12)
    for name in ("native-eager", "torch", "attention=torch") if NATIVE else ():
        with load(folder, backend=name) as other:
            found = run(other, inputs, 12)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected], name
        assert found == expected or name != "native-eager"
    for options in ways:
        with load(folder, **options) as other:
            assert run(other, inputs, 12) == expected, options
        _C.set_num_threads(2)


def check_drafts(folder: Path, model: LLMModel, inputs: Inputs) -> None:
    """Drafts change no token. A draft model reads placeholders as text, so it may propose other tokens, which are not
    accepted."""
    expected = run(model, inputs, 40)
    for spec_config in (PromptLookupConfig(), DraftModelConfig(folder)):
        with load(folder, spec_config=spec_config) as drafted:
            output = drafted.generate(**inputs, max_new_tokens=40, logprobs=0)
        assert output.metrics.num_drafted_tokens and results(output) == expected, spec_config


def check_preemption(folder: Path, inputs: Inputs, expected: list, cache_bytes: int) -> None:
    """A cache for one or two prompts of the batch at once gives the expected texts. Images are encoded again."""
    with load(folder, kv_cache_bytes=cache_bytes, prefix_cache_bytes=0) as small:
        output = small.generate(**inputs, max_new_tokens=len(expected[0][0]), logprobs=0)
    assert results(output) == expected and output.metrics.num_preemptions > 0


def check_samples_and_beams(model: LLMModel, inputs: Inputs, placeholder: int) -> None:
    """Samples that can only be greedy are the greedy text, and beams differ without the images."""
    ((expected, _),) = run(model, inputs, 10)
    samples = model.generate(**inputs, max_new_tokens=10, num_return_sequences=3, do_sample=True, top_k=1)
    assert samples.generated_token_ids == [expected] * 3
    beams = model.generate(**inputs, max_new_tokens=10, num_beams=2, do_sample=False)
    plain = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    plain["input_ids"] = plain["input_ids"].where(plain["input_ids"] != placeholder, 5)
    without = model.generate(**plain, max_new_tokens=10, num_beams=2, do_sample=False)
    assert beams.generated_token_ids != without.generated_token_ids


def check_copies_and_codes(folder: Path, inputs: Inputs, copies: Path) -> None:
    """Packed copies in the folder `copies` give the same bits. Codes and bfloat16 work, and the matrices of a tower
    have codes but for the first one."""
    with load(folder) as model:
        expected = run(model, inputs, 5)
    for _ in range(2):
        with load(folder, weights_cache=copies) as copied:
            assert run(copied, inputs, 5) == expected
    with load(folder, quantization="int8") as quantised, load(folder, dtype="bfloat16") as half:
        assert quantised.generate(**inputs, max_new_tokens=5) and half.generate(**inputs, max_new_tokens=5)
        tower = quantised._engine.model.towers[0]
        assert tower.blocks[0].block.mixer.qkv.plan.layouts and not tower.patches.matrix.plan.layouts


def check_text_alone(folder: Path, model: LLMModel, inputs: Inputs) -> None:
    """Without a tower, texts have the same bits, and images are refused."""
    text = {"input_ids": torch.arange(7, 60)[None]}
    with load(folder, media=False) as plain:
        assert run(plain, text, 20) == run(model, text, 20)
        with pytest.raises(ValueError, match="takes no images.*leave out pixel_"):
            plain.generate(**inputs)


# -- config.json


def check_refused_config(raw: dict[str, Any], error: type[Exception], message: str) -> None:
    """A wrong field about images is named, with the way to load only the text model."""
    with pytest.raises(error, match=f"{message}.*; media=False loads only the text model"):
        read_config(raw, media=True)
    assert read_config(raw)[1].vision is None
