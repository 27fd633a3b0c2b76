"""Hyperparameters under the names of transformers, OpenAI and llama.cpp, in the engine and in a call."""

from __future__ import annotations

import pytest
from kani import ChatMessage

from pace.integrations.kani import hyperparams as hyper
from pace.llm import SamplingConfig

STORY = [ChatMessage.user("Tell me a story about a dog.")]


def config(defaults=None, **given) -> SamplingConfig:
    return hyper.sampling_config(hyper.merged(hyper.read(defaults or {}), hyper.read(given)), [7], 1024)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({"max_tokens": 5}, {"max_new_tokens": 5}), ({"max_completion_tokens": 5}, {"max_new_tokens": 5}),
     ({"stop": "a"}, {"stop_strings": ["a"]}), ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}), ({"n": 1}, {}),
     ({"top_k": -1, "do_sample": True}, {"top_k": 0, "do_sample": True}),
     ({"logit_bias": {"5": -100}}, {"logit_bias": {5: -100}}), ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
     ({"logprobs": True}, {"logprobs": 0}), ({"temperature": None, "seed": 3}, {"seed": 3})],
)  # fmt: skip
def test_names_of_others(given, wanted):
    length = {} if "max_new_tokens" in wanted else {"max_length": 1024}
    assert config(**given) == SamplingConfig(**wanted, **length, eos_token_id=[7])


@pytest.mark.parametrize(
    ("defaults", "given", "draws"),
    [({}, {}, False), ({}, {"temperature": 0.7}, True), ({}, {"temperature": 0}, False), ({}, {"top_p": 0.9}, True),
     ({}, {"temperature": 0.7, "do_sample": False}, False), ({"temperature": 0.7}, {}, True),
     ({"temperature": 0.7}, {"temperature": 0}, False), ({"do_sample": True}, {"temperature": 0}, False),
     ({"temperature": 0}, {"temperature": 0.5}, True), ({"temperature": 0.7}, {"do_sample": False}, False)],
)  # fmt: skip
def test_whether_tokens_are_drawn(defaults, given, draws):
    assert config(defaults, **given).do_sample is draws
    config(defaults, **given).check_consistent()


def test_what_is_given_last_counts():
    assert config({"max_tokens": 5}, max_new_tokens=9).max_new_tokens == 9
    assert config({"max_tokens": 5}, max_length=90).max_new_tokens is None
    grammar = config({"json_schema": {"type": "object"}}, regex="a+")
    assert grammar.regex == "a+" and grammar.json_schema is None


def test_all_end_tokens_end(make_engine, run):
    assert config(eos_token_id=9, stop_token_ids=[8]).eos_token_id == [7, 9, 8]
    assert config(eos_token_id=[9]).eos_token_id == [7, 9]
    engine = make_engine()
    comma = engine.tokenizer(",")["input_ids"][-1]
    message = run(engine.predict(STORY, eos_token_id=comma)).message
    assert message.text == "Once upon a time" and message.extra["pace"]["finish_reason"] == "stop"
    assert run(engine.predict(STORY, max_tokens=400)).completion_tokens < 400, "the model's own ends it still"
    assert run(engine.predict(STORY, max_tokens=400, ignore_eos=True)).completion_tokens == 400


def test_values_that_cannot_be_are_told_by_the_callers_name(make_engine, run):
    with pytest.raises(ValueError, match="max_tokens must be"):
        make_engine(max_tokens=0)
    with pytest.raises(TypeError, match="stop must be"):
        run(make_engine().predict(STORY, stop=3))
    with pytest.raises(TypeError, match="max_tokens and max_new_tokens mean the same"):
        make_engine(max_new_tokens=3, max_tokens=4)
    with pytest.raises(ValueError, match="n=2 is not supported: an engine of kani returns one message"):
        make_engine(n=2)
    for refused in ({"token_healing": True}, {"prompt_logprobs": 1}, {"step_every": 3}):
        with pytest.raises(ValueError, match="is not supported"):
            make_engine(**refused)
    with pytest.raises(TypeError, match="parallel_tool_calls must be"):
        make_engine(parallel_tool_calls="no")


def test_unknown_ones_are_warned_of(make_engine, run):
    with pytest.warns(
        UserWarning, match="no hyperparameter max_new_token, and ignores it; did you mean 'max_new_tokens'"
    ):
        engine = make_engine(max_new_token=3)
    with pytest.warns(UserWarning, match="no hyperparameter use_cache"):
        assert run(engine.predict(STORY, use_cache=True, max_tokens=2)).completion_tokens == 2


def test_those_of_the_engine_hold_and_those_of_a_call_beat_them(make_engine, run):
    engine = make_engine(max_tokens=6, temperature=0.8, seed=5)
    drawn = run(engine.predict(STORY)).message.text
    assert drawn == run(engine.predict(STORY)).message.text
    assert run(engine.predict(STORY)).completion_tokens == 6
    assert run(engine.predict(STORY, max_tokens=3)).completion_tokens == 3
    greedy = run(make_engine(max_tokens=30).predict(STORY)).message.text
    assert run(engine.predict(STORY, max_tokens=30, temperature=0)).message.text == greedy
    assert run(engine.predict(STORY, max_tokens=30)).message.text != greedy
    assert engine.hyperparams == {"max_tokens": 6, "temperature": 0.8, "seed": 5}


def test_a_text_of_a_form(make_engine, run):
    assert run(make_engine(choices=["cats", "dogs"]).predict(STORY)).message.text in ("cats", "dogs")
    assert run(make_engine().predict(STORY, regex="[0-9]{3}")).message.text.isdecimal()
