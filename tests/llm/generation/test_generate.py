"""LLMModel on checkpoint files: the same text as transformers, every kind of input, lengths and stops."""

from __future__ import annotations

import itertools
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from os.path import commonprefix

import numpy as np
import pytest
import torch

from pace.llm import LLMModel, SamplingConfig
from pace.llm.sampling.sampler import draw, uniform
from tests.editing import change_json
from tests.llm.generation.loaded import BACKENDS, GREEDY, load
from tests.llm.models.variants import FAMILIES, IN_TRANSFORMERS
from tests.plugins.tiers import sample


def random_ids(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(2, 280, shape, generator=torch.Generator().manual_seed(seed))


def likeliest(model, ids: list[int], tokens: list[int]) -> list[int]:
    """Returns transformers' greedy token in place of each of `tokens`. They are equal if `tokens` is its greedy
    text."""
    with torch.no_grad():
        rows = model(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
    return rows.argmax(-1).tolist()


def text_after(tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """Returns the part of the whole text after the prompt's text. The prompt may end within a character."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + tokens))
    return whole[len(commonprefix([before, whole])) :]


# -- comparison with transformers --------------------------------------------------------------------------------------


OTHERS = [family for family in IN_TRANSFORMERS if family != "llama"]
DISTINCT = ("llama", "gemma2", "deepseek_v3", "gpt_oss", "llama4_text", "qwen3_moe", "chatglm")
"""Models with each kind of layer: dense, windows, latent, sinks, chunks, experts, and code outside transformers."""


@pytest.mark.parametrize("family", sample(FAMILIES, lambda family: family in DISTINCT))
def test_64_greedy_tokens_are_those_of_transformers(checkpoint, family: str) -> None:
    folder, oracle, tokenizer = checkpoint(family)
    prompts = [random_ids(seed, length).tolist() for seed, length in enumerate((1, 5, 33, 70))]
    outs = [load(folder, backend).generate(prompts, SamplingConfig(max_new_tokens=64)) for backend in BACKENDS]
    found, end = outs[0].generated_token_ids, tokenizer.eos_token_id
    for prompt, tokens in zip(prompts, found):
        assert tokens == likeliest(oracle, prompt, tokens) and end not in tokens[:-1]
        assert len(tokens) == 64 or tokens[-1] == end
    texts = [text_after(tokenizer, prompt, tokens) for prompt, tokens in zip(prompts, found)]
    assert all(out.generated_token_ids == found and out.texts == texts for out in outs)


@pytest.mark.parametrize("family", ["llama", *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS)])
def test_sampled_text_is_that_of_transformers_drawing_with_our_numbers(checkpoint, family: str, monkeypatch) -> None:
    """test_logits.py compares single processors and filters. This test applies them in order to each model's logits."""
    folder, oracle, _ = checkpoint(family)
    everything = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[7], [9, 11]]}
    everything |= {"min_new_tokens": 6, "eos_token_id": list(range(90))}
    filters = [
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8, "top_k": 0},
        {"min_p": 0.03, "typical_p": 0.8},
        {"temperature": 1.5, "top_p": 0.9, **everything},
    ]
    for seed, fields in enumerate(filters):
        fields = {"do_sample": True, "max_new_tokens": 24, **fields}
        numbers = map(uniform, itertools.repeat(seed), itertools.count())
        pick = lambda weights, num_samples: torch.tensor([[draw(weights[0], next(numbers))]])
        monkeypatch.setattr(torch, "multinomial", pick)
        prompt = random_ids(seed, 30)
        with torch.no_grad():
            asked = {"attention_mask": torch.ones_like(prompt[None]), "pad_token_id": 0, "eos_token_id": None, **fields}
            expected = oracle.generate(prompt[None], **asked)
        config = SamplingConfig(seed=seed, ignore_eos="eos_token_id" not in fields, **fields)
        for backend in BACKENDS:
            rows = load(folder, backend).generate(prompt, config).output_token_ids.tolist()
            assert rows == expected.tolist(), f"{backend}, {fields}"
        assert next(numbers) == uniform(seed, expected.shape[1] - 30), "one number for each token"


