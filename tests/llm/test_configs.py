"""SamplingConfig: every field is checked, unknown fields are named, and configs take precedence in order."""

from __future__ import annotations

import copy
import inspect
import json
import logging
import math
import pickle
from dataclasses import fields

import pytest
import torch

from pace.cli.arguments import field_explanations
from pace.llm.configs import FIELDS, KVCacheType, SamplingConfig

INTEGERS = [name for name, field in FIELDS.items() if field.type in ("int", "int | None")]
NUMBERS = [name for name, field in FIELDS.items() if field.type == "float"]
FLAGS = [name for name, field in FIELDS.items() if field.type == "bool"]


def test_the_defaults() -> None:
    config = SamplingConfig()
    assert (config.do_sample, config.temperature, config.top_k, config.top_p, config.num_beams) == (False, 1, 50, 1, 1)
    assert config.max_new_tokens is None and config.explicit_fields == set()


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [True, 1.0, "1", [1]])
def test_an_integer_is_an_integer(name: str, value) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [True, "1", [1.0]])
def test_a_number_is_a_number(name: str, value) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_is_finite(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, "yes"])
def test_a_flag_is_a_flag(name: str, value) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingConfig(**{name: value})


OUT_OF_RANGE = dict(
    max_new_tokens=[0, -1], max_length=[0], min_new_tokens=[-1], temperature=[-0.1, 10**400], top_k=[-1, 2**63],
    top_p=[-0.1, 1.1], min_p=[-1, 2],
    typical_p=[0.0, 1.5], repetition_penalty=[0.0, -1], frequency_penalty=[-3, 2.5], presence_penalty=[3],
    no_repeat_ngram_size=[-1],
    num_beams=[0], num_return_sequences=[0], eos_token_id=[-1, [], [5, -2]], pad_token_id=[-1], stop_strings=["", ["a",
    ""]],
    bad_words_ids=[[], [[]], [[-1]]], logit_bias=[{-1: 0.0}, {1: math.nan}, {1: math.inf}], seed=[-1, 2**64],
    logprobs=[-1],
    early_stopping=["sometimes", 1],
)  # fmt: skip


@pytest.mark.parametrize("name, value", [(name, value) for name, values in OUT_OF_RANGE.items() for value in values])
def test_out_of_range_is_told(name: str, value) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("eos_token_id", "a"),
        ("stop_strings", 5),
        ("bad_words_ids", [5]),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logits_processors", [3]),
    ],
)
def test_wrong_kinds_are_told(name: str, value) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize(
    "wrong, right",
    [
        ("max_new_token", "max_new_tokens"),
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("stop_string", "stop_strings"),
        ("max", "max_new_tokens"),
    ],
)
def test_an_unknown_field_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(TypeError, match=f"did you mean '({right})'"):
        SamplingConfig(**{wrong: 1})
    with pytest.raises(TypeError, match=wrong):
        setattr(SamplingConfig(), wrong, 1)


def test_values_are_made_canonical() -> None:
    config = SamplingConfig(eos_token_id=5, stop_strings="x", logprobs=True, temperature=2, bad_words_ids=((1, 2),))
    assert (config.eos_token_id, config.stop_strings, config.bad_words_ids) == ([5], ["x"], [[1, 2]])
    assert config.logprobs == 0 and isinstance(config.temperature, float)
    assert SamplingConfig(eos_token_id=torch.tensor([4, 5, 4])).eos_token_id == [4, 5]
    assert SamplingConfig(logit_bias={3: -math.inf}).logit_bias == {3: -math.inf}


def test_assignment_is_checked_and_none_unsets() -> None:
    config = SamplingConfig(top_k=3)
    with pytest.raises(ValueError):
        config.top_k = -5
    assert config.top_k == 3
    config.top_k = None
    assert config.top_k == 50 and config.explicit_fields == set()
    config.top_k = 50
    assert config.explicit_fields == {"top_k"}
    del config.top_k
    assert config.explicit_fields == set()


def test_the_caller_beats_the_file_beats_the_default() -> None:
    caller, file = (
        SamplingConfig(temperature=1.0, do_sample=False),
        SamplingConfig(temperature=0.6, do_sample=True, top_p=0.9),
    )
    merged = caller.merge_from(file)
    assert merged is caller
    assert (merged.temperature, merged.do_sample, merged.top_p, merged.top_k) == (1.0, False, 0.9, 50)
    assert file.temperature == 0.6


@pytest.mark.parametrize("mine, other", [("max_length", "max_new_tokens"), ("max_new_tokens", "max_length")])
def test_the_two_lengths_are_one_wish(mine: str, other: str) -> None:
    assert getattr(SamplingConfig(**{mine: 10}).merge_from(SamplingConfig(**{other: 20})), other) is None


