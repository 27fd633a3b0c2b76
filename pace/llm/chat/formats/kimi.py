"""Kimi K2: a section of calls with numbered ids."""

from pace.llm.chat.format import ToolFormat
from pace.llm.chat.ids import numbered

FORMATS = (
    ToolFormat(
        name="kimi",
        signs=("<|tool_calls_section_begin|>",),
        trigger="<|tool_calls_section_begin|>",
        opening="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>functions.$NAME:$INDEX<|tool_call_argument_begin|>$ARGS<|tool_call_end|>",
        between="",
        closing="<|tool_calls_section_end|>",
        make_id=numbered,
    ),
)
