"""What a request wants, whatever form it came in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pace.llm.chat.turn import Turn
from pace.llm.configs import SamplingConfig
from pace.llm.infill import Infill
from pace.server.schemas.structure import Structure


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the tokenizer's chat template, in its terms: `role`, and `content` as one string."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    """True where the answer goes on with the last message, which is the assistant's."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = False
    """Whether those that begin a text come before the template's own."""
    param: str = "messages"
    """What the client calls the messages."""
    tools: list[Any] | None = None
    """What the model may call, in the client's words."""
    tool_choice: Any = None
    parallel_calls: bool = True
    passed_over: tuple[str, ...] = ()
    """What of the request is passed over, in words for the log."""


@dataclass(frozen=True)
class TextPrompts:
    """Texts, or token ids, each continued on its own."""

    items: list[Any]
    """Each a string or a list of ids, as the client wrote them: looked at by whoever reads them."""
    add_special_tokens: bool = True
    suffix: str | None = None
    """What follows the text to be written; None where nothing does."""


@dataclass
class Job:
    """One request, checked as far as its own words go. Workers make token ids of it, the engine an answer."""

    prompt: ChatPrompt | TextPrompts
    sampling: SamplingConfig
    """`num_return_sequences` is the number of continuations that are computed."""
    max_tokens: int | None
    """None for the rest of the context."""
    num_choices: int = 1
    """Continuations that are answered: less than those computed where the best of several are wanted."""
    stream: bool = False
    truncate_prompt: int | None = None
    """Number of the prompt's last tokens that are kept; None for all."""
    priority: int = 0
    cache_salt: str | None = None
    bad_words: list[str] = field(default_factory=list)
    """Texts that must not be generated, where they begin a word and where they do not."""
    tokens_named: dict[str, list[int]] = field(default_factory=dict)
    """Token ids of the request, by field: the model must have them."""
    echo: bool = False
    """Whether the answer begins with the prompt."""
    wants_tokens: bool = False
    """Whether tokens are answered beside their text."""
    wants_prompt: bool = False
    """Whether the prompt's tokens are."""
    include_stop: bool = False
    """Whether the stop string stays in the text."""
    skip_special_tokens: bool = True
    infill: Infill | None = None
    """How a gap is filled, once a worker has read the prompts of one."""
    turn: Turn | None = None
    """How the answer of a conversation is to be understood, once a worker has rendered it."""
    structure: Structure | None = None
    """What the text must be."""
    warnings: tuple[str, ...] = ()
    """What of it is not enforced, once a worker has read it."""
