"""The formats of tool calls that pace knows, and which of them a chat template has."""

from pace.llm.chat.format import ToolFormat
from pace.llm.chat.formats import (
    command,
    deepseek,
    functionary,
    glm,
    harmony,
    hermes,
    kimi,
    lists,
    llama,
    mistral,
    pythonic,
    qwen_coder,
)
from pace.llm.chat.formats.generic import FORMAT as GENERIC

_FAMILIES = (harmony, kimi, deepseek, command, mistral, glm, qwen_coder, functionary, lists, pythonic, llama, hermes)
FORMATS: dict[str, ToolFormat] = {found.name: found for family in _FAMILIES for found in family.FORMATS} | {
    GENERIC.name: GENERIC
}
"""By name, those with the most telling signs first."""


def detect_format(template: str) -> ToolFormat:
    """The format of models with this chat template, from its text: the first of which all signs are there, else
    `generic`."""
    return next(
        (found for found in FORMATS.values() if found.signs and all(s in template for s in found.signs)), GENERIC
    )


def format_named(name: str) -> ToolFormat:
    """Raises ValueError for a name that is not in FORMATS."""
    if name not in FORMATS:
        raise ValueError(f"no format of tool calls is called {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]
