"""The supported formats of tool calls, and how to detect the format of a chat template."""

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
"""Formats by name; those with the most specific signs come first."""


def detect_format(template: str) -> ToolFormat:
    """Returns the first format whose signs are all in this chat template, else `generic`."""
    return next(
        (found for found in FORMATS.values() if found.signs and all(s in template for s in found.signs)), GENERIC
    )


def format_named(name: str) -> ToolFormat:
    """Returns a format by name. Raises ValueError for a name that is not in FORMATS."""
    if name not in FORMATS:
        raise ValueError(f"no format of tool calls is called {name!r}; there are {', '.join(FORMATS)}")
    return FORMATS[name]