@pytest.mark.parametrize("count", sample([2, 17, 33], lambda count: count == 17))
def test_ragged_batches_are_the_singles(model: LLMModel, backend: str, count: int) -> None:
    prompts = [random_ids(index, 1 + index * 7 % 41).tolist() for index in range(count)]
    greedy = SamplingConfig(max_new_tokens=6)
    for config in (greedy, SamplingConfig(max_new_tokens=6, do_sample=True, seed=5, top_p=0.9, logprobs=2)):
        together = model.generate(prompts, config)
        singles = [model.generate(prompt, config) for prompt in prompts]
        assert together.generated_token_ids == [single.generated_token_ids[0] for single in singles]
        # Torch sums in an order that depends on the batch.
        if config is not greedy and backend == "native":
            assert together.logprobs == [single.logprobs[0] for single in singles], "bit by bit"


def test_threads_share_a_model(model: LLMModel) -> None:
    prompts = [random_ids(index, 20 + index).tolist() for index in range(4)]
    expected = [model.generate(prompt, GREEDY).generated_token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda prompt: model.generate(prompt, GREEDY).generated_token_ids, prompts, timeout=60)
    assert list(results) == expected


# -- inputs ------------------------------------------------------------------------------------------------------------


def test_every_kind_of_input_is_the_same_prompt(model: LLMModel) -> None:
    text = "Once upon a time"
    ids = model.tokenizer(text)["input_ids"]
    tensor, array, ones = torch.tensor(ids), np.array(ids), torch.ones(1, len(ids))
    kinds = [text, [text], ids, tuple(ids), [ids], tensor, tensor[None], tensor.int(), array[None]]
    kinds += [[tensor], [array], list(array), list(tensor), {"input_ids": tensor[None]}]
    kinds += [{"input_ids": [ids], "attention_mask": mask} for mask in (ones, ones.numpy(), list(ones))]
    kinds += [model.tokenizer(text), model.tokenizer([text]), model.tokenizer(text, return_tensors="pt")]
    config = SamplingConfig(max_new_tokens=4, ignore_eos=True)
    expected = model.generate(text, config).generated_token_ids
    for kind in kinds:
        out = model.generate(kind, config)
        assert out.generated_token_ids == expected
        assert out.output_token_ids.tolist() == [ids + expected[0]] and out.output_token_ids.dtype == torch.int64


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_seen_through_and_given_back(model: LLMModel, side: str, monkeypatch) -> None:
    texts = ["Once upon a time there", "fox", "the café"]
    monkeypatch.setattr(model.tokenizer, "padding_side", side)  # other tests share the model
    batch = model.tokenizer(texts, padding=True, return_tensors="pt")
    out = model.generate(batch, GREEDY)
    singles = [model.generate(text, GREEDY).generated_token_ids[0] for text in texts]
    assert out.generated_token_ids == singles
    width = batch["input_ids"].shape[1]
    assert torch.equal(out.output_token_ids[:, :width], batch["input_ids"])
    assert out.output_token_ids[:, width:].tolist() == singles
    lists = model.generate({name: rows.tolist() for name, rows in batch.items()}, GREEDY)
    assert torch.equal(lists.output_token_ids, out.output_token_ids)


def test_ragged_prompts_are_padded_left_and_outputs_right(model: LLMModel) -> None:
    first = model.generate([5, 6, 7], GREEDY).generated_token_ids[0]
    config = SamplingConfig(max_new_tokens=20, eos_token_id=first[3], pad_token_id=2)
    out = model.generate([[5, 6, 7], [9]], config)
    cut = first[: first.index(first[3]) + 1]
    assert out.generated_token_ids[0] == cut and out.finish_reasons[0] == "stop"
    rows = out.output_token_ids.tolist()
    longest = max(map(len, out.generated_token_ids))
    assert rows[0] == [5, 6, 7] + cut + [2] * (longest - len(cut))
    assert rows[1][:3] == [2, 2, 9]


