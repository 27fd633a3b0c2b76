"""The supported formats of tool calls, and how to detect the format of a chat template."""

from __future__ import annotations

from typing import Any

from pace.llm.chat.arguments import GemmaArguments, PythonArguments, TaggedArguments
from pace.llm.chat.format import ToolFormat
from pace.llm.chat.ids import nine_characters, numbered, ten_characters

_OBJECT = '{"name": "$NAME", "arguments": $ARGS}'


def _deepseek(name: str, signs: tuple[str, ...], call: str, between: str) -> ToolFormat:
    return ToolFormat(
        name,
        f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
        signs=("<｜tool▁calls▁begin｜>", *signs),
        opening="<｜tool▁calls▁begin｜>",
        between=between,
        closing="<｜tool▁calls▁end｜>",
    )


def _dsml(name: str, section: str) -> ToolFormat:
    """DeepSeek V3.2 and V4: a section of calls, each argument between tags that say if it is text or JSON."""
    return ToolFormat(
        name,
        '<｜DSML｜invoke name="$NAME">\n$ARGS</｜DSML｜invoke>',
        trigger=f"<｜DSML｜{section}>",
        signs=("｜DSML｜", f"{section}>"),
        opening=f"<｜DSML｜{section}>\n",
        closing=f"\n</｜DSML｜{section}>",
        arguments=TaggedArguments(
            before='<｜DSML｜parameter name="',
            after='" string="true">',
            json_after='" string="false">',
            end="</｜DSML｜parameter>",
        ),
    )


def _list(name: str, signs: tuple[str, ...], before: str, after: str, trigger: str, **options: Any) -> ToolFormat:
    """A list of calls between marks."""
    given = {"call": _OBJECT, "trigger": trigger, "signs": signs, "between": ", ", **options}
    return ToolFormat(name, opening=before + "[", closing="]" + after, **given)


def _python(name: str, sign: str, before: str, after: str, trigger: str, anywhere: bool = True) -> ToolFormat:
    """A list of Python calls."""
    options = {"call": "$NAME($ARGS)", "arguments": PythonArguments(), "anywhere": anywhere}
    return _list(name, (sign,), before, after, trigger, **options)


def _hunyuan3(name: str, signs: tuple[str, ...], mark: str) -> ToolFormat:
    """A section of calls whose tags end with `mark`, each argument between tags."""
    return ToolFormat(
        name,
        f"<tool_call{mark}>$NAME<tool_sep{mark}>\n$ARGS</tool_call{mark}>",
        trigger=f"<tool_calls{mark}>",
        signs=signs,
        opening=f"<tool_calls{mark}>\n",
        closing=f"\n</tool_calls{mark}>",
        arguments=TaggedArguments(
            before=f"<arg_key{mark}>", after=f"</arg_key{mark}>\n<arg_value{mark}>", end=f"</arg_value{mark}>"
        ),
    )