@pytest.mark.parametrize(
    "duplicate", [SamplingConfig.copy, copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))]
)
def test_a_copy_is_independent(duplicate) -> None:
    config = SamplingConfig(stop_strings=["a"], top_k=3)
    twin = duplicate(config)
    twin.stop_strings.append("b")
    twin.top_k, twin.top_p = 4, 0.5
    assert config.explicit_fields == {"stop_strings", "top_k"}
    assert (
        config.stop_strings == ["a"]
        and config.top_k == 3
        and config == SamplingConfig(stop_strings=["a"], top_k=3) != twin
    )


def test_from_pretrained(tmp_path, caplog) -> None:
    fields = {
        "temperature": 0.6,
        "eos_token_id": [1, 2],
        "pad_token_id": -1,
        "top_k": None,
        "transformers_version": "5",
        "bos_token_id": 1,
        "penalty_alpha": 0.6,
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    with caplog.at_level(logging.WARNING, "pace"):
        config = SamplingConfig.from_pretrained(tmp_path)
    assert config.explicit_fields == {"temperature", "eos_token_id"}
    assert "penalty_alpha" in caplog.text and "bos_token_id" not in caplog.text
    assert SamplingConfig.from_pretrained(tmp_path / "generation_config.json") == config


def test_a_file_may_say_none_with_minus_one() -> None:
    """Conversions of the first Llama wrote -1 for missing tokens. Callers use ignore_eos instead."""
    assert SamplingConfig.from_dict({"eos_token_id": -1, "pad_token_id": -1}).explicit_fields == set()
    with pytest.raises(ValueError, match="eos_token_id"):
        SamplingConfig.from_dict({"eos_token_id": -2})


def test_a_file_of_transformers_is_read(tmp_path) -> None:
    from transformers import GenerationConfig

    GenerationConfig(
        do_sample=True, temperature=0.7, top_p=0.8, repetition_penalty=1.1, eos_token_id=[5, 6], max_new_tokens=33
    ).save_pretrained(tmp_path)
    config = SamplingConfig.from_pretrained(tmp_path)
    assert (config.do_sample, config.temperature, config.top_p, config.repetition_penalty) == (True, 0.7, 0.8, 1.1)
    assert (config.eos_token_id, config.max_new_tokens) == ([5, 6], 33)


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{", '{"temperature": "hot"}', '{"top_k": -4}', '{"eos_token_id": {}}', "[" * 100_000, "\xff"],
)
def test_a_damaged_file_is_told(tmp_path, content: str) -> None:
    (tmp_path / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises((ValueError, TypeError), match="generation_config.json"):
        SamplingConfig.from_pretrained(tmp_path)


def test_a_missing_file_is_told(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="generation_config.json"):
        SamplingConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "fields, error, word",
    [
        (dict(num_beams=4, num_return_sequences=5), ValueError, "num_return_sequences=5 exceeds num_beams=4"),
        (
            dict(num_beams=4, num_return_sequences=5, do_sample=True),
            ValueError,
            "num_return_sequences=5 exceeds num_beams=4",
        ),
        (dict(do_sample=True, temperature=0), ValueError, "do_sample=False"),
        (dict(do_sample=True, temperature=1e-40), ValueError, "do_sample=False"),
        (dict(num_return_sequences=2), ValueError, "do_sample=True"),
        (dict(min_new_tokens=5, max_new_tokens=4), ValueError, "min_new_tokens"),
    ],
)
def test_contradictions_are_told(fields: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        SamplingConfig(**fields).check_consistent()


@pytest.mark.parametrize(
    "fields, warned",
    [
        (dict(temperature=0.7), False),
        (dict(temperature=0.7, do_sample=False), True),
        (dict(length_penalty=2.0), True),
        (dict(length_penalty=2.0, early_stopping=True, num_beams=2), False),
    ],
)
def test_what_has_no_effect_is_told(fields: dict, warned: bool, caplog) -> None:
    with caplog.at_level(logging.WARNING, "pace"):
        SamplingConfig(**fields).check_consistent()
    assert bool(caplog.records) == warned


def test_every_field_is_explained() -> None:
    """The help of the command line also uses these texts."""
    explained = field_explanations(SamplingConfig)
    assert [field.name for field in fields(SamplingConfig) if field.name not in explained] == []


def test_the_signature_shows_the_fields() -> None:
    assert inspect.signature(SamplingConfig).parameters["top_k"].default == 50


def test_cache_types_are_strings() -> None:
    assert KVCacheType("paged") == "paged" == KVCacheType.PAGED
