"""Names from other tools are accepted if they mean the same. Otherwise the error names pace's option."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig, aliases
from pace.llm.configs import ALIASES
from pace.llm.loading.options import LoadOptions
from tests.llm.bundled import bundled

PROMPT = "1, 2, 3, 4,"


def test_every_name_leads_to_one_of_ours():
    ours = {field.name for field in fields(SamplingConfig)}
    assert not ours & (ALIASES.keys() | aliases.SAMPLING_ADVICE.keys() | {*aliases.NOT_IMPLEMENTED})
    options = {field.name for field in fields(LoadOptions)}
    assert set(aliases.MODEL.values()) <= options
    assert not options & (aliases.MODEL.keys() | aliases.MODEL_ADVICE.keys())


def test_names_of_the_same_meaning():
    config = SamplingConfig(max_tokens=3, n=2, stop="x", min_tokens=1)
    assert config == SamplingConfig(max_new_tokens=3, num_return_sequences=2, stop_strings=["x"], min_new_tokens=1)
    assert config.explicit_fields == {"max_new_tokens", "num_return_sequences", "stop_strings", "min_new_tokens"}
    config.max_tokens = 5
    assert config.max_new_tokens == 5
    with pytest.raises(TypeError, match="max_new_tokens and max_tokens mean the same"):
        SamplingConfig(max_new_tokens=3, max_tokens=4)
    with pytest.raises(ValueError, match="^n must be"):
        SamplingConfig(n=0)


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("best_of", TypeError, "no field 'best_of'; num_return_sequences with logprobs"),
        ("stop_token_ids", TypeError, "eos_token_id takes the place"),
        ("stream", TypeError, "LLMModel.stream gives the text in pieces"),
        ("penalty_alpha", NotImplementedError, "pace does not implement it"),
        ("temprature", TypeError, "did you mean 'temperature'"),
        ("zzz", TypeError, r"'zzz'\. Known: max_new_tokens, "),
    ],
)
def test_names_that_are_told(name, error, words):
    with pytest.raises(error, match=words) as caught:
        SamplingConfig(**{name: 1})
    assert ("did you mean" in str(caught.value)) == (name == "temprature")
    assert ("Known: " in str(caught.value)) == (name in ("temprature", "zzz"))


def test_fields_beside_the_prompt():
    model, expected = bundled(), bundled().generate(PROMPT, SamplingConfig(max_new_tokens=4)).texts
    assert model.generate(PROMPT, max_new_tokens=4).texts == expected
    config = SamplingConfig(max_new_tokens=9)
    assert model.generate(PROMPT, config, max_tokens=4).texts == expected and config.max_new_tokens == 9
    assert "".join(model.stream(PROMPT, max_new_tokens=4)) == expected[0]
    assert model.add_request(PROMPT, max_new_tokens=4).result().texts == expected
    assert model.chat("What is 7 + 8?", max_new_tokens=2).metrics.num_generated_tokens == 2
    for call in (model.generate, model.stream, model.add_request, model.chat):
        with pytest.raises(TypeError, match="no field 'max_token'; did you mean 'max_new_tokens'"):
            call(PROMPT, max_token=4)
    with pytest.raises(TypeError, match="inputs are given twice"):
        model.generate(PROMPT, input_ids=[[1]])


def test_a_wrong_field_ends_the_streamer():
    class Streamer:
        is_ended = False

        def put(self, value):
            pass

        def end(self):
            self.is_ended = True

    streamer = Streamer()
    with pytest.raises(TypeError):
        bundled().generate(PROMPT, None, streamer, max_token=4)
    assert streamer.is_ended


def test_a_generation_config_of_transformers():
    transformers = pytest.importorskip("transformers")
    given = transformers.GenerationConfig(max_new_tokens=4, no_repeat_ngram_size=2, use_cache=False)
    expected = bundled().generate(PROMPT, SamplingConfig(max_new_tokens=4, no_repeat_ngram_size=2))
    assert bundled().generate(PROMPT, given).texts == expected.texts
    assert SamplingConfig.read(given).explicit_fields == {"max_new_tokens", "no_repeat_ngram_size"}
    with pytest.raises(NotImplementedError, match="sets guidance_scale, which pace does not implement"):
        bundled().generate(PROMPT, transformers.GenerationConfig(guidance_scale=2.0))
    with pytest.raises(TypeError, match="must be a SamplingConfig, got dict"):
        bundled().generate(PROMPT, {"max_new_tokens": 4})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"length_penalty": 0.7}, "length_penalty set, but without effect: beam search"),
        ({"unmasked_logprobs": True}, "without effect: add logprobs"),
        (
            {"do_sample": False, "seed": 3},
            "seed set, but without effect: decoding is greedy; add do_sample=True, or a temperature above 0",
        ),
        ({"do_sample": False, "top_k": 3, "min_p": 0.1}, "top_k, min_p set, but without effect"),
    ],
)
def test_what_has_no_effect_says_what_gives_it_one(caplog, given, words):
    SamplingConfig(**given).check_consistent()
    assert words in caplog.text and len(caplog.records) == 1


# -- models ------------------------------------------------------------------------------------------------------------


def test_options_of_the_same_meaning():
    with LLMModel.from_pretrained(
        TINY, torch_dtype=torch.float32, max_model_len=64, device_map="auto", trust_remote_code=False, progress=False
    ) as model:
        assert model._model.dtype == torch.float32 and model.max_seq_len == 64


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"torch_dtype": "float32", "dtype": "float16"}, TypeError, "dtype is given by two names"),
        ({"torch_dtype": "float32", "max_model_len": 5, "n_ctx": 4}, TypeError, "max_seq_len is given by two names"),
        ({"device": "cuda"}, ValueError, "only runs on the CPU"),
        ({"trust_remote_code": True}, ValueError, "no code"),
        ({"attn_implementation": "sdpa"}, TypeError, "no option 'attn_implementation'; backend chooses"),
        ({"num_thread": 1}, TypeError, "did you mean 'num_threads'"),
        ({"zzz": 1}, TypeError, "no option 'zzz'. Known: model_name_or_path, "),
    ],
)
def test_options_that_are_told(options, error, words):
    with pytest.raises(error, match=words):
        LLMModel(TINY, **options)


def test_options_of_the_command_line(capsys):
    from pace.cli import main

    for arguments, words in (
        (["--temprature", "1"], "; did you mean --temperature?"),
        (["--zzz", "1"], "unrecognized arguments: --zzz 1 (see"),
        (["--max-tokens", "1", "--max-new-tokens", "1"], "--max-new-tokens: not allowed with argument --max-tokens"),
        (["--max-model-len", "9", "--n-ctx", "9"], "--n-ctx: not allowed with argument --max-model-len"),
        (["--max-tokens", "many"], "--max-tokens: invalid int"),
    ):
        with pytest.raises(SystemExit):
            main(["generate", "x", *arguments])
        assert words in capsys.readouterr().err
    names = ["--max-tokens", "1", "--torch-dtype", "float32", "--max-model-len", "64", "--n-threads", "1"]
    assert main(["generate", "x", *names]) == 0
