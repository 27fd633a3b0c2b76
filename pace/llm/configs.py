"""Options of a generation, checked field by field."""

from __future__ import annotations

import copy
import enum
import inspect
import json
import logging
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from pace.grammar import Grammar
from pace.grammar.response_format import read_response_format
from pace.grammar.whitespace import whitespace_options
from pace.llm import aliases
from pace.llm import validators as check
from pace.ops.rules import Rules

logger = logging.getLogger("pace")


class KVCacheType(str, enum.Enum):
    """How the cache memory of a sequence grows; the results are the same. `DYNAMIC` is a contiguous run that moves
    whenever it is too short, `BMC` a run with spare rows. `PAGED` uses blocks of 16 positions from anywhere, which
    sequences share. docs/cache.md compares them."""

    DYNAMIC = "dynamic"
    BMC = "bmc"
    PAGED = "paged"


def _copy(value: Any) -> Any:
    """Copies the value of a field for a second config. Processors and masks are shared, because their owner holds
    references to them."""
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


MIN_TEMPERATURE = 1e-30
"""Smallest temperature: logits stay far below 1e8, and dividing them by less would overflow fp32."""
WITHOUT_EFFECT = Rules()._asdict() | {"temperature": 0.0}
"""Fields that only affect sampling, with the values that do not turn it on: greedy, or no filter."""


def _field(default: Any, validate: check.Check, *other_names: str) -> Any:
    """Defines a field: its default, its check, and its names in other tools."""
    return field(default=default, metadata={"check": validate, "aliases": other_names})


