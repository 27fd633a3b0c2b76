"""The writer, the grammar and the parser of every format agree."""

from __future__ import annotations

import json
import random
import re

import pytest

pytest.importorskip("llguidance")

from pace.grammar import Grammar
from pace.llm.chat import FORMATS, Tool, ToolCall, ToolChoice, TurnParser, detect_format, format_named, turn_grammar
from pace.llm.chat.reasoning import Reasoning
from tests.llm.chat.grammars import (
    FORMAT_NAMES,
    PLAIN,
    TINY,
    accepts,
    call_of,
    random_object,
    random_tools,
    special_names,
    vocabulary,
)
from tests.llm.chat.turns import parse

SEEDS = range(6)


def random_calls(format, tools, rng):
    """Returns random calls, and their arguments as objects."""
    count = 1 if format.between is None else rng.randrange(1, 4)
    chosen = [rng.choice(tools) for _ in range(count)]
    values = [random_object(tool.parameters, rng) for tool in chosen]
    return [call_of(format, tool.name, k) for k, tool in enumerate(chosen)], values


def written(format, seed):
    rng = random.Random(f"{format.name} {seed}")
    tools = random_tools(rng)
    calls, values = random_calls(format, tools, rng)
    text = format.write(calls, {tool.name: tool for tool in tools}, values)
    return tools, calls, values, text, rng


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_what_the_grammar_admits_is_parsed(name):
    """Runs with special tokens and with plain text instead. Each takes the choices required and auto in turn."""
    format = FORMATS[name]
    for seed in SEEDS:
        tools, calls, values, text, rng = written(format, seed)
        for number, words in enumerate((vocabulary(tuple(special_names(format))), vocabulary()), seed):
            mode = ("required", "auto")[number % 2]
            grammar = turn_grammar(format, tools, ToolChoice(mode), special=words.special)
            assert accepts(grammar, words, words.encode(text)), f"{mode}: {text}"
        whole = parse(TurnParser(format, tools), text.replace(PLAIN, ""))
        expected = json.loads(json.dumps(values, ensure_ascii=False).replace(PLAIN, ""))
        assert [name for name, _ in whole.calls] == [call.name for call in calls], text
        assert [json.loads(arguments) for _, arguments in whole.calls] == expected, text
        assert whole.ended == list(range(len(calls))) and whole.text == "" == whole.thought


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_names_and_choices_of_any_characters(name):
    format, odd = (
        FORMATS[name],
        ["a/b", 'a"b', "a\\b", "x y", "#~&-^$.*+?()[]{}|", "größe", "$NAME", "a=b", "a>b", "//"],
    )
    choices = ["red", "red ", "it's", "", "</parameter>", "</arg_value>", "//", "\n", '"q"']
    for number, key in enumerate(odd):
        lists = (choices, choices[:1], choices[2:3])
        for enum in lists if key == "a/b" else lists[number % 3 :][:1]:
            schema = {
                "type": "object",
                "properties": {key: {"enum": enum}, "n": {"type": "integer"}},
                "required": [key],
            }
            tools = [Tool("f", parameters=schema)]
            words = vocabulary(tuple(special_names(format)))
            grammar = turn_grammar(format, tools, ToolChoice("required"), special=words.special)
            for value in enum:
                text = format.write([call_of(format, "f")], {"f": tools[0]}, [{key: value, "n": 1}])
                if not value.startswith("</"):  # it would be encoded as a special token
                    assert accepts(grammar, words, words.encode(text)), text
                calls = parse(TurnParser(format, tools), text).calls
                assert [json.loads(arguments) for _, arguments in calls] == [{key: value, "n": 1}], text


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_cuts_change_nothing(name):
    """Tries one cut at each position, all cuts at once, and random ones. Adds text around if the format allows it."""
    format = FORMATS[name]
    for seed in SEEDS[:3]:
        tools, calls, _, text, rng = written(format, seed)
        text = text.replace(PLAIN, "")
        if format.anywhere:
            text = f"Let me <see>. {text} Done [1] <tool"
        whole = parse(TurnParser(format, tools, make_id="{}{}".format), text)
        assert len(whole.ended) == len(calls)
        cuts = [[k] for k in range(len(text))] + [range(len(text))]
        cuts += [sorted(rng.choices(range(len(text)), k=5)) for _ in range(5)]
        for cut in cuts:
            assert parse(TurnParser(format, tools, make_id="{}{}".format), text, cut) == whole, f"cut at {list(cut)}"


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_cut_turn_has_no_false_end(name):
    """For every prefix of a turn, exactly the completely written calls have ended. The others are prefixes of calls."""
    format = FORMATS[name]
    tools, calls, values, text, _ = written(format, 1)
    by_name = {tool.name: tool for tool in tools}
    texts = [format.write(calls[: k + 1], by_name, values[: k + 1]).replace(PLAIN, "") for k in range(len(calls))]
    ends = [len(part) - len(format.closing) for part in texts]
    whole = parse(TurnParser(format, tools), texts[-1])
    for length in range(len(texts[-1]) + 1):
        cut = parse(TurnParser(format, tools), texts[-1][:length])
        assert cut.ended == [k for k, end in enumerate(ends) if length >= end]
        assert len(cut.calls) <= len(whole.calls)
        for (call, arguments), (full_call, full_arguments) in zip(cut.calls, whole.calls):
            assert call == full_call and full_arguments.startswith(arguments)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_one_call_without_parallel_calls(name):
    format = FORMATS[name]
    if format.between is None:
        pytest.skip("has one call at most anyway")
    tools = random_tools(random.Random(0))
    by_name = {tool.name: tool for tool in tools}
    values = [random_object(tools[0].parameters, random.Random(0))] * 2
    words = vocabulary(tuple(special_names(format)))
    for choice in (ToolChoice("required"), ToolChoice("auto"), ToolChoice("named", (tools[0].name,))):
        one = turn_grammar(format, tools, choice, parallel=False, special=words.special)
        many = turn_grammar(format, tools, choice, parallel=True, special=words.special)
        for count in (1, 2):
            calls = [call_of(format, tools[0].name, k) for k in range(count)]
            tokens = words.encode(format.write(calls, by_name, values[:count]))
            assert accepts(many, words, tokens) == (count == 1 or choice.mode != "named"), (
                "a named function is one call"
            )
            assert accepts(one, words, tokens) == (count == 1)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_blank_space_before_the_end(name):
    """Models write a line end after their last call. A turn may end there, and the whitespace is not text."""
    format = FORMATS[name]
    for seed, blank in enumerate(("\n", " \n\n", "\r\n")):
        tools, calls, _, text, _ = written(format, seed)
        words = vocabulary(tuple(special_names(format)) if seed % 2 else ())
        tokens = words.encode(text) + words.encode(blank)
        choices = [(ToolChoice("required"), True), (ToolChoice("auto"), True)]
        if len(calls) == 1:
            named = ToolChoice("named", (calls[0].name,))
            choices += [(named, True), (named, False), (ToolChoice("required"), False), (ToolChoice("auto"), False)]
        for choice, parallel in choices:
            for has_answer in (False, True) if choice.mode == "auto" else (False,):
                grammar = turn_grammar(format, tools, choice, parallel, None, words.special, has_answer)
                grammar += '\nanswer: "@"\n' if has_answer else ""
                assert accepts(grammar.replace("@answer", "answer"), words, tokens), f"{choice}: {text + blank!r}"
        whole = parse(TurnParser(format, tools, make_id="{}{}".format), (text + blank).replace(PLAIN, ""))
        assert whole.text == "" and whole.ended == list(range(len(calls)))
        length = len((text + blank).replace(PLAIN, ""))
        cut = parse(TurnParser(format, tools, make_id="{}{}".format), (text + blank).replace(PLAIN, ""), range(length))
        assert cut == whole


