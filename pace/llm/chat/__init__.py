"""Turns of a conversation: grammars and parsers for the tool calls and reasoning that a model writes.

Data and pure functions: nothing here runs a model.
"""

from pace.llm.chat.events import ArgumentsPiece, CallBegins, CallEnds, Event, Text, Thought, calls_of, thought_of
from pace.llm.chat.format import ToolFormat
from pace.llm.chat.formats import FORMATS, detect_format, format_named
from pace.llm.chat.grammar import turn_grammar
from pace.llm.chat.parser import TurnParser
from pace.llm.chat.reasoning import Reasoning, detect_reasoning
from pace.llm.chat.tools import Tool, ToolCall, ToolChoice, ToolError, read_choice, read_tools

__all__ = ["FORMATS", "ArgumentsPiece", "CallBegins", "CallEnds", "Event", "Reasoning", "Text", "Thought", "Tool",
           "ToolCall", "ToolChoice", "ToolError", "ToolFormat", "TurnParser", "calls_of", "detect_format",
           "detect_reasoning", "format_named", "read_choice", "read_tools", "thought_of", "turn_grammar"]  # fmt: skip
