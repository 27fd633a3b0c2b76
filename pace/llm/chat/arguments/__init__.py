"""How the arguments of a call are written. Each way writes them, has a grammar of them, and reads them as JSON text."""

from pace.llm.chat.arguments.base import Arguments, Reader, Reading, Rules, State
from pace.llm.chat.arguments.json_arguments import JsonArguments
from pace.llm.chat.arguments.python_arguments import PythonArguments
from pace.llm.chat.arguments.tagged_arguments import TaggedArguments

__all__ = ["Arguments", "JsonArguments", "PythonArguments", "Reader", "Reading", "Rules", "State", "TaggedArguments"]
