"""Mistral: a list of JSON objects; since tokenizer version 11, the name and the arguments after special tokens."""

from pace.llm.chat.format import ToolFormat
from pace.llm.chat.ids import nine_characters

FORMATS = (
    ToolFormat(
        name="mistral_call_id",
        signs=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        call="[TOOL_CALLS]$NAME[CALL_ID]$ID[ARGS]$ARGS",
        between="",
        make_id=nine_characters,
    ),
    ToolFormat(
        name="mistral_v11",
        signs=("[TOOL_CALLS]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        call="[TOOL_CALLS]$NAME[ARGS]$ARGS",
        between="",
        make_id=nine_characters,
    ),
    ToolFormat(
        name="mistral",
        signs=("[TOOL_CALLS]",),
        trigger="[TOOL_CALLS]",
        opening="[TOOL_CALLS][",
        call='{"name": "$NAME", "arguments": $ARGS, "id": "$ID"}',
        between=", ",
        closing="]",
        make_id=nine_characters,
    ),
)
