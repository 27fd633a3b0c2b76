"""Fallback for models trained on no known format: a turn is either JSON objects, one for each call, or text."""

from pace.llm.chat.format import ToolFormat

FORMAT = ToolFormat(
    name="generic",
    signs=(),
    trigger='{"name": "',
    call='{"name": "$NAME", "arguments": $ARGS}',
    anywhere=False,
)
