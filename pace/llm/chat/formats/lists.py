"""A list of JSON objects after a mark: Phi-4-mini, Granite 3, Firefunction, Nemotron, Apriel."""

from pace.llm.chat.format import ToolFormat


def _list(name: str, signs: tuple[str, ...], before: str, after: str, trigger: str | None = None) -> ToolFormat:
    return ToolFormat(
        name=name,
        signs=signs,
        trigger=trigger or before,
        opening=before + "[",
        call='{"name": "$NAME", "arguments": $ARGS}',
        between=", ",
        closing="]" + after,
    )


FORMATS = (
    _list("phi4_mini", ("<|tool|>", "<|/tool|>"), "<|tool_call|>", "<|/tool_call|>"),
    _list("granite3", ("<|tool_call|>", "available_tools"), "<|tool_call|>", ""),
    _list("functools", ("functools[",), "functools", "", trigger="functools["),
    _list("nemotron", ("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>"),
    _list("apriel", ("<tool_calls>[",), "<tool_calls>", "</tool_calls>"),
)
