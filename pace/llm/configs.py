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
from dataclasses import dataclass, fields
from typing import Any

from pace.grammar import Grammar
from pace.grammar.response_format import read_response_format
from pace.llm import checks, other_names

logger = logging.getLogger("pace")


class KVCacheType(str, enum.Enum):
    """How the cache memory of a sequence grows; the results are the same. `DYNAMIC` is a contiguous run that moves
    whenever it is too short, `BMC` a run with spare rows. `PAGED` uses blocks of 16 positions from anywhere, which
    sequences share. docs/cache.md compares them."""

    DYNAMIC = "dynamic"
    BMC = "bmc"
    PAGED = "paged"


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": checks.integer(1),
    "max_length": checks.integer(1),
    "min_new_tokens": checks.integer(0),
    "do_sample": checks.flag,
    "temperature": checks.number(0.0),
    "top_k": checks.integer(0, 2**63 - 1, hint="; 0 turns it off"),
    "top_p": checks.number(0.0, 1.0, hint="; 1.0 turns it off"),
    "min_p": checks.number(0.0, 1.0, hint="; 0.0 turns it off"),
    "typical_p": checks.number(0.0, 1.0, exclusive=True, hint="; 1.0 turns it off"),
    "repetition_penalty": checks.number(0.0, exclusive=True, hint="; 1.0 turns it off"),
    "frequency_penalty": checks.number(-2.0, 2.0),
    "presence_penalty": checks.number(-2.0, 2.0),
    "no_repeat_ngram_size": checks.integer(0, hint="; 0 turns it off"),
    "num_beams": checks.integer(1),
    "length_penalty": checks.number(-math.inf),
    "early_stopping": checks.early_stopping,
    "num_return_sequences": checks.integer(1),
    "eos_token_id": checks.token_list,
    "pad_token_id": checks.integer(0),
    "stop_strings": checks.strings,
    "bad_words_ids": checks.token_sequences,
    "logit_bias": checks.logit_bias,
    "seed": checks.integer(0, 2**64 - 1),
    "logprobs": checks.logprobs,
    "unmasked_logprobs": checks.flag,
    "prompt_logprobs": checks.logprobs,
    "ignore_eos": checks.flag,
    "token_healing": checks.flag,
    "step_callback": checks.callback,
    "step_every": checks.integer(1),
    "step_strings": checks.strings,
    "logits_processors": checks.callables,
    "token_mask": checks.token_mask,
    "json_schema": checks.json_schema,
    "regex": checks.regex,
    "grammar": checks.grammar,
    "choices": checks.choices,
    "response_format": checks.response_format,
    "json_whitespace": checks.json_whitespace,
}


def _copy(value: Any) -> Any:
    """Copies the value of a field for a second config. Processors and masks are shared, because their owner holds
    references to them."""
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


LEAST_TEMPERATURE = 1e-30
"""Smallest temperature: logits stay far below 1e8, and dividing them by less would overflow fp32."""
WITHOUT_EFFECT = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0}
"""Fields that only affect sampling, and the values that are not a wish to sample: greedy, or no filter."""


