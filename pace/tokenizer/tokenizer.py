"""`Tokenizer`: text to token ids and back, using the tokenizers package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from inspect import ismethod
from threading import RLock
from typing import Any

from tokenizers import Tokenizer as Backend

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a tokenizer_config.json may name, in the order of `all_special_tokens`."""


FIELDS = {"input_ids": "ids", "token_type_ids": "type_ids", "attention_mask": "attention_mask"}
"""Key of an encoding -> attribute in the tokenizers package."""


TOKEN_OPTIONS = {
    "padding", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs",
    "sanitize_control_tokens",
}  # fmt: skip
"""Options of `apply_chat_template` that only transformers' tokenizer supports."""


class Encoding(dict[str, Any]):
    """Result of encoding texts. Its entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class SpecialToken:
    """An attribute of `Tokenizer` such as `pad_token`: the token of that name, or None. With `is_id` it is the token's
    id. Both can be set."""

    def __init__(self, name: str, is_id: bool = False) -> None:
        self._name, self._is_id = name, is_id

    def __get__(self, tokenizer: Tokenizer, owner: type | None = None) -> Any:
        token = tokenizer._special.get(self._name)
        return tokenizer.convert_tokens_to_ids(token) if self._is_id and token is not None else token

    def __set__(self, tokenizer: Tokenizer, value: Any) -> None:
        if self._is_id and value is not None:
            value = tokenizer.convert_ids_to_tokens(value)
        if value is None:
            tokenizer._special.pop(self._name, None)
        else:
            tokenizer._special[self._name] = str(value)


class Tokenizer:
    """A model's tokenizer, with the names of transformers' tokenizers.

    It does what generation needs: encode, decode, look up tokens, render chat templates. Threads may share it, and it
    can be pickled. For anything else, such as padding or tensors, it makes transformers' tokenizer from the same files
    and delegates to it. Changes made here apply to both. A copy shares the vocabulary."""

    is_fast = True
    turn_ends: Sequence[int] = ()
    """Tokens that end a turn, in addition to the end of a text."""

    bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token = map(SpecialToken, NAMED)
    bos_token_id, eos_token_id, unk_token_id, sep_token_id, pad_token_id, cls_token_id, mask_token_id = (
        SpecialToken(name, is_id=True) for name in NAMED
    )

    def __init__(
        self,
        backend: Backend,
        settings: Mapping[str, Any],
        name_or_path: str = "",
        transformers: Callable[[], Any] | None = None,
    ) -> None:
        """`settings`: the contents of a tokenizer_config.json.
        `transformers`: a function that makes transformers' tokenizer. The `Tokenizer` can only be pickled if this
        function can."""
        self._special, self._extra = _special_tokens(settings)
        self.chat_template: str | dict[str, str] | None = _templates(settings.get("chat_template"))
        self.name_or_path = name_or_path
        self.padding_side = settings.get("padding_side", "right")
        self.truncation_side = settings.get("truncation_side", "right")
        self.model_max_length = settings.get("model_max_length", settings.get("max_len")) or int(1e30)
        self.model_input_names = list(settings.get("model_input_names", ("input_ids", "attention_mask")))
        self.clean_up_tokenization_spaces = settings.get("clean_up_tokenization_spaces", False)
        """True if decoding drops spaces before punctuation. It has no effect for BPE, as in transformers."""
        self.tokenizer_class = settings.get("tokenizer_class", "PreTrainedTokenizerFast")
        self.split_special_tokens = bool(settings.get("split_special_tokens", False))
        """True if names of special tokens in a text are ordinary text."""
        self.chat_control_tokens: list[str] | None = settings.get("chat_control_tokens")
        """Added tokens that only a chat template may write, in addition to special ones; None for those in its text."""
        self._use(backend)
        self._lock = RLock()
        """Held while transformers' tokenizer works. That tokenizer keeps a call's settings, such as padding, until the
        next call."""
        self._make_transformers = transformers
        self._changes: dict[str, Any] = {}
        """Attributes that were set later, to be set in transformers' tokenizer."""

    def _use(self, backend: Backend) -> None:
        """Sets the backend, which holds the vocabulary and the rules for texts."""
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = self.split_special_tokens
        self.__dict__["backend_tokenizer"] = backend
        self._forget()

    def _forget(self) -> None:
        """Drops cached values after a change of the vocabulary or settings."""
        for name in ("_other_backend", "added_tokens_decoder", "all_special_tokens", "all_special_ids"):
            self.__dict__.pop(name, None)

    # ---- Text to tokens

    def __call__(self, text: str | Sequence[str], *others: Any, **options: Any) -> Any:
        """Encodes a text, or each text of a list, as {"input_ids", "attention_mask"}.

        `add_special_tokens=False` omits the tokens that the tokenizer puts around texts. Other options are those of
        transformers."""
        texts = text if isinstance(text, (list, tuple)) else [text]
        is_plain = not others and options.keys() <= {"add_special_tokens", "split_special_tokens"}
        if not is_plain or not all(isinstance(one, str) for one in texts):
            return self._alone(self.transformers)(text, *others, **options)
        rows = [self._encode(one, **options) for one in texts]
        names = [name for name in FIELDS if name in ("input_ids", *self.model_input_names)]
        columns = {name: [getattr(row, FIELDS[name]) for row in rows] for name in names}
        return Encoding(columns if texts is text else {name: rows[0] for name, rows in columns.items()})

    def encode(self, text: str, *others: Any, **options: Any) -> list[int]:
        """Token ids of a text. Options are those of `__call__`."""
        if others or options.keys() - {"add_special_tokens", "split_special_tokens"} or not isinstance(text, str):
            return self._alone(self.transformers.encode)(text, *others, **options)
        return self._encode(text, **options).ids

    def _encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool | None = None) -> Any:
        splits = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        own = self.backend_tokenizer
        backend = own if splits == own.encode_special_tokens else self._other_backend
        return backend.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _other_backend(self) -> Backend:
        """The same tokenizer with the opposite `split_special_tokens`. Threads share a backend, so its value cannot
        change per call."""
        other = Backend.from_str(self.backend_tokenizer.to_str())
        other.encode_special_tokens = not self.backend_tokenizer.encode_special_tokens
        return other

    # ---- Tokens to text

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **options: Any,
    ) -> Any:
        """Decodes token ids (a list, a tensor or one id) to a text. Several rows of ids give a list of texts."""
        cleans = clean_up_tokenization_spaces
        cleans = self.clean_up_tokenization_spaces if cleans is None else cleans
        if options or cleans and type(self.backend_tokenizer.model).__name__ != "BPE":
            return self.transformers.decode(token_ids, skip_special_tokens, cleans, **options)
        tokens = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        tokens = [tokens] if isinstance(tokens, int) else list(tokens)
        if tokens and getattr(tokens[0], "ndim", isinstance(tokens[0], (list, tuple))):
            return [self.decode(row, skip_special_tokens, cleans) for row in tokens]
        return self.backend_tokenizer.decode(list(map(int, tokens)), skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        return [self.decode(row, skip_special_tokens, **options) for row in sequences]

    # ---- The vocabulary

    def __len__(self) -> int:
        """Number of tokens in the vocabulary, including added ones."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Added tokens by id, as objects with `content` and `special`. They are matched in a text before all others."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Names of tokens in the vocabulary; None for ids that it lacks."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        hidden = set(self.all_special_ids) if skip_special_tokens else ()
        return [self.backend_tokenizer.id_to_token(index) for index in map(int, ids) if index not in hidden]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Ids of tokens by name; the unknown token's id for unknown names."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        index = self.backend_tokenizer.token_to_id(tokens)
        return self.backend_tokenizer.token_to_id(self.unk_token) if index is None and self.unk_token else index

    def add_tokens(self, *new_tokens: Any, **options: Any) -> int:
        """Adds tokens after the vocabulary, as transformers does, and returns the number of new ones. A model has no
        embeddings for new ids, so `generate` refuses them."""
        return self._change(lambda made: made.add_tokens(*new_tokens, **options))

    def add_special_tokens(self, special_tokens_dict: Mapping[str, Any], **options: Any) -> int:
        """Adds special tokens by name: {"pad_token": "<pad>"}. Returns the number of new tokens."""
        return self._change(lambda made: made.add_special_tokens(special_tokens_dict, **options))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens that have a name in the settings."""
        return {name: self._special[name] for name in (*NAMED, *self._special) if name in self._special}

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """Special tokens, which decoding may skip."""
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self._extra]))

    @cached_property
    def all_special_ids(self) -> list[int]:
        return self.convert_tokens_to_ids(self.all_special_tokens)

    # ---- Conversations

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """Renders a conversation in the format the model was trained on.

        Returns text if `tokenize` is False, else the result of `__call__`, or only its token ids if `return_dict` is
        False. `variables` are further variables of the template. Several conversations, functions as tools, and token
        options such as padding are passed to transformers.

        Raises what `jinja.render` raises, and ValueError without a template."""
        are_dicts = all(isinstance(tool, Mapping) for tool in tools or ())
        if not are_dicts or variables.keys() & TOKEN_OPTIONS or _are_several(conversation):
            options = {"tools": tools, "documents": documents, "chat_template": chat_template, "tokenize": tokenize}
            options |= {"continue_final_message": continue_final_message, "return_dict": return_dict} | variables
            return self._alone(self.transformers.apply_chat_template)(
                conversation, add_generation_prompt=add_generation_prompt, **options
            )
        from pace.tokenizer.jinja import render  # imported here, since plain text needs no Jinja

        template, variables = self.get_chat_template(chat_template, tools), self._special | variables
        flags = add_generation_prompt, continue_final_message
        text = render(template, conversation, tools, documents, *flags, **variables)
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else encoding["input_ids"]

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """Returns the chat template to render: `chat_template` by name or text, or else the model's."""
        templates = self.chat_template
        if not isinstance(templates, dict):
            templates = {} if templates is None else {"default": templates}
        if chat_template is not None:
            return templates.get(chat_template, chat_template)
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        if name not in templates:
            known = (
                f"none of its templates ({', '.join(sorted(templates))}) is the default" if templates else "it has none"
            )
            raise ValueError(f"this tokenizer has no chat template: {known}")
        return templates[name]

    # ---- Everything else

    @cached_property
    def transformers(self) -> Any:
        """transformers' tokenizer of the same files. Making it takes seconds for large vocabularies."""
        if self._make_transformers is None:
            raise AttributeError("this tokenizer has no files of its own from which transformers could make one")
        made = self._make_transformers()
        made.chat_template = self.chat_template
        for name, value in self._changes.items():
            setattr(made, name, value)
        return made

    def _change(self, change: Callable[[Any], Any]) -> Any:
        """Applies a change to transformers' tokenizer, and copies the result here."""
        made = self.transformers
        result = change(made)
        others = {name: token for name, token in self._special.items() if name not in NAMED}
        self._special = {**others, **made.special_tokens_map}
        self._extra = [str(token) for token in _extra_tokens(made)]
        self._use(copy.deepcopy(made.backend_tokenizer))
        self._make_transformers = partial(copy.deepcopy, made)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        found = getattr(self.transformers, name)
        return self._alone(found) if ismethod(found) else found

    def _alone(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a method of transformers' tokenizer so that only one thread runs at a time."""

        def locked(*values: Any, **options: Any) -> Any:
            with self._lock:
                return call(*values, **options)

        return locked

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or "_changes" not in self.__dict__:
            super().__setattr__(name, value)
        elif name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
            self._forget()
            self._changes[name] = value
            if "transformers" in self.__dict__:
                setattr(self.transformers, name, value)
        else:
            self._change(lambda made: setattr(made, name, value))

    def __getstate__(self) -> dict[str, Any]:
        """Returns all attributes that cannot be made again."""
        made = ("transformers", "_other_backend", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in made}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=RLock())
        self._use(self.backend_tokenizer)

    def __copy__(self) -> Tokenizer:
        copied = object.__new__(type(self))
        own = {"_special": dict(self._special), "_changes": dict(self._changes), "_lock": RLock()}
        copied.__dict__.update(self.__getstate__() | own)
        return copied

    def __deepcopy__(self, memo: dict) -> Tokenizer:
        return self.__copy__()  # encoding does not change the vocabulary

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, {len(self)} tokens)"


def _are_several(conversation: Any) -> bool:
    first = next(iter(conversation), None) if isinstance(conversation, (list, tuple)) else None
    return isinstance(first, (list, tuple)) or hasattr(first, "messages")


def _templates(given: Any) -> str | dict[str, str] | None:
    """Chat templates: a text, or texts by name. Files store the latter as a list."""
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return given


def _extra_tokens(made: Any) -> Sequence[Any]:
    """Special tokens without a name in transformers' tokenizer. Before version 5 the attribute had another name."""
    return getattr(made, "extra_special_tokens", None) or getattr(made, "additional_special_tokens", None) or ()


def _special_tokens(settings: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Special tokens by name, and those without a name."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = {name: _content(settings[name]) for name in NAMED if settings.get(name) is not None}
    others = {
        name: _content(value)
        for name, value in settings.items()
        if name.endswith("_token") and name not in NAMED and isinstance(value, (str, dict))
    }
    if isinstance(extra, dict):
        others |= {name: _content(value) for name, value in extra.items()}
        extra = []
    return named | others, [_content(token) for token in extra]


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)
