"""GLM-4.5 and later, with each argument between tags; glm-4-9b and ChatGLM3, whose turns are one call or text. A turn
of ChatGLM3 begins with a line, which is empty if it is not a call."""

from pace.llm.chat.arguments import PythonArguments, TaggedArguments
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
    ToolFormat(
        name="chatglm3",
        signs=("[gMASK]sop", "tool_call("),
        trigger="$NAME\n",
        call="$NAME\n ```python\ntool_call($ARGS)\n```",
        between=None,
        anywhere=False,
        reply=("\n", ""),
        arguments=PythonArguments(),
    ),
)
