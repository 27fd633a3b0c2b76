"""Command R7B and later: both an answer and a list of calls are marked."""

from pace.llm.chat.format import ToolFormat

FORMATS = (
    ToolFormat(
        name="command",
        signs=("<|START_ACTION|>", "tool_name"),
        trigger="<|START_ACTION|>",
        opening="<|START_ACTION|>[\n    ",
        call='{"tool_call_id": "$INDEX", "tool_name": "$NAME", "parameters": $ARGS}',
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
        anywhere=False,
        reply=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
)