ANSWERS = {
    "any name": ({"type": "object"}, ['{"name":"Bob"}', '{"name": "clocks"}', '{ "n": 1}', '{\n  "n": [1]\n}', "{}"]),
    "a name": (
        {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["name"]},
        ['{"name":"Bob"}', '{"name": "clock", "n": 3}', '{"name":\n"clock_two"}', '{"name": ""}'],
    ),
    "another": ({"type": "object", "properties": {"n": {}}, "required": ["n"]}, ['{"n":1}', '{ "n": "name"}']),
    "a list": ({"type": "array"}, ["[]", '["clock("]', '[{"name":"clock"}]', "[\n  1\n]"]),
    "a string": ({"type": "string"}, ['""', '"{"', '"<tool"']),
}


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_an_answer_of_json_beside_calls(name):
    """An answer may begin with the same characters as a call."""
    format = FORMATS[name]
    tools = [
        Tool(tool, "", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}) for tool in ("clock", "clock_two")
    ]
    calls = [call_of(format, tool.name) for tool in tools][: 1 if format.between is None else 2]
    for words in {vocabulary(tuple(special_names(format))), vocabulary()}:
        turn = turn_grammar(format, tools, ToolChoice("auto"), special=words.special, has_answer=True)
        one = turn_grammar(format, tools, ToolChoice("auto"), False, special=words.special, has_answer=True)
        written = [
            format.write(some, {tool.name: tool for tool in tools}, [{"a": 1}, {"a": 2}]) for some in (calls, calls[:1])
        ]
        for schema, texts in ANSWERS.values():
            answer = json.loads(Grammar.json_schema(schema).source)["grammars"][0] | {"name": "answer"}
            for lark, is_single in ((turn, False), (one, True)):
                whole = json.dumps({"grammars": [{"name": "turn", "lark_grammar": lark}, answer]})
                for text in texts:
                    assert accepts(whole, words, words.encode(format.reply[0] + text + format.reply[1])), text
                assert accepts(whole, words, words.encode(written[1]))
                assert accepts(whole, words, words.encode(written[0])) != (is_single and len(calls) > 1)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_blank_space_between_a_thought_and_a_call(name):
    format, tools = FORMATS[name], [Tool("clock")]
    words = vocabulary((*special_names(format), "<think>", "</think>"))
    text = format.write([call_of(format, "clock")], {"clock": tools[0]}, [{}])
    for begun in (False, True):
        thought = "<think>" * (not begun) + "Hm.</think>"
        reasoning = Reasoning("<think>", "</think>", begun)
        for mode, names in (("auto", None), ("required", None), ("named", ("clock",))):
            grammar = turn_grammar(format, tools, ToolChoice(mode, names), True, reasoning, words.special)
            for blank in ("", "\n", "\n\n"):
                assert accepts(grammar, words, words.encode(thought + blank + text)), (mode, blank)
                found = parse(TurnParser(format, tools, reasoning), thought + blank + text)
                assert (found.thought, found.text, found.ended) == ("Hm.", "", [0])


