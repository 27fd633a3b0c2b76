"""A list of Python calls, bare or between special tokens."""

from pace.llm.chat.arguments import PythonArguments
from pace.llm.chat.format import ToolFormat


def _calls(name: str, sign: str, trigger: str, before: str, after: str, anywhere: bool = True) -> ToolFormat:
    return ToolFormat(
        name=name,
        signs=(sign,),
        trigger=trigger,
        opening=before + "[",
        call="$NAME($ARGS)",
        between=", ",
        closing="]" + after,
        anywhere=anywhere,
        arguments=PythonArguments(),
    )


FORMATS = (
    _calls("lfm2", "List of tools: ", "<|tool_call_start|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    _calls("llama4", "<|python_start|>", "<|python_start|>", "<|python_start|>", "<|python_end|>"),
    _calls("pythonic", "func_name1(params_name1=", "[$NAME(", "", "", anywhere=False),
)