@dataclass(init=False, eq=False, repr=False)
class SamplingConfig:
    """How to pick tokens and when to stop: the names and meanings of HF's GenerationConfig, and of OpenAI's API.

    Every field is checked when it is set, also by plain assignment (`config.top_k = 5`). `None` means "not set". A
    field set by the caller overrides the checkpoint's generation_config.json, which overrides the default given here.

    Raises: TypeError for an unknown field (with the most similar known name) or a wrong type, ValueError for a value
    out of range.
    """

    max_new_tokens: int | None = _field(None, check.integer(1), "max_tokens", "max_completion_tokens")
    """Maximum number of tokens to generate. If neither it nor max_length is set, answers in a chat and texts of
    `pace generate` may fill the context; other texts end after 256 tokens."""
    max_length: int | None = _field(None, check.integer(1))
    """Maximum number of prompt and generated tokens together; max_new_tokens overrides it."""
    min_new_tokens: int = _field(0, check.integer(0), "min_tokens")
    """Number of generated tokens before which end tokens are forbidden."""
    do_sample: bool = _field(False, check.flag)
    """False takes the most likely token each time; temperature, top_k, top_p, min_p and typical_p then have no effect.
    If do_sample is not set, a temperature above 0 or one of these filters enables sampling, and a temperature of 0
    disables it. If nothing is set at all, chats are sampled with temperature 0.7 and top_p 0.9, and plain text is
    greedy."""
    temperature: float = _field(1.0, check.number(0.0))
    """Divides the logits. 0 means greedy, and contradicts do_sample=True."""
    top_k: int = _field(50, check.integer(0, 2**63 - 1, hint="; 0 turns it off"))
    """Keeps the k most likely tokens (and those equal to the last of them); 0 is off, the default in a chat."""
    top_p: float = _field(1.0, check.number(0.0, 1.0, hint="; 1.0 turns it off"))
    """Keeps the smallest set of most likely tokens whose probabilities sum to at least top_p."""
    min_p: float = _field(0.0, check.number(0.0, 1.0, hint="; 0.0 turns it off"))
    """Keeps tokens at least this fraction as likely as the most likely one."""
    typical_p: float = _field(1.0, check.number(0.0, 1.0, exclusive=True, hint="; 1.0 turns it off"))
    """Keeps the tokens closest to the expected information, up to this mass (arXiv:2202.00666)."""
    repetition_penalty: float = _field(1.0, check.number(0.0, exclusive=True, hint="; 1.0 turns it off"))
    """Divides positive and multiplies negative logits of every token in the prompt or the output (arXiv:1909.05858)."""
    frequency_penalty: float = _field(0.0, check.number(-2.0, 2.0))
    """Subtracted from a logit once per occurrence of the token in the generated tokens."""
    presence_penalty: float = _field(0.0, check.number(-2.0, 2.0))
    """Subtracted from the logits of tokens that occur in the generated tokens."""
    no_repeat_ngram_size: int = _field(0, check.integer(0, hint="; 0 turns it off"))
    """No run of this many tokens occurs twice in prompt and output; 0 is off."""
    num_beams: int = _field(1, check.integer(1))
    """Number of beams in beam search; 1 is no beam search. With do_sample, candidates are sampled instead of taking the
    most likely."""
    length_penalty: float = _field(1.0, check.number(-math.inf))
    """In beam search, the log-probability of a sequence is divided by this power of its generated length. Above 0
    favours long sequences, below 0 short ones."""
    early_stopping: bool | str = _field(False, check.early_stopping)
    """In beam search, True ends it with num_beams finished sequences, False when a better one is unlikely, "never" when
    none is possible."""
    num_return_sequences: int = _field(1, check.integer(1), "n")
    """Samples per prompt; with num_beams, the number of best continuations returned."""
    thinking_budget: int | None = _field(None, check.integer(0), "thinking_token_budget")
    """Maximum number of tokens of thought. Then the closing mark of the thought is forced, and the answer follows. Only
    for models whose chat template has known marks (docs/decoding.md)."""
    eos_token_id: int | list[int] | None = _field(None, check.token_list)
    """End tokens; by default those of generation_config.json, config.json, or the tokenizer."""
    pad_token_id: int | None = _field(None, check.integer(0))
    """Pads the returned tensor; by default the checkpoint's pad token, or the first end token, or 0."""
    stop_strings: str | list[str] | None = _field(None, check.strings, "stop")
    """Generation ends when one of these appears in the generated text, which is cut before it."""
    bad_words_ids: list[list[int]] | None = _field(None, check.token_sequences)
    """Token sequences that must not be generated. Entries that are exactly one end token are skipped, as in HF."""
    suppress_tokens: list[int] | None = _field(None, check.banned_tokens)
    """Tokens that must not be generated, end tokens included."""
    logit_bias: dict[int, float] | None = _field(None, check.logit_bias)
    """Added to the logits of these tokens; -inf bans."""
    seed: int | None = _field(None, check.integer(0, 2**64 - 1))
    """Seed of the draws, which depend only on the seed and the position, not on the batch. Rows with the same prompt
    and seed have the same text; num_return_sequences gives different ones. None takes a seed from torch's default
    generator, and each row then has its own draws."""
    logprobs: int | bool | None = _field(None, check.logprobs)
    """Also returns the log-probability of each generated token, and of this many most likely tokens (True is 0 of
    them). They are the model's own, before temperature, penalties and filters, normalised over the tokens that a
    grammar or token_mask allows."""
    unmasked_logprobs: bool = _field(False, check.flag)
    """Normalises log-probabilities, those of captures included, over all tokens. They then show how likely the model
    finds the text that a grammar forces."""
    prompt_logprobs: int | bool | None = _field(None, check.logprobs)
    """The same for each token of the prompt but the first."""
    ignore_eos: bool = _field(False, check.flag)
    """Continues after end tokens."""
    token_healing: bool = _field(False, check.flag)
    """For prompts that end within a word: removes their last tokens if a longer token may begin with the same text, and
    generates them again. Returned texts still begin after the prompt (docs/decoding.md)."""
    step_callback: Callable | None = _field(None, check.callback)
    """Called during generation: takes a `pace.llm.StepContext` and returns a `pace.llm.StepFeedback`, or None to
    continue. It runs on a separate thread, at the step points set by the next two fields (docs/decoding.md)."""
    step_every: int | None = _field(None, check.integer(1))
    """Number of tokens between two step points."""
    step_strings: str | list[str] | None = _field(None, check.strings)
    """Strings that make a step point when they appear in the generated text."""
    logits_processors: list[Callable] | None = _field(None, check.callables, "logits_processor")
    """`pace.llm.LogitsProcessor` objects, forked for every sequence, or transformers' callables: (input_ids LongTensor
    [1, S], logits FloatTensor [1, V]) -> logits. They run after the penalties and before the temperature."""
    token_mask: Any = _field(None, check.token_mask)
    """A `pace.llm.TokenMask` of the allowed tokens, forked for every sequence. It is applied before everything else
    that changes logits; log-probabilities are then normalised over the allowed tokens."""
    json_schema: Any = _field(None, check.readable(Grammar.json_schema))
    """The text is JSON of this schema: a dict, its JSON text, or a pydantic model (docs/structured.md). Only one of the
    fields that constrain the text may be set."""
    regex: str | None = _field(None, check.readable(Grammar.regex))
    """The whole text matches this regular expression, in the syntax of Rust's regex."""
    grammar: Any = _field(None, check.grammar)
    """The text matches this `pace.llm.Grammar`, or a grammar in Lark or GBNF, given as text."""
    choices: list[str] | None = _field(None, check.choices)
    """The text is one of these strings."""
    response_format: dict[str, Any] | None = _field(None, check.readable(read_response_format))
    """The same in the form of OpenAI's API: {"type": "text"}, "json_object", "json_schema" or "structural_tag"."""
    json_whitespace: str = _field(
        "flexible", check.readable(whitespace_options), "whitespace_pattern", "guided_whitespace_pattern"
    )
    """Whitespace allowed between the parts of JSON from json_schema or response_format. One of "flexible", "compact"
    (none), "spaced" (one blank after each colon and comma), or a regular expression of blanks."""

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "explicit_fields", set())
        self.update(values)

    def update(self, values: Mapping[str, Any]) -> SamplingConfig:
        """Sets fields by name, or by the names of other tools for them (`max_tokens`, `n`, `stop`); returns self.
        Raises TypeError for two names of one field, and the errors of setting a field."""
        names: dict[str, str] = {}
        for name, value in values.items():
            field_name = _field_name(name)
            if field_name in names:
                raise TypeError(f"{names[field_name]} and {name} mean the same; give one of them")
            names[field_name] = name
            self.set_field(field_name, value, name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        self.set_field(_field_name(name), value, name)

    def set_field(self, name: str, value: Any, called: str) -> None:
        """Sets a field; `called` is the name that errors use."""
        if value is None:
            self.explicit_fields.discard(name)
            self.__dict__.pop(name, None)  # the class attribute, which is the default, shows again
            return
        self.__dict__[name] = FIELDS[name].metadata["check"](called, value)
        self.explicit_fields.add(name)

    def __delattr__(self, name: str) -> None:
        setattr(self, name, None)

    def __repr__(self) -> str:
        given = [f"{name}={getattr(self, name)!r}" for name in FIELDS if name in self.explicit_fields]
        return f"SamplingConfig({', '.join(given)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamplingConfig) and self.to_dict() == other.to_dict()

    __hash__ = None

    @property
    def has_length(self) -> bool:
        """True if a maximum length is set."""
        return self.max_new_tokens is not None or self.max_length is not None

    def to_dict(self) -> dict[str, Any]:
        """Every field with its current value, set or default."""
        return {name: getattr(self, name) for name in FIELDS}

    def copy(self) -> SamplingConfig:
        """An independent config with the same fields set."""
        duplicate = SamplingConfig()
        duplicate.__dict__.update({name: _copy(value) for name, value in self.__dict__.items()})
        return duplicate

    __copy__ = copy

    def merge_from(self, other: SamplingConfig) -> SamplingConfig:
        """Sets the fields that are set in `other` and not here; modifies and returns self."""
        if not isinstance(other, SamplingConfig):
            raise TypeError(
                f"merge_from takes a SamplingConfig, got {type(other).__name__}; "
                f"SamplingConfig.from_dict makes one of a dict"
            )
        lengths = {"max_length", "max_new_tokens"}  # both set the same limit
        missing = other.explicit_fields - self.explicit_fields
        for name in [name for name in FIELDS if name in missing]:
            if name in lengths and self.explicit_fields & lengths:
                continue
            setattr(self, name, _copy(getattr(other, name)))
        return self

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "generation_config.json") -> SamplingConfig:
        """Makes a config from the fields of HF's GenerationConfig. Unknown fields are ignored; one warning names those
        that would change the text. Raises a ValueError or TypeError that names `source` for invalid values."""
        if not isinstance(values, Mapping):
            raise ValueError(f"{source} must hold a JSON object of fields, got {type(values).__name__}")
        config = cls()
        for name, value in values.items():
            if name not in FIELDS or value is None or (name in ("eos_token_id", "pad_token_id") and value == -1):
                continue
            config.set_field(name, value, f"{source}: {name}")
        if unsupported := aliases.unsupported(values):
            names = ", ".join(unsupported)
            logger.warning("%s sets %s, which pace does not implement: generation ignores it", source, names)
        return config

    @classmethod
    def read(cls, given: Any, fields: Mapping[str, Any] | None = None) -> SamplingConfig:
        """Makes a config from None, a SamplingConfig, or transformers' GenerationConfig; `fields` override it. Raises
        TypeError for another object, NotImplementedError for a GenerationConfig with unsupported settings."""
        if hasattr(given, "to_diff_dict"):
            values = given.to_diff_dict()
            if unsupported := aliases.unsupported(values):
                raise NotImplementedError(
                    f"this {type(given).__name__} sets {', '.join(unsupported)}, which pace does not implement; "
                    f"leave it out"
                )
            config = cls.from_dict(values, source=type(given).__name__)
        elif given is None or isinstance(given, cls):
            config = cls() if given is None else given.copy()
        else:
            raise TypeError(f"sampling_config must be a SamplingConfig, got {type(given).__name__}")
        return config.update(fields or {})

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike) -> SamplingConfig:
        """The fields of `path/generation_config.json` (or of the file at `path`), marked as set.

        Raises: FileNotFoundError if there is no such file, ValueError or TypeError for invalid contents.
        """
        file = os.path.join(path, "generation_config.json") if os.path.isdir(path) else os.fspath(path)
        if not os.path.isfile(file):
            raise FileNotFoundError(
                f"no generation config at {file}; give a checkpoint directory that holds generation_config.json"
            )
        try:
            with open(file, encoding="utf-8") as stream:
                values = json.load(stream)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{file} is not valid JSON: {error}") from None
        return cls.from_dict(values, source=file)

    def make_grammar(self) -> Grammar | None:
        """The grammar of the text, from the one field that constrains it; None if no field does. Raises ValueError for
        two."""
        whitespace = self.json_whitespace
        makers: dict[str, Callable[[Any], Grammar | None]] = {
            "json_schema": lambda schema: Grammar.json_schema(schema, whitespace=whitespace),
            "regex": Grammar.regex,
            "grammar": lambda grammar: grammar,
            "choices": Grammar.choices,
            "response_format": lambda form: read_response_format(form, whitespace=whitespace),
            "token_mask": lambda mask: None,
        }
        given = [name for name in makers if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of {', '.join(f'{name}=' for name in given)}: each constrains the whole text")
        return makers[given[0]](getattr(self, given[0])) if given else None

    def take_grammar(self) -> Grammar | None:
        """Returns `make_grammar()` and clears the fields that constrain the text."""
        grammar = self.make_grammar()
        for name in ("json_schema", "regex", "grammar", "choices", "response_format", "json_whitespace"):
            setattr(self, name, None)
        return grammar

    def check_consistent(self, asked: Collection[str] | None = None) -> None:
        """Raises ValueError or NotImplementedError for fields that contradict each other. Warns about fields without
        effect among `asked`, the fields set by the caller (default: all that are set)."""
        rows, beams, has_callback = self.num_return_sequences, self.num_beams, self.step_callback is not None
        has_step_points = self.step_every is not None or self.step_strings is not None
        max_new_tokens = math.inf if self.max_new_tokens is None else self.max_new_tokens
        contradictions = {
            f"temperature={self.temperature:g} with do_sample=True divides by zero, or nearly; for the most likely "
            f"token set do_sample=False": self.do_sample and self.temperature < MIN_TEMPERATURE,
            f"num_return_sequences={rows} exceeds num_beams={beams}: beam search returns the best of its beams": (
                rows > beams > 1
            ),
            f"num_return_sequences={rows} without sampling would return the same text each time; set do_sample=True, "
            f"or num_beams": rows > 1 and not self.do_sample and beams == 1,
            "step_callback needs step_every or step_strings, which say when it is called": (
                has_callback and self.step_every is None and not self.step_strings
            ),
            "step_every and step_strings need step_callback, which they call": has_step_points and not has_callback,
            "step_callback needs num_beams=1: beam search has no text until it ends": has_callback and beams > 1,
            "give one of token_healing and token_mask: both constrain the first tokens": (
                self.token_healing and self.token_mask is not None
            ),
            f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={max_new_tokens}": (
                self.min_new_tokens > max_new_tokens
            ),
        }
        for message, is_so in contradictions.items():
            if is_so:
                raise ValueError(message)
        for name in ("unmasked_logprobs", "token_healing"):
            if getattr(self, name) and beams > 1:
                raise NotImplementedError(f"{name} needs num_beams=1: beam search does not implement it")
        self._warn_of_unused(self.explicit_fields if asked is None else asked)

    def _warn_of_unused(self, asked: Collection[str]) -> None:
        """Warns about fields that have no effect, and names what would use them."""
        unused: dict[str, Collection[str]] = {}
        if self.num_beams == 1:
            unused["beam search uses it, with num_beams"] = ("length_penalty", "early_stopping")
        if self.logprobs is None and self.grammar is None:
            unused["add logprobs, or a grammar with captures"] = ("unmasked_logprobs",)
        if self.json_schema is None and self.response_format is None:
            unused["add json_schema or response_format"] = ("json_whitespace",)
        if "do_sample" in self.explicit_fields and not self.do_sample:
            unused["decoding is greedy; add do_sample=True, or a temperature above 0"] = ("seed", *WITHOUT_EFFECT)
        for advice, names in unused.items():
            names = [name for name in names if name in asked and not self._is_neutral(name)]
            if names:
                logger.warning("%s set, but without effect: %s", ", ".join(names), advice)

    def _is_neutral(self, name: str) -> bool:
        """True if a field's value asks for nothing."""
        return getattr(self, name) in (getattr(SamplingConfig, name), WITHOUT_EFFECT.get(name))


FIELDS = {field.name: field for field in fields(SamplingConfig)}
ALIASES = {alias: name for name, field in FIELDS.items() for alias in field.metadata["aliases"]}
"""Other tools' names of fields."""


def _field_name(name: str) -> str:
    """Returns pace's name of a field. Raises TypeError for an unknown field, and NotImplementedError for an unsupported
    one of transformers."""
    if name in FIELDS:
        return name
    if name in aliases.NOT_IMPLEMENTED:
        raise NotImplementedError(f"SamplingConfig has no field {name!r}: pace does not implement it")
    return aliases.translated("SamplingConfig has no field", name, ALIASES, aliases.SAMPLING_ADVICE, FIELDS)


SamplingConfig.__signature__ = inspect.Signature(
    [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in FIELDS.values()
    ]
)
