"""Qwen3-Coder and others that write each argument between separate tags."""

from pace.llm.chat.arguments import TaggedArguments
from pace.llm.chat.format import ToolFormat

_PARAMETERS = TaggedArguments(before="<parameter=", after=">", end="</parameter>", padding="\n")

FORMATS = (
    ToolFormat(
        name="seed",
        signs=("<seed:tool_call>", "<parameter="),
        trigger="<seed:tool_call>",
        call="<seed:tool_call>\n<function=$NAME>\n$ARGS</function>\n</seed:tool_call>",
        arguments=TaggedArguments(before="<parameter=", after=">", end="</parameter>"),
    ),
    ToolFormat(
        name="qwen_coder",
        signs=("<tool_call>", "<function=", "<parameter="),
        trigger="<tool_call>",
        call="<tool_call>\n<function=$NAME>\n$ARGS</function>\n</tool_call>",
        arguments=_PARAMETERS,
    ),
)