@pytest.mark.parametrize("specials", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize(
    "name", ["qwen_coder", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("seed", "glm45"))]
)
def test_a_minimum_length_of_a_text_between_tags(name, specials):
    """The grammar allows exactly the texts that the parser reads as long enough."""
    format = FORMATS[name]
    words = vocabulary(tuple(special_names(format)) if specials else ())
    end = format.arguments.end
    spelled = end[0] + PLAIN + end[1:]
    for length in (1, 2):
        tools = [
            Tool("f", parameters={"properties": {"s": {"type": "string", "minLength": length}}, "required": ["s"]})
        ]
        grammar = turn_grammar(format, tools, ToolChoice("required"), special=words.special)
        call = format.write([ToolCall("1", "f", "")], {"f": tools[0]}, [{"s": "@"}])
        for value in (
            "",
            "\n",
            "a",
            "ab",
            "a\n",
            "\n\n",
            "\n\n\n",
            "é",
            "<",
            "<p>\n",
            end,
            spelled,
            f"a{end}",
            f"a{spelled}b",
        ):
            text = call.replace("@", value)
            found = parse(TurnParser(format, tools), text.replace(PLAIN, ""))
            is_read = found.ended == [0] and not found.text
            is_long = is_read and len(json.loads(found.calls[0][1])["s"]) >= length
            assert accepts(grammar, words, words.encode(text)) == is_long, (length, value)
            assert is_long == (len(value) >= length and end not in value.replace(PLAIN, ""))


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_only_the_tools_that_are_chosen(name):
    format = FORMATS[name]
    rng = random.Random(3)
    tools = random_tools(rng)
    values = random_object(tools[1].parameters, rng)
    call = [call_of(format, tools[1].name)]
    words = vocabulary(tuple(special_names(format)))
    tokens = words.encode(format.write(call, {tool.name: tool for tool in tools}, [values]))
    for names, admitted in (((tools[1].name,), True), ((tools[0].name,), False)):
        for mode in ("required", "named", "auto"):
            grammar = turn_grammar(format, tools, ToolChoice(mode, names), special=words.special)
            if not admitted and mode == "auto" and not format.anywhere and not format.answers_are_marked:
                continue  # a turn that does not begin like a call is text
            assert accepts(grammar, words, tokens) == admitted
            if mode != "auto":
                assert not accepts(grammar, words, words.encode("Hello"))
                assert not accepts(grammar, words, [])


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_rules_do_not_nest_deeply(name):
    """The depth does not grow with a tool's arguments. llguidance's stack overflows at thousands of nested rules."""
    keys = {f"p{index}": {"type": "string"} for index in range(500)}
    grammar = turn_grammar(FORMATS[name], [Tool("f", parameters={"properties": keys})], ToolChoice("required"))
    rules = dict(line.split(": ", 1) for line in grammar.splitlines()[1:])
    uses = {rule.removesuffix("[lazy]"): set(re.findall(r"\w+", rules[rule])) & set(rules) for rule in rules}
    level, depth = {"start"}, 0
    while level:
        level, depth = set().union(*(uses[rule] for rule in level)), depth + 1
    assert 2 <= depth < 25