THREE = torch.ones(1, 3, dtype=torch.int64)
BAD_INPUTS = [
    ([], ValueError, "empty list"),
    ([[]], ValueError, "prompt 0 is empty"),
    ([[5], []], ValueError, "prompt 1 is empty"),
    ("", ValueError, "empty"),
    (torch.empty(0, dtype=torch.int64), ValueError, "no token"),
    (torch.empty(2, 0, dtype=torch.int64), ValueError, "no token"),
    (torch.ones(2, 2, 2, dtype=torch.int64), ValueError, r"\[S\] or \[B, S\]"),
    (torch.ones(3), TypeError, "integers"),
    (torch.ones(3, dtype=torch.bool), TypeError, "integers"),
    ([1.5, 2.0], TypeError, "item 0"),
    ([5, "a"], TypeError, "item 0|item 1"),
    ([True, False], TypeError, "item 0"),
    ([-1], ValueError, "token id -1"),
    ([[5], [100_000]], ValueError, "prompt 1 holds the token id 100000"),
    (5, TypeError, "inputs must be"),
    (None, TypeError, "inputs must be"),
    ({"ids": [1]}, ValueError, "input_ids"),
    ({"input_ids": [1], "labels": [1]}, ValueError, "labels"),
    ({"input_ids": THREE, "attention_mask": torch.ones(1, 2)}, ValueError, "attention_mask"),
    ({"input_ids": THREE, "attention_mask": torch.tensor([[1, 0, 1]])}, ValueError, "hole"),
    ({"input_ids": THREE, "attention_mask": torch.tensor([[0, 0, 0]])}, ValueError, "all 0"),
    ({"input_ids": THREE, "attention_mask": torch.tensor([[0, 2, 1]])}, ValueError, "0 and 1"),
    ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, ValueError, "attention_mask"),
    ({"input_ids": [[1, 2]], "attention_mask": []}, ValueError, "attention_mask"),
    ({"input_ids": [[1, 2]], "attention_mask": 1}, TypeError, "attention_mask"),
    ({"input_ids": None}, TypeError, "input_ids must be"),
    ({"input_ids": "abc"}, TypeError, "input_ids must be"),
    ({"input_ids": ["abc"]}, TypeError, "input_ids must be"),
    (np.array(["abc"]), TypeError, "inputs must be"),
    ([np.array([1.0])], TypeError, "item 0"),
    ("half a \ud83d", ValueError, "half a character"),
    ([1] * 256, ValueError, "256 tokens"),
]


def test_bad_inputs_are_told(checkpoint) -> None:
    model = load(checkpoint("llama")[0], "torch")
    for inputs, error, message in BAD_INPUTS:
        with pytest.raises(error, match=message):
            model.generate(inputs, GREEDY)


def test_bad_configs_are_told(checkpoint) -> None:
    """Configs with tokens beyond the vocabulary, and a dict instead of a config."""
    model = load(checkpoint("llama")[0], "torch")
    for fields, message in [
        ({"logit_bias": {900: 1.0}}, "logit_bias"),
        ({"bad_words_ids": [[900]]}, "bad_words"),
        ({"suppress_tokens": [900]}, "suppress_tokens"),
        ({"eos_token_id": 900}, "eos"),
        ({"logprobs": 900}, "logprobs"),
    ]:
        with pytest.raises(ValueError, match=message):
            model.generate([1], SamplingConfig(**fields))
    with pytest.raises(TypeError, match="SamplingConfig"):
        model.generate([1], {"max_new_tokens": 3})


# -- lengths and stops -------------------------------------------------------------------------------------------------


def test_the_context_ends_a_generation(model: LLMModel) -> None:
    out = model.generate([5] * 250, SamplingConfig(max_new_tokens=50, ignore_eos=True))
    assert len(out.generated_token_ids[0]) == 6 and out.finish_reasons == ["length"]
    out = model.generate([5] * 10, SamplingConfig(ignore_eos=True))
    assert out.output_token_ids.shape == (1, 256), "unset: 256 new tokens, or what the context holds"
    assert model.generate([5] * 10, SamplingConfig(max_length=12, ignore_eos=True)).output_token_ids.shape == (1, 12)


