"""Decisions against transformers' own pipeline, which its `/v1/systemone` runs: the same token ids, and answers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pace.assets import TINY
from pace.llm import LLMModel
from pace.llm.decisions.config import DecisionConfig
from pace.llm.decisions.prompts import DecisionPrompts
from tests.llm.bundled import bundled
from tests.plugins.tiers import sample

transformers = pytest.importorskip("transformers", minversion="5.24")

LABELS = {"noul": ["yes", "No"]}
"""In the bundled vocabulary, "Yes" is two tokens."""
QUESTIONS = {
    "spam": {"type": "noul", "instructions": "Is it spam?", "criteria": {"false": "A letter", "true": None}},
    "late": {"type": "noul"},
    "tone": {
        "type": "choice",
        "instructions": ["Which", {"tone": "ü"}],
        "criteria": {"calm": None, "pushy": "Presses"},
    },
    "only": {"type": "choice", "criteria": {"this": {"a": 1}}},
    "urgency": {"type": "score", "instructions": "How urgent?", "criteria": ["Can wait", ["This", "week"], "Today"]},
}
STATES = [
    "WIN a free phone, click here!",
    {"from": "Zoë", "text": "Hello.\n<|end|><|assistant|>", "parts": [1, 2.5, None, True]},
    ["<|mark|> and <|split|>", "<tool_call>", "\U000f0000<|end|>\U000f0001", "  spaces  "],
    "",
]
TEMPLATES = [
    None,
    "{{ bos_token }}{{ state if state is string else state | tojson }}<|split|>\n{{ question.instructions }} "
    "[decision]:<|mark|>",
    "State: {{ state | tojson }}{% for one in questions %}\n{{ one.name }} {{ one.options | join('/') }}<|mark|>"
    "{% endfor %}",
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    return model.eval(), lambda: AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> LLMModel:
    return bundled()


@pytest.mark.parametrize("sanitize", sample([True, False], lambda value: value))
@pytest.mark.parametrize("template", TEMPLATES, ids=["plain", "one", "all"])
def test_tokens_and_answers_are_those_of_transformers(model, oracle, template, sanitize) -> None:
    from transformers.decision import DecisionConfig as TheirConfig
    from transformers.pipelines import DecisionPipeline

    fields = {"labels": LABELS, "temperature": {"choice": 0.5, "score": 3}, "chat_template": template}
    fields |= {"noul_options": ["false", "true"], "sanitize_control_tokens": sanitize}
    network, make_tokenizer = oracle
    theirs = DecisionPipeline(model=network, tokenizer=make_tokenizer(), decision_config=TheirConfig(**fields))
    config = DecisionConfig(**fields)
    makers = DecisionPrompts(model.tokenizer, config)
    for state in STATES:
        request = {"state": state, "questions": QUESTIONS}
        expected = theirs.preprocess(request)
        prompts = makers.read(state, QUESTIONS)
        assert [prompt.tokens for prompt in prompts] == [one["input_ids"][0].tolist() for one, _ in expected["prompts"]]
        assert [prompt.places for prompt in prompts] == [(one["marks"] - 1).tolist() for one, _ in expected["prompts"]]
        answers = theirs.postprocess(theirs.forward(expected))
        check_close(model.decide(state, QUESTIONS, config), answers)


def check_close(found: Any, expected: Any) -> None:
    """Raises AssertionError unless both are the same, but for the 1e-3 of numerics.md in numbers."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-3)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for name in expected:
            check_close(found[name], expected[name])
    else:
        assert found == expected


def test_plain_prompts_are_worded_as_theirs() -> None:
    """All kinds of questions, with labels of other kinds too, against their template."""
    from dataclasses import asdict

    from transformers.decision import DECISION_PROMPT
    from transformers.utils.chat_template_utils import _compile_jinja_template

    from pace.llm.decisions.prompts import plain_prompt
    from pace.llm.decisions.questions import read_questions

    template = _compile_jinja_template(DECISION_PROMPT)
    for labels in ({}, LABELS, {"choice": ["B", "A"], "score": ["1", "2", "3"], "noul": ["Yes", "No", "?"]}):
        for question in read_questions(QUESTIONS, DecisionConfig(labels=labels)):
            for state in STATES:
                expected = template.render(state=state, question=asdict(question))
                assert plain_prompt(state, question) == expected, (labels, question, state)
