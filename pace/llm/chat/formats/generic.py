"""For models that were taught no format of ours: a turn is JSON objects, one a call, or text."""

from pace.llm.chat.format import ToolFormat

FORMAT = ToolFormat(
    name="generic",
    signs=(),
    trigger='{"name": "',
    call='{"name": "$NAME", "arguments": $ARGS}',
    anywhere=False,
)
