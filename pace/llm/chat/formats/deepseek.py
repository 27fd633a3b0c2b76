"""DeepSeek V3 and R1, with arguments in a code block, and V3.1, without one."""

from pace.llm.chat.format import ToolFormat


def _calls(name: str, signs: tuple[str, ...], call: str, between: str) -> ToolFormat:
    return ToolFormat(
        name=name,
        signs=("<｜tool▁calls▁begin｜>", *signs),
        trigger="<｜tool▁calls▁begin｜>",
        opening="<｜tool▁calls▁begin｜>",
        call=f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>",
        between=between,
        closing="<｜tool▁calls▁end｜>",
    )


FORMATS = (
    _calls("deepseek_v3", ("```json",), "function<｜tool▁sep｜>$NAME\n```json\n$ARGS\n```", "\n"),
    _calls("deepseek_v31", ("<｜tool▁sep｜>",), "$NAME<｜tool▁sep｜>$ARGS", ""),
)
