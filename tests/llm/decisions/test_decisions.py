"""Decisions: the state is computed once, answers have the bits of a question on its own, and what is refused."""

from __future__ import annotations

import json
import re

import pytest
import torch

from pace.llm import LLMModel
from pace.llm.clients.decisions import LabelLogits, LabelPlaces
from pace.llm.decisions.config import DecisionConfig
from pace.llm.decisions.questions import Question, read_questions
from tests.llm.bundled import bundled
from tests.llm.generators import check_idle, make_generator, random_prompts

CONFIG = DecisionConfig(labels={"noul": ["yes", "No"]})
STATE = "Once upon a time there was a fox who lived in a green wood. " * 8
QUESTIONS = {f"question {number}": {"type": "noul", "instructions": f"Is it {number}?"} for number in range(9)}


@pytest.fixture(scope="module")
def model() -> LLMModel:
    return bundled()


def places(tokens: list[int]) -> LabelPlaces:
    return LabelPlaces(tokens, [len(tokens) - 1], [[1, 2, 3]])


def test_a_common_beginning_is_computed_once(model, monkeypatch) -> None:
    runner, computed = model._engine.model, []
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch: computed.append(len(batch.tokens)) or forward(batch))
    prompts = model.generator.decider.prompts(CONFIG).read(STATE, QUESTIONS)
    whole = model.decide(STATE, QUESTIONS, CONFIG)
    first, *others = [prompt.tokens for prompt in prompts]
    num_common = next(index for index in range(len(first)) if len({row[index] for row in [first, *others]}) > 1)
    assert sum(computed) == num_common + sum(len(row) - num_common for row in [first, *others])
    assert whole == {name: model.decide(STATE, {name: QUESTIONS[name]}, CONFIG)[name] for name in QUESTIONS}
    check_idle(model, used_bytes=None)


def test_logits_have_the_bits_of_a_prompt_alone(model) -> None:
    beginning = list(range(300, 371))
    rows = [[*beginning, *range(5, 5 + length)] for length in (1, 2, 40)] + [beginning]
    for order in (rows, rows[::-1], [*rows, beginning[:30]], [*rows, [7, 8, 9]]):
        found = LabelLogits(model.generator.driver, [places(row) for row in order]).result()
        for row, ((logits,)) in zip(order, found):
            with model.session() as session:
                assert torch.equal(logits, session.append(row)[0, [1, 2, 3]])


def test_places_in_one_prompt(model) -> None:
    tokens = list(range(100, 140))
    prompt = LabelPlaces(tokens, [3, 17, 39], [[1, 2], [3], [4, 5, 6]])
    (found,) = LabelLogits(model.generator.driver, [prompt]).result()
    with model.session() as session:
        rows = session.append(tokens, logits="all")
    assert all(torch.equal(a, rows[place, labels]) for a, place, labels in zip(found, prompt.places, prompt.labels))


def test_many_prompts_in_a_small_cache() -> None:
    """Sequences that wait for a beginning get it, or compute it themselves if memory is short."""
    generator = make_generator(num_blocks=12)
    prompts = [[*range(1, 40), *tail] for tail in random_prompts(seed=5, count=12, longest=20)]
    found = LabelLogits(generator.driver, [places(row) for row in prompts]).result()
    alone = [LabelLogits(generator.driver, [places(row)]).result() for row in prompts]
    assert all(torch.equal(a[0], b[0][0]) for a, b in zip(found, alone))
    check_idle(generator, used_bytes=None)


def test_settings_of_a_checkpoint(tmp_path) -> None:
    assert DecisionConfig.read(tmp_path) == DecisionConfig()
    (tmp_path / "decision_template.jinja").write_text("{{ state }}<|mark|>")
    (tmp_path / "decision.json").write_text(json.dumps({"temperature": {"noul": 2}, "sort_choices": True, "new": None}))
    assert DecisionConfig.read(tmp_path) == DecisionConfig(temperature={"noul": 2}, chat_template="{{ state }}<|mark|>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": {"noul": "yes"}}, "labels"),
        ({"labels": {"maybe": ["a"]}}, "maybe"),
        ({"temperature": {"noul": 0}}, "above 0"),
        ({"temperature": {"noul": True}}, "above 0"),
        ({"noul_options": ["true", "true"]}, "noul_options"),
        ({"sanitize_control_tokens": 1}, "sanitize_control_tokens"),
        ({"chat_template": 3}, "chat_template"),
        ({"order": "random"}, "unknown field 'order'"),
        ({"order": 0}, "unknown field 'order' with the value 0"),
    ],
)
def test_settings_that_are_refused(tmp_path, fields, message) -> None:
    path = tmp_path / "decision.json"
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"decision.json.*{re.escape(message)}"):
        DecisionConfig.read(path)


