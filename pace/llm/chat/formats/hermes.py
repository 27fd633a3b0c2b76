"""Hermes and Qwen: one JSON object per call, between tags."""

from pace.llm.chat.format import ToolFormat

FORMATS = (
    ToolFormat(
        name="hermes",
        signs=("<tool_call>", '"arguments'),
        trigger="<tool_call>",
        call='<tool_call>\n{"name": "$NAME", "arguments": $ARGS}\n</tool_call>',
    ),
)
