"""`Predictor` in Ray Data: the texts of `generate`, in two actors; rows that fail have an error."""

from __future__ import annotations

import numpy as np
import pytest
import ray.data

from pace.assets import TINY
from pace.integrations.ray import Predictor
from pace.llm import LLMModel, SamplingConfig

PROMPTS = [f"{i}, {i + 1}, {i + 2}," for i in range(24)]
SAMPLING = {"max_new_tokens": 12}


@pytest.fixture(scope="module")
def model():
    with LLMModel(TINY, progress=False) as model:
        yield model


@pytest.fixture
def predictor(monkeypatch):
    """`predictor(...)` in this process, without an actor."""
    monkeypatch.setattr("pace.integrations.ray.predictor.assigned_threads", lambda: 1)

    def make(**arguments: object) -> Predictor:
        return Predictor(str(TINY), sampling=SAMPLING, kv_cache_bytes="64MiB", **arguments)

    return make


def column(values: list) -> np.ndarray:
    """A column in the form that Ray Data passes."""
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


@pytest.mark.thorough
def test_two_actors_give_the_texts_of_generate_and_say_what_is_wrong_with_a_row(cluster, model):
    long = "x " * (model._engine.max_length + 1)
    data = ray.data.from_items(
        [{"id": i, "question": prompt} for i, prompt in enumerate([*PROMPTS, long, None])], override_num_blocks=4
    )
    arguments = {"model": str(TINY), "prompts": "question", "sampling": SAMPLING, "kv_cache_bytes": "64MiB"}
    arguments |= {"finish_reasons": "why", "errors": "error"}
    done = data.map_batches(Predictor, fn_constructor_kwargs=arguments, num_cpus=1, concurrency=2, batch_size=6)
    *rows, too_long, missing = sorted(done.take_all(), key=lambda row: row["id"])
    expected = model.generate(PROMPTS, SamplingConfig(**SAMPLING))
    assert [row["text"] for row in rows] == expected.texts and not any(row["error"] for row in rows)
    assert [row["why"] for row in rows] == expected.finish_reasons and [row["question"] for row in rows] == PROMPTS
    for row in (too_long, missing):
        assert row["error"] and row["why"] == "error" and row["text"] == ""
    assert "tokens" in too_long["error"]


def test_prompts_may_be_tokens(predictor, model):
    ids = [model.tokenizer(prompt)["input_ids"] for prompt in PROMPTS[:4]]
    out = predictor(prompts="ids")({"ids": column([np.array(one) for one in ids])})
    assert list(out["text"]) == model.generate(ids, SamplingConfig(**SAMPLING)).texts and set(out) == {"ids", "text"}


def test_conversations_are_answered_as_chat_does(predictor):
    talks = [
        np.array([{"role": "user", "content": f"What is the capital of {city}?", "tool_calls": None}], dtype=object)
        for city in ("France", "Japan")
    ]
    out = predictor(messages="talk", texts="said")({"talk": column(talks)})
    assert list(out["said"]) == ["The capital of France is Paris.", "The capital of Japan is Tokyo."]


def test_without_a_column_for_errors_the_batch_fails(predictor):
    with pytest.raises((TypeError, ValueError), match="None"):
        predictor(prompts="q")({"q": column(["1, 2, 3,", None])})


def test_columns_that_are_not_there_or_there_already_are_named(predictor):
    one = predictor(prompts="q")
    with pytest.raises(KeyError, match="no column 'q'; there are p"):
        one({"p": column(["a"])})
    with pytest.raises(ValueError, match="a column 'text' already"):
        one({"q": column(["a"]), "text": column(["b"])})


def test_an_engine_has_as_many_threads_as_its_actor_has_cpus(cluster):
    @ray.remote(num_cpus=2)
    class Actor:
        def threads(self) -> int:
            from pace import _C

            Predictor(str(TINY), prompts="q", kv_cache_bytes="64MiB")
            return _C.get_num_threads()

    assert ray.get(Actor.remote().threads.remote()) == 2


def test_a_part_of_a_cpu_is_refused(cluster):
    @ray.remote(num_cpus=0.5)
    def make() -> str:
        try:
            Predictor(str(TINY), prompts="q")
        except ValueError as error:
            return str(error)

    assert "num_cpus must be a whole number" in ray.get(make.remote())


@pytest.mark.parametrize(
    "arguments, words",
    [({}, "give prompts"), ({"prompts": "a", "messages": "b"}, "give prompts"),
     ({"prompts": "a", "texts": "a"}, "names of their own"), ({"prompts": "a", "errors": "text"}, "names of their own"),
     ({"prompts": "a", "sampling": {"num_return_sequences": 2}}, "num_return_sequences"),
     ({"prompts": "a", "sampling": {"max_token": 2}}, "did you mean 'max_new_tokens'"),
     ({"prompts": "a", "num_threads": 2}, "num_threads is num_cpus")],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments, words):
    with pytest.raises((ValueError, TypeError), match=words):
        Predictor(str(TINY), **arguments)