def test_stop_strings_end_and_trim_the_text(model: LLMModel) -> None:
    full = model.generate([7, 8], SamplingConfig(max_new_tokens=60, ignore_eos=True))
    text = full.texts[0]
    stops = {index: text[index : index + 3] for index in range(8, len(text) - 4)}
    clean = [index for index, stop in stops.items() if "\ufffd" not in stop and text.index(stop) == index]
    for index in clean[:3] + clean[-3:]:
        stop = stops[index]
        config = SamplingConfig(max_new_tokens=60, ignore_eos=True, stop_strings=[stop])
        out = model.generate([7, 8], config)
        assert out.texts == [text[:index]] and out.finish_reasons == ["stop"]
        [found] = out.generated_token_ids
        assert full.generated_token_ids[0][: len(found)] == found
        assert stop in model.tokenizer.decode(found) and stop not in model.tokenizer.decode(found[:-1])
        assert "".join(model.stream([7, 8], config)) == text[:index]
    assert clean, "the random model says something that can be a stop string"


def test_min_new_tokens_postpones_the_end(model: LLMModel) -> None:
    end = model.generate([5], GREEDY).generated_token_ids[0][0]
    assert len(model.generate([5], SamplingConfig(eos_token_id=end, max_new_tokens=9)).generated_token_ids[0]) == 1
    out = model.generate([5], SamplingConfig(eos_token_id=end, min_new_tokens=4, max_new_tokens=9))
    assert end not in out.generated_token_ids[0][:4]


def test_metrics_count(model: LLMModel) -> None:
    metrics = model.generate([[5, 6, 7], [8]], GREEDY).metrics
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens, metrics.num_drafted_tokens) == (4, 40, 0)
    assert 0 < metrics.seconds_to_first_token < metrics.total_seconds
    assert metrics.prefill_tokens_per_second > 0 and metrics.decode_tokens_per_second > 0


def test_the_files_defaults_hold_unless_the_caller_says_otherwise(checkpoint, tmp_path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama")[0], folder)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3, "eos_token_id": 1, "pad_token_id": 4}')
    model = LLMModel(folder, dtype="fp32", backend="torch", progress=False)
    assert len(model.generate([5], SamplingConfig(ignore_eos=True)).generated_token_ids[0]) == 3
    assert len(model.generate([5], SamplingConfig(ignore_eos=True, max_new_tokens=5)).generated_token_ids[0]) == 5
    assert model.generate([[5, 6], [7]], GREEDY).output_token_ids[1, 0] == 4


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        ({"eos_token_id": 7}, 1, [7, 1]),
        ({"eos_token_id": [7, 9]}, 8, [7, 9, 1]),
        ({"eos_token_id": [9, 1]}, 8, [9, 1]),
        ({}, 8, [8, 1]),
        ({"eos_token_id": None}, [8, 7], [8, 7, 1]),
        ({}, None, [1]),
    ],
)
def test_the_tokenizers_end_token_ends_a_text_whatever_the_files_name(
    checkpoint, tmp_path, generation, config, expected
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama")[0], folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    change_json(folder / "config.json", eos_token_id=config, pad_token_id=None)
    model = LLMModel(folder, dtype="fp32", backend="torch", progress=False)
    assert model.tokenizer.eos_token_id == 1
    for token in (1, 7, 8, 9):
        out = model.generate([5], logit_bias={token: 100.0}, max_new_tokens=3)
        is_end = token in expected
        assert out.finish_reasons == ["stop" if is_end else "length"], token
        assert out.generated_token_ids == [[token] * (1 if is_end else 3)]
    # the caller's end tokens replace those of the file
    assert model.generate([5], logit_bias={1: 100.0}, max_new_tokens=3, eos_token_id=50).finish_reasons == ["length"]
