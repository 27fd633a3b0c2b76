"""`Tokenizer`: text to token ids and back, on the tokenizers package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that a tokenizer_config.json may name, in the order of `all_special_tokens`."""


class Encoding(dict[str, Any]):
    """What a tokenizer makes of texts; its entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Tokenizer:
    """A model's tokenizer, with the names of transformers' tokenizers.

    It does what generation needs: encode, decode, look up tokens, render chat templates. Threads may share it. For
    anything else, such as padding or tensors, it makes transformers' tokenizer of the same files and asks that.
    """

    is_fast = True
    turn_ends: Sequence[int] = ()
    """Tokens that end a turn, besides the end of a text."""

    def __init__(
        self,
        backend: Backend,
        settings: Mapping[str, Any],
        name_or_path: str = "",
        transformers: Callable[[], Any] | None = None,
    ) -> None:
        """`settings` is what stands in a tokenizer_config.json. `transformers` makes the other tokenizer."""
        backend.no_padding()
        backend.no_truncation()
        self.backend_tokenizer = backend
        self.name_or_path = name_or_path
        self.chat_template: str | dict[str, str] | None = _templates(settings.get("chat_template"))
        self.padding_side = settings.get("padding_side", "right")
        self.model_max_length = settings.get("model_max_length") or int(1e30)
        self.clean_up_tokenization_spaces = False
        self.tokenizer_class = settings.get("tokenizer_class", "PreTrainedTokenizerFast")
        self.split_special_tokens = bool(settings.get("split_special_tokens", False))
        """Whether names of special tokens in a text are text."""
        backend.encode_special_tokens = self.split_special_tokens
        self._make_transformers = transformers
        self._special, self._extra = _special_tokens(settings)
        for name in NAMED:
            token = self._special.get(name)
            setattr(self, name, token)
            setattr(self, f"{name}_id", None if token is None else backend.token_to_id(token))

    # ---- Text to tokens

    def __call__(self, text: str | Sequence[str], *others: Any, **options: Any) -> Any:
        """{"input_ids", "attention_mask"} of a text, or of each text of a list. `add_special_tokens=False` leaves out
        what the tokenizer puts around texts; other options are transformers'."""
        if others or options.keys() - {"add_special_tokens", "split_special_tokens"}:
            return self.transformers(text, *others, **options)
        if isinstance(text, str):
            ids = self.encode(text, **options)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        rows = [self.encode(one, **options) for one in text]
        return Encoding(input_ids=rows, attention_mask=[[1] * len(row) for row in rows])

    def encode(
        self,
        text: str,
        *others: Any,
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = None,
        **options: Any,
    ) -> list[int]:
        """Token ids of a text."""
        if others or options or not isinstance(text, str):
            options |= {} if split_special_tokens is None else {"split_special_tokens": split_special_tokens}
            return self.transformers.encode(text, *others, add_special_tokens=add_special_tokens, **options)
        splits = self.split_special_tokens if split_special_tokens is None else split_special_tokens
        backend = self.backend_tokenizer if splits == self.split_special_tokens else self._other_backend
        return backend.encode(text, add_special_tokens=add_special_tokens).ids

    @cached_property
    def _other_backend(self) -> Backend:
        """The same tokenizer with the other `split_special_tokens`. Threads may not change that of one."""
        other = Backend.from_str(self.backend_tokenizer.to_str())
        other.encode_special_tokens = not self.split_special_tokens
        return other

    # ---- Tokens to text

    def decode(self, tokens: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of token ids, a list, a tensor or one id."""
        if options.pop("clean_up_tokenization_spaces", None) or options:
            return self.transformers.decode(tokens, skip_special_tokens=skip_special_tokens, **options)
        tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
        tokens = [tokens] if isinstance(tokens, int) else list(tokens)
        if tokens and isinstance(tokens[0], (list, tuple)):
            return [self.decode(row, skip_special_tokens) for row in tokens]
        return self.backend_tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, rows: Any, skip_special_tokens: bool = False, **options: Any) -> list[str]:
        return [self.decode(row, skip_special_tokens, **options) for row in rows]

    # ---- The vocabulary

    def __len__(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    @property
    def vocab_size(self) -> int:
        """Tokens without those that were added."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @cached_property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Tokens that are found in a text before all others, by their ids: objects with `content` and `special`."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    def convert_ids_to_tokens(self, ids: int | Sequence[int], skip_special_tokens: bool = False) -> Any:
        """Names of tokens as the vocabulary has them; None for ids that it lacks."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        hidden = set(self.all_special_ids) if skip_special_tokens else ()
        return [self.backend_tokenizer.id_to_token(int(index)) for index in ids if index not in hidden]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Ids of tokens by their names; that of the unknown token for others."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        index = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if index is None else index

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Special tokens that have a name in the settings."""
        return dict(self._special)

    @cached_property
    def all_special_tokens(self) -> list[str]:
        """Those that decoding may leave out."""
        return list(dict.fromkeys([*self._special.values(), *self._extra]))

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
        """A conversation as the model was trained on it: text without `tokenize`, else what `__call__` gives, or its
        token ids alone without `return_dict`. `variables` are what the template may look at besides. Raises as `jinja.render`, ValueError without a
        template."""
        if tokenize and variables.keys() & {"return_tensors", "padding", "truncation", "max_length"}:
            options = {"tools": tools, "documents": documents, "chat_template": chat_template} | variables
            options |= {"continue_final_message": continue_final_message, "return_dict": return_dict}
            return self.transformers.apply_chat_template(
                conversation, add_generation_prompt=add_generation_prompt, **options
            )
        from pace.tokenizer.jinja import render  # here, since plain text needs no Jinja

        text = render(
            self.get_chat_template(chat_template, tools),
            conversation,
            tools,
            documents,
            add_generation_prompt,
            continue_final_message,
            **self._special | variables,
        )
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else encoding["input_ids"]

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """The template that a conversation is rendered with: the given one, by its name or its text, or the model's."""
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
        """transformers' tokenizer of the same files. Takes seconds for large vocabularies."""
        if self._make_transformers is None:
            raise AttributeError("this tokenizer has no files of its own from which transformers could make one")
        made = self._make_transformers()
        made.chat_template = self.chat_template
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.transformers, name)

    def __deepcopy__(self, memo: dict) -> Tokenizer:
        return self  # encoding changes nothing

    def __repr__(self) -> str:
        return f"Tokenizer({self.name_or_path!r}, {len(self)} tokens)"


def _templates(given: Any) -> str | dict[str, str] | None:
    """Chat templates: a text, or texts by their names, which files write as a list."""
    if isinstance(given, list):
        return {entry["name"]: entry["template"] for entry in given}
    return given


def _special_tokens(settings: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Special tokens by their names, and those without one."""
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
