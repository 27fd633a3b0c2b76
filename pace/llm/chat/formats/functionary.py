"""Functionary 3.1: the name in a tag, the arguments as JSON."""

from pace.llm.chat.format import ToolFormat

FORMATS = (
    ToolFormat(
        name="functionary",
        signs=("<function=", "</function>", "example_function_name", "start_tag"),
        trigger="<function=",
        call="<function=$NAME>$ARGS</function>",
        between="",
    ),
)
