"""Chat templates that a checkpoint of InternVLChatModel only names: `template` in its config.json. The published code
has them as Python objects."""

from __future__ import annotations

from pathlib import Path

from pace.checkpoints.files import MAX_CONFIG_BYTES, read_json_object

_NEW = "你是书生·万象，英文名是InternVL，是由上海人工智能实验室、清华大学及多家合作单位联合开发的多模态大语言模型。"
_OLD = "你是由上海人工智能实验室联合商汤科技开发的书生多模态大模型，英文名叫InternVL, 是一个有用无害的人工智能助手。"
_BEGIN = "{{- bos_token -}}"
CONVERSATIONS = {
    "Hermes-2": ("", "<|im_start|>", r"\n", "<|im_end|>", _OLD),
    "internlm2-chat": (_BEGIN, "<|im_start|>", r"\n", "<|im_end|>", _OLD),
    "internvl2_5": ("", "<|im_start|>", r"\n", r"<|im_end|>\n", _NEW),
    "phi3-chat": (_BEGIN, "<|", r"|>\n", "<|end|>", _OLD),
}
"""Name -> the parts that PARTS names."""
PARTS = ("BEGIN", "BEFORE", "AFTER", "END", "INSTRUCTIONS")
"""The beginning of a conversation, the texts before and after a role, and the end of a turn. The instructions are for
conversations without any."""
TEMPLATE = (
    "BEGIN{%- if messages[0].role != 'system' -%}{{ 'BEFOREsystemAFTERINSTRUCTIONSEND' }}{%- endif -%}"
    "{%- for message in messages -%}{{ 'BEFORE' + message.role + 'AFTER' + message.content + 'END' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'BEFOREassistantAFTER' }}{%- endif -%}"
)


def read_conversation(directory: Path) -> str | None:
    """Returns the template that the config.json of a directory names; None if it names none that is known here. Raises
    what `read_json_object` raises."""
    path = directory / "config.json"
    config = read_json_object(path, MAX_CONFIG_BYTES) if path.is_file() else {}
    name = config.get("template")
    if config.get("model_type") != "internvl_chat" or not isinstance(name, str) or name not in CONVERSATIONS:
        return None
    template = TEMPLATE
    for part, text in zip(PARTS, CONVERSATIONS[name]):
        template = template.replace(part, text)
    return template
