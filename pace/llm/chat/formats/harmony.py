"""gpt-oss: each message names its channel. A turn is reasoning and remarks, followed by one call or the answer."""

from pace.llm.chat.format import ToolFormat

FORMATS = (
    ToolFormat(
        name="harmony",
        signs=("<|start|>assistant", "<|channel|>", "functions"),
        trigger="<|channel|>commentary to=",
        call="<|channel|>commentary to=functions.$NAME <|constrain|>json<|message|>$ARGS",
        between=None,
        anywhere=False,
        reply=("<|channel|>final<|message|>", ""),
        preamble=("<|channel|>commentary<|message|>", "<|end|><|start|>assistant"),
    ),
)
