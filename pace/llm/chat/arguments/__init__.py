"""Notations for the arguments of a call. Each can write arguments, make a grammar of them, and parse them to JSON
text."""

from pace.llm.chat.arguments.base import Arguments, Reader, Reading, Rules, State
from pace.llm.chat.arguments.gemma_arguments import GemmaArguments
from pace.llm.chat.arguments.json_arguments import JsonArguments
from pace.llm.chat.arguments.python_arguments import PythonArguments
from pace.llm.chat.arguments.tagged_arguments import TaggedArguments

__all__ = [
    "Arguments",
    "GemmaArguments",
    "JsonArguments",
    "PythonArguments",
    "Reader",
    "Reading",
    "Rules",
    "State",
    "TaggedArguments",
]
