"""GLM-4.5 and later, which write each argument between tags, and glm-4-9b and ChatGLM3, of which a turn is one call or
text. ChatGLM3 begins each turn with a line, which is empty where it calls nothing."""

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
