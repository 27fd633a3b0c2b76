"""GLM-4.5 and later, which write each argument between tags, and glm-4-9b, of which a turn is one call or text."""

from pace.llm.chat.arguments import TaggedArguments
from pace.llm.chat.format import ToolFormat

FORMATS = (
    ToolFormat(
        name="glm45",
        signs=("<arg_key>", "<arg_value>"),
        trigger="<tool_call>",
        call="<tool_call>$NAME$ARGS\n</tool_call>",
        arguments=TaggedArguments(
            before="\n<arg_key>", after="</arg_key>\n<arg_value>", end="</arg_value>", between=""
        ),
    ),
    ToolFormat(
        name="glm4",
        signs=("# 可用工具",),
        trigger="$NAME\n",
        call="$NAME\n$ARGS",
        between=None,
        anywhere=False,
    ),
)
