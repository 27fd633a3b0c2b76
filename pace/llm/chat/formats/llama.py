"""Llama 3.1 to 3.3: a turn is either one JSON object or text."""

from pace.llm.chat.format import ToolFormat

_CALL = '{"name": "$NAME", "parameters": $ARGS}'

FORMATS = (
    ToolFormat(
        name="llama3",
        signs=('"parameters": dictionary of argument name and its value', "ipython"),
        trigger='{"name": "',
        call=_CALL,
        between=None,
        anywhere=False,
    ),
    ToolFormat(
        name="llama3_python_tag",
        signs=('<|python_tag|>{"name"',),
        trigger="<|python_tag|>",
        call="<|python_tag|>" + _CALL,
        between=None,
    ),
)
