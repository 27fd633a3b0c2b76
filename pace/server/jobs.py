"""Jobs: requests in a form that is independent of their API."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pace.grammar import Grammar, GrammarLimits
from pace.llm.chat.turn import Turn
from pace.llm.configs import SamplingConfig
from pace.llm.processors.prompts import MediaPart
from pace.llm.sequence import Sequence
from pace.server.errors import ApiError

GrammarReader = Callable[[Any, GrammarLimits, str], Grammar | None]
"""Function that reads a value, with limits and the whitespace of JSON, as in `Grammar.json_schema`."""


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the tokenizer's chat template, in its terms: `role`, and `content` as one string, or as parts if it
    has images or sound."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """True if the answer continues the last message, which is the assistant's."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    """True to add the tokenizer's special tokens before the template's own."""
    param: str = "messages"
    """The client's name for the messages."""
    tools: list[Any] | None = None
    """Tools that the model may call, in the client's form."""
    tool_choice: Any = None
    parallel_calls: bool = True
    passed_over: tuple[str, ...] = ()
    """Names of the ignored parts of the request, for the log."""


@dataclass(frozen=True)
class TextPrompts:
    """Texts, or token ids, each continued separately."""

    items: list[Any]
    """Strings or lists of ids, as the client sent them: checked by the worker that reads them."""
    add_special_tokens: bool = True
    suffix: str | None = None
    """Text after the gap to be filled; None without a gap."""
    media: tuple[MediaPart, ...] = ()
    """Images and sound of the only text, one for each placeholder."""


@dataclass(frozen=True)
class Structure:
    """A constraint on the text, as sent by the client. A worker reads it: a schema may be long."""

    param: str
    value: Any
    reader: GrammarReader
    whitespace: str = "flexible"
    """Whitespace in JSON."""

    def read(self, limits: GrammarLimits) -> Grammar | None:
        """Returns the grammar; None for plain text. Raises ApiError."""
        try:
            return self.reader(self.value, limits, self.whitespace)
        except (TypeError, ValueError) as error:
            raise ApiError(400, f"{self.param}: {error}", param=self.param) from None


@dataclass(frozen=True)
class GenerationJob:
    """A request whose fields are checked. Workers convert it to token ids, the engine answers it."""

    prompt: ChatPrompt | TextPrompts
    sampling: SamplingConfig
    """`num_return_sequences` is the number of continuations that are computed."""
    max_tokens: int | None
    """None for the rest of the context."""
    num_choices: int = 1
    """Number of continuations in the answer: fewer than those computed if the best of several are wanted."""
    stream: bool = False
    truncate_prompt: int | None = None
    """Number of the prompt's last tokens that are kept; None for all."""
    priority: int = 0
    """Higher is earlier, as in the engine."""
    cache_salt: str | None = None
    lora: tuple[tuple[int, float], ...] | None = None
    """Numbers of adapters and their weights, as in llama.cpp; None if the request names none this way."""
    bad_words: list[str] = field(default_factory=list)
    """Texts that must not be generated, at the start of a word or elsewhere."""
    tokens_named: dict[str, list[int]] = field(default_factory=dict)
    """Token ids in the request, by field: the model must have them."""
    wants_tokens: bool = False
    """True if the answer includes tokens in addition to text."""
    wants_prompt: bool = False
    """True if the answer includes the prompt's tokens."""
    include_stop: bool = False
    """True if the stop string stays in the text."""
    skip_special_tokens: bool = True
    structure: Structure | None = None
    """Constraint on the text."""
    budget_param: str = "thinking_budget"
    """The client's name for the thinking budget."""
    needs_thoughts: bool = True
    """True to refuse a thinking budget if the model has no known thoughts. Claude Code sends one to every model."""


@dataclass(frozen=True)
class PreparedJob:
    """A job and what workers add to it."""

    job: GenerationJob
    samples: list[list[Sequence]]
    """Sequences of each prompt, ready to be submitted."""
    turn: Turn | None = None
    """How to parse the answer of a conversation."""
    warnings: tuple[str, ...] = ()
    """Parts of the constraint that are not enforced."""