_ALL = (
    # gpt-oss: each message names its channel. A turn is reasoning and remarks, followed by one call or the answer.
    ToolFormat(
        "harmony",
        "<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>$ARGS",
        trigger="<|channel|>commentary to=",
        signs=("<|start|>assistant", "<|channel|>", "functions"),
        between=None,
        anywhere=False,
        reply=("<|channel|>final<|message|>", ""),
        preamble=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
    ),
    # Kimi K2: a section of calls with numbered ids.
    ToolFormat(
        "kimi",
        "<|tool_call_begin|>functions.$NAME:$INDEX<|tool_call_argument_begin|>$ARGS<|tool_call_end|>",
        trigger="<|tool_calls_section_begin|>",
        signs=("<|tool_calls_section_begin|>",),
        opening="<|tool_calls_section_begin|>",
        between="",
        closing="<|tool_calls_section_end|>",
        make_id=numbered,
    ),
    # Solar-Open: a section of calls with ids. The answer is marked, too.
    ToolFormat(
        "solar_open",
        "<|tool_call:begin|>$ID10<|tool_call:name|>$NAME<|tool_call:args|>$ARGS<|tool_call:end|>",
        trigger="<|tool_calls|>",
        signs=("<|tool_calls|>", "<|tool_call:args|>"),
        opening="<|tool_calls|>",
        between="",
        anywhere=False,
        reply=("<|content|>", "<|end|>"),
        make_id=ten_characters,
    ),
    # DeepSeek V3 and R1, with arguments in a code block, and V3.1, without one.
    _deepseek("deepseek_v3", ("```json",), "function<｜tool▁sep｜>$NAME\n```json\n$ARGS\n```", "\n"),
    _deepseek("deepseek_v31", ("<｜tool▁sep｜>",), "$NAME<｜tool▁sep｜>$ARGS", ""),
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    # Command R7B and later: both an answer and a list of calls are marked.
    ToolFormat(
        "command",
        '{"tool_call_id": "$INDEX", "tool_name": "$NAME", "parameters": $ARGS}',
        trigger="<|START_ACTION|>",
        signs=("<|START_ACTION|>", "tool_name"),
        opening="<|START_ACTION|>[\n    ",
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
        anywhere=False,
        reply=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    # Mistral: a list of JSON objects; since tokenizer version 11, the name and the arguments after special tokens.
    ToolFormat(
        "mistral_call_id",
        "[TOOL_CALLS]$NAME[CALL_ID]$ID[ARGS]$ARGS",
        trigger="[TOOL_CALLS]",
        signs=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        between="",
        make_id=nine_characters,
    ),
    ToolFormat(
        "mistral_v11",
        "[TOOL_CALLS]$NAME[ARGS]$ARGS",
        trigger="[TOOL_CALLS]",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        between="",
        make_id=nine_characters,
    ),
    _list(
        "mistral",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        "",
        "[TOOL_CALLS]",
        call='{"name": "$NAME", "arguments": $ARGS, "id": "$ID"}',
        make_id=nine_characters,
    ),
    # Hunyuan 3. The tags of the open checkpoints end with a mark.
    _hunyuan3("hunyuan3_open", ("<tool_sep{}>", ":opensource"), ":opensource"),
    _hunyuan3("hunyuan3", ("<tool_sep>", "<arg_key>"), ""),
    # GLM-4.5 and later, with each argument between tags; glm-4-9b and ChatGLM3, whose turns are one call or text. A
    # turn of ChatGLM3 begins with a line, which is empty if it is not a call.
    ToolFormat(
        "glm45",
        "<tool_call>$NAME$ARGS\n</tool_call>",
        trigger="<tool_call>",
        signs=("<arg_key>", "<arg_value>"),
        arguments=TaggedArguments(
            before="\n<arg_key>", after="</arg_key>\n<arg_value>", end="</arg_value>", between=""
        ),
    ),
    ToolFormat("glm4", "$NAME\n$ARGS", trigger="$NAME\n", signs=("# 可用工具",), between=None, anywhere=False),
    ToolFormat(
        "chatglm3",
        "$NAME\n ```python\ntool_call($ARGS)\n```",
        trigger="$NAME\n",
        signs=("[gMASK]sop", "tool_call("),
        between=None,
        anywhere=False,
        reply=("\n", ""),
        arguments=PythonArguments(),
    ),
    # Qwen3-Coder and others that write each argument between separate tags.
    ToolFormat(
        "seed",
        "<seed:tool_call>\n<function=$NAME>\n$ARGS</function>\n</seed:tool_call>",
        trigger="<seed:tool_call>",
        signs=("<seed:tool_call>", "<parameter="),
        arguments=TaggedArguments(before="<parameter=", after=">", end="</parameter>"),
    ),
    ToolFormat(
        "qwen_coder",
        "<tool_call>\n<function=$NAME>\n$ARGS</function>\n</tool_call>",
        trigger="<tool_call>",
        signs=("<tool_call>", "<function=", "<parameter="),
        arguments=TaggedArguments(before="<parameter=", after=">", end="</parameter>", padding="\n"),
    ),
    # MiniMax-M2: a section of calls, each argument between tags.
    ToolFormat(
        "minimax_m2",
        '<invoke name="$NAME">\n$ARGS</invoke>',
        trigger="<minimax:tool_call>",
        signs=("<minimax:tool_call>", "<invoke name="),
        opening="<minimax:tool_call>\n",
        closing="\n</minimax:tool_call>",
        arguments=TaggedArguments(before='<parameter name="', after='">', end="</parameter>"),
    ),
    # Gemma 4: values without JSON's quotes.
    ToolFormat(
        "gemma4",
        "<|tool_call>call:$NAME{$ARGS}<tool_call|>",
        trigger="<|tool_call>",
        signs=("<|tool_call>call:",),
        between="",
        arguments=GemmaArguments(),
    ),
    # Functionary 3.1: the name in a tag, the arguments as JSON.
    ToolFormat(
        "functionary",
        "<function=$NAME>$ARGS</function>",
        trigger="<function=",
        signs=("<function=", "</function>", "example_function_name", "start_tag"),
        between="",
    ),
    # A list of JSON objects after a mark.
    _list("phi4_mini", ("<|tool|>", "<|/tool|>"), "<|tool_call|>", "<|/tool_call|>", "<|tool_call|>"),
    _list("granite3", ("<|tool_call|>", "available_tools"), "<|tool_call|>", "", "<|tool_call|>"),
    _list("functools", ("functools[",), "functools", "", "functools["),  # Firefunction
    _list("nemotron", ("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>", "<TOOLCALL>"),
    _list(
        "apertus",
        ("<|tools_prefix|>",),
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        "<|tools_prefix|>",
        call='{"$NAME": $ARGS}',
    ),
    _list("apriel", ("<tool_calls>[",), "<tool_calls>", "</tool_calls>", "<tool_calls>"),
    # A list of Python calls, bare or between special tokens.
    _python("lfm2", "List of tools: ", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call_start|>"),
    _python("llama4", "<|python_start|>", "<|python_start|>", "<|python_end|>", "<|python_start|>"),
    ToolFormat(
        "olmo3",
        "$NAME($ARGS)",
        trigger="<function_calls>",
        signs=("<function_calls>",),
        opening="<function_calls>",
        closing="</function_calls>",
        arguments=PythonArguments(),
    ),
    _python("pythonic", "func_name1(params_name1=", "", "", "[$NAME(", anywhere=False),
    # Llama 3.1 to 3.3: a turn is either one JSON object or text.
    ToolFormat(
        "llama3",
        '{"name": "$NAME", "parameters": $ARGS}',
        trigger='{"name": "',
        signs=('"parameters": dictionary of argument name and its value', "ipython"),
        between=None,
        anywhere=False,
    ),
    ToolFormat(
        "llama3_python_tag",
        '<|python_tag|>{"name": "$NAME", "parameters": $ARGS}',
        trigger="<|python_tag|>",
        signs=('<|python_tag|>{"name"',),
        between=None,
    ),
    # Hermes and Qwen: one JSON object per call, between tags.
    ToolFormat(
        "hermes",
        f"<tool_call>\n{_OBJECT}\n</tool_call>",
        trigger="<tool_call>",
        signs=("<tool_call>", '"arguments'),
    ),
    # Fallback for models trained on no known format: a turn is either JSON objects, one for each call, or text.
    ToolFormat("generic", _OBJECT, trigger='{"name": "', anywhere=False),
)
FORMATS: dict[str, ToolFormat] = {format.name: format for format in _ALL}
"""Formats by name; those with the most specific signs come first."""


def detect_format(template: str) -> ToolFormat:
    """Returns the first format whose signs are all in this chat template, else `generic`."""
    fitting = (found for found in _ALL if found.signs and all(sign in template for sign in found.signs))
    return next(fitting, FORMATS["generic"])


def format_named(name: str) -> ToolFormat:
    """Returns a format by name. Raises ValueError for a name that is not in FORMATS."""
    if name not in FORMATS:
        raise ValueError(f"no format of tool calls is called {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]