@dataclass(init=False, eq=False, repr=False)
class SamplingConfig:
    """How to pick tokens and when to stop: the names and meanings of HF's GenerationConfig, and of OpenAI's API.

    Every field is checked when it is set, also by plain assignment (`config.top_k = 5`). `None` means "not set". A
    field set by the caller overrides the checkpoint's generation_config.json, which overrides the default given here.

    Raises: TypeError for an unknown field (with the most similar known name) or a wrong type, ValueError for a value
    out of range.
    """

    max_new_tokens: int | None = None
    """Maximum number of tokens to generate. If neither it nor max_length is set, answers in a chat and texts of
    `pace generate` may fill the context; other texts end after 256 tokens."""
    max_length: int | None = None
    """Maximum number of prompt and generated tokens together; max_new_tokens overrides it."""
    min_new_tokens: int = 0
    """Number of generated tokens before which end tokens are forbidden."""
    do_sample: bool = False
    """False takes the most likely token each time; temperature, top_k, top_p, min_p and typical_p then have no effect.
    If do_sample is not set, a temperature above 0 or one of these filters enables sampling, and a temperature of 0
    disables it. If nothing is set at all, chats are sampled with temperature 0.7 and top_p 0.9, and plain text is
    greedy."""
    temperature: float = 1.0
    """Divides the logits. 0 means greedy, and contradicts do_sample=True."""
    top_k: int = 50
    """Keeps the k most likely tokens (and those equal to the last of them); 0 is off, the default in a chat."""
    top_p: float = 1.0
    """Keeps the smallest set of most likely tokens whose probabilities sum to at least top_p."""
    min_p: float = 0.0
    """Keeps tokens at least this fraction as likely as the most likely one."""
    typical_p: float = 1.0
    """Keeps the tokens closest to the expected information, up to this mass (arXiv:2202.00666)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of every token in the prompt or the output (arXiv:1909.05858)."""
    frequency_penalty: float = 0.0
    """Subtracted from a logit once per occurrence of the token in the generated tokens."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that occur in the generated tokens."""
    no_repeat_ngram_size: int = 0
    """No run of this many tokens occurs twice in prompt and output; 0 is off."""
    num_beams: int = 1
    """Number of beams in beam search; 1 is no beam search. With do_sample, candidates are sampled instead of taking the
    most likely."""
    length_penalty: float = 1.0
    """In beam search, the log-probability of a sequence is divided by this power of its generated length. Above 0
    favours long sequences, below 0 short ones."""
    early_stopping: bool | str = False
    """In beam search, True ends it with num_beams finished sequences, False when a better one is unlikely, "never" when
    none is possible."""
    num_return_sequences: int = 1
    """Samples per prompt; with num_beams, the number of best continuations returned."""
    eos_token_id: int | list[int] | None = None
    """End tokens; by default those of generation_config.json, config.json, or the tokenizer."""
    pad_token_id: int | None = None
    """Pads the returned tensor; by default the checkpoint's pad token, or the first end token, or 0."""
    stop_strings: str | list[str] | None = None
    """Generation ends when one of these appears in the generated text, which is cut before it."""
    bad_words_ids: list[list[int]] | None = None
    """Token sequences that must not be generated. Entries that are exactly one end token are skipped, as in HF."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these tokens; -inf bans."""
    seed: int | None = None
    """Seed of the draws, which depend only on the seed and the position, not on the batch. Rows with the same prompt
    and seed have the same text; num_return_sequences gives different ones. None takes a seed from torch's default
    generator, and each row then has its own draws."""
    logprobs: int | bool | None = None
    """Also returns the log-probability of each generated token, and of this many most likely tokens (True is 0 of
    them). They are the model's own, before temperature, penalties and filters, normalised over the tokens that a
    grammar or token_mask allows."""
    unmasked_logprobs: bool = False
    """Normalises log-probabilities, those of captures included, over all tokens. They then show how likely the model
    finds the text that a grammar forces."""
    prompt_logprobs: int | bool | None = None
    """The same for each token of the prompt but the first."""
    ignore_eos: bool = False
    """Continues after end tokens."""
    token_healing: bool = False
    """For prompts that end within a word: removes their last tokens if a longer token may begin with the same text, and
    generates them again. Returned texts still begin after the prompt (docs/decoding.md)."""
    step_callback: Callable | None = None
    """Called during generation: takes a `pace.llm.StepContext` and returns a `pace.llm.StepFeedback`, or None to
    continue. It runs on a separate thread, at the step points set by the next two fields (docs/decoding.md)."""
    step_every: int | None = None
    """Number of tokens between two step points."""
    step_strings: str | list[str] | None = None
    """Strings that make a step point when they appear in the generated text."""
    logits_processors: list[Callable] | None = None
    """`pace.llm.LogitsProcessor` objects, forked for every sequence, or transformers' callables: (input_ids LongTensor
    [1, S], logits FloatTensor [1, V]) -> logits. They run after the penalties and before the temperature."""
    token_mask: Any = None
    """A `pace.llm.TokenMask` of the allowed tokens, forked for every sequence. It is applied before everything else
    that changes logits; log-probabilities are then normalised over the allowed tokens."""
    json_schema: Any = None
    """The text is JSON of this schema: a dict, its JSON text, or a pydantic model (docs/structured.md). Only one of the
    fields that constrain the text may be set."""
    regex: str | None = None
    """The whole text matches this regular expression, in the syntax of Rust's regex."""
    grammar: Any = None
    """The text matches this `pace.llm.Grammar`, or a grammar in Lark or GBNF, given as text."""
    choices: list[str] | None = None
    """The text is one of these strings."""
    response_format: dict[str, Any] | None = None
    """The same in the form of OpenAI's API: {"type": "text"}, "json_object", "json_schema" or "structural_tag"."""
    json_whitespace: str = "flexible"
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
            field = other_names.sampling_field(name, _CHECKS)
            if field in names:
                raise TypeError(f"{names[field]} and {name} mean the same; give one of them")
            names[field] = name
            self.set_field(field, value, name)
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        self.set_field(other_names.sampling_field(name, _CHECKS), value, name)

    def set_field(self, name: str, value: Any, called: str) -> None:
        """Sets a field; `called` is the name that errors use."""
        if value is None:
            self.explicit_fields.discard(name)
            self.__dict__.pop(name, None)  # the class attribute, which is the default, shows again
            return
        self.__dict__[name] = _CHECKS[name](called, value)
        self.explicit_fields.add(name)

    def __delattr__(self, name: str) -> None:
        setattr(self, name, None)

    def __repr__(self) -> str:
        given = (f"{name}={getattr(self, name)!r}" for name in _CHECKS if name in self.explicit_fields)
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
        return {name: getattr(self, name) for name in _CHECKS}

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
                f"merge_from takes a SamplingConfig, got {type(other).__name__}; SamplingConfig.from_dict makes one of "
                "a dict"
            )
        for name in [name for name in _CHECKS if name in other.explicit_fields - self.explicit_fields]:
            if name in ("max_length", "max_new_tokens") and self.explicit_fields & {"max_length", "max_new_tokens"}:
                continue  # the two set one limit
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
            if name not in _CHECKS or value is None or (name in ("eos_token_id", "pad_token_id") and value == -1):
                continue
            config.set_field(name, value, f"{source}: {name}")
        if asked := other_names.left_out(values):
            logger.warning(
                "%s sets %s, which pace does not implement: generation goes without", source, ", ".join(asked)
            )
        return config

    @classmethod
    def read(cls, given: Any, fields: Mapping[str, Any] | None = None) -> SamplingConfig:
        """Makes a config from None, a SamplingConfig, or transformers' GenerationConfig; `fields` override it. Raises
        TypeError for another object, NotImplementedError for a GenerationConfig with unsupported settings."""
        if hasattr(given, "to_diff_dict"):
            values = given.to_diff_dict()
            if asked := other_names.left_out(values):
                raise NotImplementedError(
                    f"this {type(given).__name__} sets {', '.join(asked)}, which pace does not implement; leave it out"
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
        names = ("json_schema", "regex", "grammar", "choices", "response_format", "token_mask")
        asked = [name for name in names if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ValueError(f"give one of {', '.join(f'{name}=' for name in asked)}: each says what the text may be")
        whitespace = self.json_whitespace
        makers = {
            "json_schema": lambda schema: Grammar.json_schema(schema, whitespace=whitespace),
            "regex": Grammar.regex,
            "grammar": lambda grammar: grammar,
            "choices": Grammar.choices,
            "response_format": lambda form: read_response_format(form, whitespace=whitespace),
            "token_mask": lambda mask: None,
        }
        return makers[asked[0]](getattr(self, asked[0])) if asked else None

    def take_grammar(self) -> Grammar | None:
        """Returns `make_grammar()` and clears the fields that constrain the text."""
        grammar = self.make_grammar()
        for name in ("json_schema", "regex", "grammar", "choices", "response_format", "json_whitespace"):
            setattr(self, name, None)
        return grammar

    def check_consistent(self, asked: Collection[str] | None = None) -> None:
        """Raises ValueError or NotImplementedError for fields that contradict each other. Warns about fields without
        effect among `asked`, the fields set by the caller (default: all that are set)."""
        asked = self.explicit_fields if asked is None else asked
        if self.do_sample and self.temperature < LEAST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature:g} with do_sample=True divides by zero, or nearly; for the most likely "
                "token set do_sample=False"
            )
        if self.num_return_sequences > self.num_beams > 1:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} exceeds num_beams={self.num_beams}: beam search "
                "returns the best of its beams"
            )
        if self.num_return_sequences > 1 and not self.do_sample and self.num_beams == 1:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} without sampling would return the same text each "
                f"time; set do_sample=True, or num_beams"
            )
        if self.step_callback is not None and self.step_every is None and not self.step_strings:
            raise ValueError(
                "step_callback is asked at step_every tokens or at step_strings; give one of them, or both"
            )
        if self.step_callback is None and (self.step_every is not None or self.step_strings is not None):
            raise ValueError("step_every and step_strings say when step_callback is asked; give it, too")
        if self.step_callback is not None and self.num_beams > 1:
            raise ValueError("beam search knows no text before its end: step_callback goes with num_beams=1")
        if self.unmasked_logprobs and self.num_beams > 1:
            raise NotImplementedError("unmasked_logprobs goes with num_beams=1: beams are ranked by what is allowed")
        if self.token_healing and self.token_mask is not None:
            raise ValueError("token_healing and token_mask both say which tokens come first; give one of them")
        if self.token_healing and self.num_beams > 1:
            raise NotImplementedError("token_healing goes with num_beams=1")
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens={self.min_new_tokens} exceeds max_new_tokens={self.max_new_tokens}")
        self._warn_of_idle(asked)

    def _warn_of_idle(self, asked: Collection[str]) -> None:
        """Warns about fields that have no effect, and names what would use them."""
        idle: dict[str, Collection[str]] = {}
        if self.num_beams == 1:
            idle["beam search alone looks at it, with num_beams"] = ("length_penalty", "early_stopping")
        if self.logprobs is None and self.grammar is None:
            idle["add logprobs, or a grammar with captures"] = ("unmasked_logprobs",)
        if self.json_schema is None and self.response_format is None:
            idle["add json_schema or response_format"] = ("json_whitespace",)
        if "do_sample" in self.explicit_fields and not self.do_sample:
            idle["decoding is greedy; add do_sample=True, or a temperature above 0"] = ("seed", *WITHOUT_EFFECT)
        for advice, names in idle.items():
            names = [name for name in names if name in asked and not self._is_neutral(name)]
            if names:
                logger.warning("%s set, but without effect: %s", ", ".join(names), advice)

    def _is_neutral(self, name: str) -> bool:
        """True if a field's value asks for nothing."""
        return getattr(self, name) in (getattr(SamplingConfig, name), WITHOUT_EFFECT.get(name))


assert set(_CHECKS) == {field.name for field in fields(SamplingConfig)}, "every field has a check"
SamplingConfig.__signature__ = inspect.Signature(
    [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in fields(SamplingConfig)
    ]
)