FRAGMENTS = {
    "harmony": '{{- "<|start|>assistant to=" }}{{- "functions." + call.name + "<|channel|>commentary " }}',
    "kimi": "<|tool_calls_section_begin|>",
    "solar_open": "<|begin|>assistant<|tool_calls|><|tool_call:begin|>{{ id }}<|tool_call:args|>",
    "deepseek_v3": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name"
    " + '\\n```json\\n'",
    "deepseek_v31": "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments",
    "deepseek_v32": "{%- set dsml_token = '｜DSML｜' -%}{{- '\\n\\n<' + dsml_token + 'function_calls>\\n' -}}",
    "deepseek_v4": "{%- set dsml_token = '｜DSML｜' -%}{{- '\\n\\n<' + dsml_token + 'tool_calls>\\n' -}}",
    "command": '<|START_ACTION|>[ {"tool_call_id": "0", "tool_name": "{{ name }}", "parameters": {}}',
    "mistral_call_id": "{{- '[TOOL_CALLS]' + name }}{{- '[CALL_ID]' + call.id }}{{- '[ARGS]' + arguments }}",
    "mistral_v11": "{{- '[TOOL_CALLS]' }}{{- name + '[ARGS]' + arguments }}",
    "mistral": "{{- '[TOOL_CALLS][' }}{{- ', \"id\": \"' + call.id + '\"}' }}",
    "hunyuan3_open": "{%- set mark = ':opensource' %}{%- set sep = '<tool_sep{}>'.format(mark) %}<arg_key{}>",
    "hunyuan3": "<tool_calls>\n<tool_call>{{ name }}<tool_sep>\n<arg_key>k</arg_key>\n<arg_value>v</arg_value>",
    "glm45": "<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></tool_call>",
    "glm4": "# 可用工具",
    "chatglm3": "[gMASK]sop ```python\\ntool_call(",
    "seed": "<seed:tool_call>\n<function=f>\n<parameter=p>v</parameter>",
    "qwen_coder": "{{- '\\n<tool_call>\\n<function=' + name + '>\\n' }}{{- '<parameter=' + key + '>\\n' }}",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="k">v</parameter>\n</invoke>',
    "gemma4": "{{- '<|tool_call>call:' + function['name'] + '{' -}}{{- '}<tool_call|>' -}}",
    "functionary": "start_tag = <function=example_function_name>{}</function>",
    "phi4_mini": "'<|tool|>' + message['tools'] + '<|/tool|>'",
    "granite3": "{%- set available_tools = tools %} respond only with <|tool_call|>",
    "functools": "functools[{{ calls }}]",
    "nemotron": "<TOOLCALL>[{{ calls }}]</TOOLCALL>",
    "apertus": "{%- set token = '<|tools_prefix|>' -%}{{ token + '[' }}",
    "apriel": "<tool_calls>[{{ calls }}]</tool_calls>",
    "lfm2": "'List of tools: <|tool_list_start|>['",
    "llama4": "<|python_start|>",
    "olmo3": "<function_calls>{{ message.function_calls }}</function_calls>",
    "pythonic": "[func_name1(params_name1=params_value1, params_name2=params_value2...), func_name2(params)]",
    "llama3": 'Environment: ipython Respond in the format {"name": function name, '
    '"parameters": dictionary of argument name and its value}.',
    "llama3_python_tag": '<|python_tag|>{"name": "f", "parameters": {}}',
    "hermes": '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>',
    "generic": "{% for message in messages %}{{ message.content }}{% endfor %}",
}


def test_formats_are_detected_by_their_templates():
    assert set(FRAGMENTS) == set(FORMATS)
    for name, fragment in FRAGMENTS.items():
        assert detect_format("{{ bos_token }}" + fragment).name == name
    assert detect_format((TINY.parent / "chat_template.jinja").read_text()).name == "hermes"


@pytest.mark.parametrize("name", [name for name, fragment in FRAGMENTS.items() if "{{ calls }}" in fragment])
def test_lists_of_calls_are_written_as_their_templates_write_them(name):
    before, after = FRAGMENTS[name].split("[{{ calls }}]")
    text = FORMATS[name].write([ToolCall("123456789", "f", "")], {"f": Tool("f")}, [{}])
    assert text == before + '[{"name": "f", "arguments": {}}]' + after


def test_formats_have_names():
    assert all(format_named(name).name == name for name in FORMATS)
    with pytest.raises(ValueError, match="'xml'; there are .*hermes.*generic"):
        format_named("xml")
