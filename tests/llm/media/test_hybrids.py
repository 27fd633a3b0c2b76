"""Images in models with states: the same bits for every way to run them, after preemption, and from cached states."""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("transformers")

from pace import _C
from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig
from tests.llm.models.towers.checks import check_samples_and_beams
from tests.llm.models.towers.seeing import IMAGE, inputs_of, results, save_seeing, with_other_names
from tests.llm.models.towers.test_images import ROWS
from tests.support import backends
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif("native" not in backends(), reason="the native kernels are not built"),
]


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("seeing")
    save_seeing(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    with load(folder) as model:
        yield model


def load(folder, **options) -> LLMModel:
    return LLMModel(folder, **{"dtype": "float32", "progress": False, "kv_cache_bytes": "16MiB", **options})


def run(model, inputs, count: int = 24, **fields) -> list:
    return results(model.generate(**inputs, max_new_tokens=count, logprobs=0, **fields))


def test_every_way_to_run_it_gives_the_same_text(folder, model) -> None:
    batch = inputs_of(ROWS)
    expected = run(model, batch)
    try:
        for options in (
            {"backend": "native-eager"}, {"num_threads": 1}, {"num_threads": 5}, {"kv_cache_type": "dynamic"},
            {"spec_config": PromptLookupConfig()}, {"spec_config": DraftModelConfig(folder)},
            {"prefix_cache_bytes": 0, "media_cache_bytes": 0},
        ):  # fmt: skip
            with load(folder, **options) as other:
                assert run(other, batch) == expected, options
                other._engine.scheduler.max_tokens_per_step = 5
                assert run(other, batch) == expected, options
                other._engine.check_idle()
    finally:
        _C.set_num_threads(2)
    with load(folder, backend="torch") as other:
        assert [tokens for tokens, _ in run(other, batch)] == [tokens for tokens, _ in expected]


def test_preempted_prompts_are_computed_again(folder, model, monkeypatch) -> None:
    """There are two slots for states, so a sequence of low priority loses its own, and its images."""
    rows = [[(8, 8), (4, 6)], [(6, 10)], [(12, 4), (4, 4)], [(10, 10)]]
    batch = inputs_of(rows)
    expected = [run(model, inputs_of([grids], index), 20)[0] for index, grids in enumerate(rows)]
    inputs = inputs_of([rows[0]])
    ((long, _),) = run(model, inputs, 400)
    cache = model._engine.cache
    small = 80 * cache.spec.block_bytes + 2 * cache.slot_bytes
    with load(folder, kv_cache_bytes=small, prefix_cache_bytes=0, media_cache_bytes=0) as other:
        driver, submitted = other.generator.driver, []
        submit, step = driver.submit, driver.engine.step
        monkeypatch.setattr(driver, "submit", lambda group: (submit(group), submitted.append(group)))
        # Steps are slow until others have come, so that it does not end before.
        monkeypatch.setattr(driver.engine, "step", lambda: (len(submitted) < 2 and time.sleep(0.02), step())[1])
        request = other.add_request(inputs, max_new_tokens=400, priority=-1)
        wait_until(lambda: request.tokens)
        assert run(other, batch, 20) == expected
        output = request.result()
        assert output.generated_token_ids == [long] and output.metrics.num_preemptions > 0


def test_samples_and_beams_see_the_images(model) -> None:
    check_samples_and_beams(model, inputs_of([ROWS[2]], 2), IMAGE)


def test_states_of_other_images_are_not_reused(folder, model) -> None:
    """Prompts have the same tokens, and one of two images differs. What is reused ends before it."""
    tokens = [*range(2, 42), *[IMAGE] * 12, *range(42, 62), *[IMAGE] * 6, *range(62, 82)]
    first = [torch.randn(48, 96, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    second = [torch.randn(24, 96, generator=torch.Generator().manual_seed(9 + seed)) for seed in range(2)]

    def inputs(of_first: int, of_second: int, grid=(8, 6)):
        patches = torch.cat([first[of_first], second[of_second]])
        grids = torch.tensor([(1, *grid), (1, 4, 6)])
        return {"input_ids": torch.tensor([tokens]), "pixel_values": patches, "image_grid_thw": grids}

    with load(folder, prefix_cache_bytes=0) as fresh, load(folder) as cached:
        for pair in [(0, 0), (0, 0), (1, 0), (0, 1), (0, 0), (1, 1), (0, 1), (1, 0)]:
            expected = run(fresh, inputs(*pair), 8)
            output = cached.generate(**inputs(*pair), max_new_tokens=8, logprobs=0)
            assert results(output) == expected, pair
        again = cached.generate(**inputs(0, 0), max_new_tokens=8, logprobs=0)
        assert again.metrics.num_reused_tokens >= 80
        expected = run(fresh, inputs(0, 0, (6, 8)), 8)
        turned = cached.generate(**inputs(0, 0, (6, 8)), max_new_tokens=8, logprobs=0)
        assert results(turned) == expected and turned.metrics.num_reused_tokens <= 40
        cached._engine.check_idle()


def test_spellings_copies_and_text_alone(folder, model, tmp_path) -> None:
    import shutil

    batch, text = inputs_of(ROWS[:3]), {"input_ids": torch.arange(2, 60)[None]}
    shutil.copytree(folder, tmp_path / "other")
    with_other_names(tmp_path / "other")
    with load(tmp_path / "other") as other:
        assert run(other, batch, 5) == run(model, batch, 5)
    for _ in range(2):
        with load(folder, weights_cache=tmp_path / "copies") as copied:
            assert run(copied, batch, 5) == run(model, batch, 5)
    with load(folder, media=False) as plain:
        assert run(plain, text) == run(model, text)
        with pytest.raises(ValueError, match="takes no images.*leave out pixel_values"):
            plain.generate(**inputs_of([ROWS[0]]))