def test_an_adapter_in_the_settings_is_refused(tmp_path) -> None:
    (tmp_path / "decision.json").write_text('{"adapter": "lora"}')
    with pytest.raises(NotImplementedError, match="adapter"):
        DecisionConfig.read(tmp_path)


CHOICE = {"type": "choice", "criteria": {"a": None}}
BAD_QUESTIONS = [
    ({}, "at least one"),
    ({"q": "text"}, "type must be"),
    ({"q": {"type": "rank"}}, "type must be noul, choice, score; got 'rank'"),
    ({"q": {"type": ["noul"]}}, "type must be"),
    ({"q": {**CHOICE, "criteria": {}}}, "criteria must map"),
    ({"q": {"type": "choice"}}, "criteria must map"),
    ({"q": {**CHOICE, "criteria": {"a": 1}}}, "criteria must map"),
    ({"q": {**CHOICE, "hint": 1}}, "unknown field 'hint'"),
    ({"q": {**CHOICE, "instructions": 5}}, "instructions must be"),
    ({"q": {"type": "score", "criteria": ["low", None]}}, "list with a description"),
    ({"q": {"type": "score", "criteria": {"low": 1}}}, "list with a description"),
    ({"q": {"type": "noul", "criteria": {"maybe": "x"}}}, "describe true and false"),
    ({"q": {**CHOICE, "criteria": {str(number): None for number in range(27)}}}, "has 27 options.*labels for 26"),
]


@pytest.mark.parametrize(("questions", "message"), BAD_QUESTIONS)
def test_questions_that_are_refused(questions, message) -> None:
    with pytest.raises(ValueError, match=message):
        read_questions(questions, DecisionConfig())


def test_all_invalid_questions_are_listed() -> None:
    with pytest.raises(ValueError, match="(?s)'one'.*'two'"):
        read_questions({"one": 1, "fine": CHOICE, "two": 2}, DecisionConfig())


@pytest.mark.parametrize("labels", [["Yes", "No"], ["yes", "yes"], ["yes", "No way"]])
def test_labels_must_be_different_tokens(model, labels) -> None:
    with pytest.raises(ValueError, match="not different single tokens"):
        model.decide("x", {"q": {"type": "noul"}}, DecisionConfig(labels={"noul": labels}))


@pytest.mark.parametrize(("state", "message"), [(5, "state must be"), ("\ud800", "surrogate"), (STATE * 40, "at most")])
def test_states_that_are_refused(model, state, message) -> None:
    with pytest.raises(ValueError, match=message):
        model.decide(state, {"q": CHOICE})
    check_idle(model, used_bytes=None)


@pytest.mark.parametrize(
    ("template", "message"),
    [("{{ state", "not Jinja"), ("{{ nothing.at.all }}", "refuses"), ("<|mark|>x<|mark|>", "2 places")],
)
def test_templates_that_are_refused(model, template, message) -> None:
    with pytest.raises(ValueError, match=message):
        model.decide("x", {"q": CHOICE}, DecisionConfig(chat_template=template))


def test_answers_of_probabilities() -> None:
    score = Question("q", "score", None, ["0", "1", "2"], ["A", "B", "C"], ["low", "mid", "high"])
    assert score.answer([0.0, 0.0, 1.0]) | {"probabilities": None} == {
        "type": "score", "score": 2.0, "legend": {"0": "low", "1": "mid", "2": "high"}, "confidence": 1.0,
        "probabilities": None,
    }  # fmt: skip
    assert Question("q", "choice", None, ["a"], ["A"], [None]).answer([1.0])["confidence"] == 1.0
    assert Question("q", "noul", None, ["false", "true"], ["N", "Y"], [None, None]).answer([0.25, 0.75])["noul"] == 0.75
