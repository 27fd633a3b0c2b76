"""Models with channels (gpt-oss): thoughts, remarks, calls and the answer are distinguished. A grammar allows all of
them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("transformers")

from transformers import PreTrainedTokenizerFast

from pace.grammar import Grammar
from pace.llm.chat import Text, Thought, ToolChoice, calls_of, read_tools
from pace.llm.chat.reasoning import COMMAND_THINKING, HARMONY_ANALYSIS, THINK
from pace.llm.chat.template import ChatTemplate
from pace.llm.chat.turn import TurnReader, plan_turn, turn_after
from tests.llm.chat.grammars import END, accepts, vocabulary

NAMES = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>")
WORDS = vocabulary(NAMES, "<|return|>")
TEMPLATE = "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}" \
    "{% set c = m.tool_calls[0].function %}" \
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson " \
    "}}<|call|>" \
    "{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}" \
    "{% elif m.role == 'tool' %}<|start|>functions.f to=assistant<|channel|>commentary<|message|>{{ m.content }}" \
    "<|end|>" \
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}{{ tools | tojson if tools and loop.first }}<|end|>" \
    "{% endif %}{% endfor %}{# <|channel|>analysis<|message|> functions #}" \
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"  # fmt: skip
TOOLS = read_tools([{"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}}])
AUTO = ToolChoice("auto")
ASKED = [{"role": "user", "content": "Well?"}]

BEGINS = "<|channel|>analysis<|message|>"
THINKS = BEGINS + "Hm, {} <|end|><|start|>assistant"
REMARKS = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
CALLS = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}'
SAYS = "<|channel|>final<|message|>Two."
SAYS_JSON = '<|channel|>final<|message|>{"n":1}'
JSON = Grammar.json_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})


@pytest.fixture(scope="module")
def template():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=WORDS.tokens, eos_token="<|return|>")
    tokenizer.add_special_tokens({"additional_special_tokens": list(NAMES)})
    tokenizer.chat_template = TEMPLATE
    return ChatTemplate(tokenizer)


def read(turn, text):
    """Returns the thought, the text and the calls of an answer, and the number of tokens of its thought."""
    reader = TurnReader(turn)
    for token in WORDS.encode(text):
        reader.push("" if token in turn.hidden else WORDS.decode([token]))
    events = reader.drain(is_ended=True)[1]
    thought = "".join(event.text for event in events if isinstance(event, Thought))
    text = "".join(event.text for event in events if isinstance(event, Text))
    return thought, text, [(call.name, json.loads(call.arguments)) for call in calls_of(events)], reader.num_thought


def allows(turn, text):
    return accepts(turn.grammar.source, WORDS, WORDS.encode(text))


@pytest.mark.parametrize(
    "talk",
    [ASKED, [*ASKED, {"role": "assistant", "content": "Two."}, *ASKED],
     [*ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
      {"role": "tool", "content": "2"}]],
    ids=["question", "second question", "result"],
)  # fmt: skip
def test_thoughts_are_told_apart(template, talk):
    turn = plan_turn(template, talk)
    assert turn.prompt.endswith("<|end|><|start|>assistant") and turn.grammar is None and not turn.is_plain
    thought, text, calls, num_thought = read(turn, THINKS + SAYS)
    assert (thought, text, calls) == ("Hm, {} ", "Two.", []) and num_thought >= 3
    assert read(turn, SAYS)[:3] == ("", "Two.", [])
    assert read(turn, THINKS + THINKS + SAYS)[:2] == ("Hm, {} Hm, {} ", "Two.")
    assert read(turn, THINKS + REMARKS + THINKS + SAYS)[:2] == ("Hm, {} Hm, {} ", "I look.Two.")
    assert read(turn, THINKS[:-25])[:2] == ("Hm, {} ", ""), "a thought that was cut"
    called = plan_turn(template, talk, TOOLS)
    assert read(called, THINKS + REMARKS + CALLS)[:3] == ("Hm, {} ", "I look.", [("f", {"n": 1})])


BEFORE = ["", THINKS, THINKS + THINKS, THINKS + REMARKS, REMARKS + THINKS + REMARKS]


@pytest.mark.parametrize("before", BEFORE)
def test_channels_stay_possible(template, before):
    """A schema, tools, or both still allow the thoughts and remarks before an answer."""
    only_json = plan_turn(template, ASKED, answer=JSON)
    assert allows(only_json, before + SAYS_JSON) and not allows(only_json, before + SAYS)
    assert read(only_json, before + SAYS_JSON)[1].endswith('{"n":1}')
    free = plan_turn(template, ASKED, TOOLS)
    assert allows(free, before + CALLS) and allows(free, before + SAYS)
    assert not allows(free, before + CALLS.replace("1", "a"))
    both = plan_turn(template, ASKED, TOOLS, answer=JSON)
    assert allows(both, before + CALLS) and allows(both, before + SAYS_JSON) and not allows(both, before + SAYS)
    for choice in (ToolChoice("required"), ToolChoice("named", ("f",))):
        called = plan_turn(template, ASKED, TOOLS, choice)
        assert allows(called, before + CALLS) == (REMARKS not in before), "a turn that must call says nothing else"
        assert not allows(called, before + SAYS)


def test_a_schema_without_marks(template):
    assert allows(plan_turn(template, ASKED, answer=JSON), '{"n":1}')


def test_a_thought_that_the_prompt_began(template):
    """If a prompt ends inside the analysis channel, the thought goes on, more thoughts may follow, and then the
    answer."""
    prompt = "<|start|>assistant<|channel|>analysis<|message|>"
    for before in ("", THINKS, REMARKS + THINKS):
        turn = turn_after(prompt, template, answer=JSON)
        assert turn.reasoning.begun and allows(turn, THINKS.removeprefix(BEGINS) + before + SAYS_JSON)
        assert not allows(turn, before + SAYS_JSON), "a thought that has begun comes to its end"
        thought, text, _, _ = read(turn, THINKS.removeprefix(BEGINS) + before + SAYS_JSON)
        assert thought.startswith("Hm, {} ") and text.endswith('{"n":1}')


def test_whether_a_prompt_has_ended_the_thought():
    assert HARMONY_ANALYSIS.after("<|start|>user<|message|>Well?<|end|><|start|>assistant") == HARMONY_ANALYSIS
    assert THINK.after("<think>\n\n</think>\n\n") is None and COMMAND_THINKING.after("<|END_THINKING|>") is None


def test_marks_of_an_answer_with_a_schema_in_other_formats():
    """Command R7B writes either a list of calls or a marked answer."""
    names = ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>")
    words = vocabulary(names)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words.tokens, eos_token=END)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    for thinks in (True, False):
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{# <|START_ACTION|> tool_name #}" \
            + "{# <|START_THINKING|> #}" * thinks  # fmt: skip
        turn = plan_turn(ChatTemplate(tokenizer), ASKED, answer=JSON)
        for text in ('<|START_RESPONSE|>{"n":1}<|END_RESPONSE|>', '{"n":1}'):
            for thought in ("", "<|START_THINKING|>Hm.<|END_THINKING|>") if thinks else ("",):
                assert accepts(turn.grammar.source, words, words.encode(thought + text)), thought + text
        assert not accepts(turn.grammar.source, words, words.encode("<|START_RESPONSE|>Two.<|END_RESPONSE|>"))
