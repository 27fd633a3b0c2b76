"""`PaceEngine`: a model of pace as an engine of kani."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import warnings
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kani import AIFunction, ChatMessage, PromptPipeline
from kani.engines import BaseEngine
from kani.engines.base import BaseCompletion
from kani.exceptions import PromptTooLong
from kani.utils.warnings import deprecated

from pace.integrations.kani import hyperparams as hyper
from pace.integrations.kani.answers import beam_search, pieces_and_completion, stepwise
from pace.integrations.kani.messages import as_dict, as_tools, media_of
from pace.integrations.kani.prompts import PromptReader, ReadPrompt
from pace.integrations.kani.slots import Slots
from pace.llm import LLMModel, SamplingConfig
from pace.llm.aliases import model_options
from pace.llm.chat import Tool, ToolChoice, detect_format, format_named, read_choice
from pace.llm.chat.template import ChatTemplate, Rendered
from pace.llm.chat.turn import AnswerStyle, Turn, turn_after

logger = logging.getLogger("pace")

NEEDLESS = {
    "low_cpu_mem_usage": "pace never holds a checkpoint twice",
    "use_safetensors": "pace reads the files that exist, safetensors first",
    "attn_implementation": "pace has one implementation of attention",
    "trust_remote_code": "pace runs no code of a checkpoint",
}
"""Arguments of transformers without effect, and why."""
_OWN_RATE = "pace converts sound to the sampling rate of the model's processor"
NEEDLESS_HERE = {
    "model_cls": "pace chooses the class by the checkpoint's config",
    "mm_audio_sample_rate": _OWN_RATE,
    "audio_sample_rate": _OWN_RATE,
    "audio_sr": _OWN_RATE,
    "mm_video_fps": "pace takes no video",
}
"""Arguments of kani's engine for transformers without effect, and why."""
REASONING_KEYS = ("reasoning_content", "thinking")
"""Keys under which chat templates look for the reasoning of a message."""
NUM_LAST = 32
"""Number of last tokens of a prompt that are decoded to see if it begins reasoning."""


class PaceEngine(BaseEngine):
    """A model that kani chats with. Any number of chats may share one, on several event loops and threads. Their tokens
    are computed in the same steps, and sharing does not change their texts."""

    def __init__(
        self,
        model_id: str | Path | None = None,
        max_context_size: int | None = None,
        prompt_pipeline: PromptPipeline | None = None,
        *,
        model: LLMModel | None = None,
        token: str | bool | None = None,
        device: Any = None,
        tokenizer_cls: Any = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        model_load_kwargs: Mapping[str, Any] | None = None,
        chat_template_reasoning_content_key: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        parser: str | None = "auto",
        constrain_tool_calls: bool = False,
        show_reasoning_in_stream: bool = False,
        max_concurrency: int | None = None,
        token_reserve: int = 0,
        **hyperparams: Any,
    ) -> None:
        """`model_id`: a local directory, a GGUF file or a Hub id, loaded with `token` and with `model_load_kwargs`,
        arguments of `LLMModel` or of transformers. Or `model`: a loaded LLMModel, which may be shared.
        `max_context_size`: maximum tokens of prompt and answer; None for the model's maximum.
        `prompt_pipeline`: makes prompts of messages and functions; by default the tokenizer's chat template does. The
        template gets `chat_template_kwargs`, and the reasoning of messages as `chat_template_reasoning_content_key`
        (None: as the template names it).
        `tokenizer_cls`, `tokenizer_kwargs`: make prompts with another tokenizer of the same vocabulary,
        `tokenizer_cls.from_pretrained(model_id, **tokenizer_kwargs)`. A class of processors has no effect: pace has its
        own.
        `parser`: "auto" separates calls and reasoning from the text, in the format of the template; a name of
        `pace.llm.chat.FORMATS` chooses that format. None returns the raw text with special tokens, for a parser of kani
        around this engine.
        `constrain_tool_calls`: constrain a call that the model begins to a known function and its schema, with a
        grammar.
        `show_reasoning_in_stream`: include reasoning in streams.
        `max_concurrency`: maximum answers at once; others wait. None for no limit.
        `hyperparams`: defaults for decoding, which calls of this engine may override (docs/kani.md).
        Raises what `LLMModel` raises. ValueError: a model without a tokenizer, or without a chat template and
        `prompt_pipeline`. TypeError and ValueError: invalid arguments.
        """
        if model is None and model_id is None:
            raise TypeError("give model_id, to load a model, or model, an open LLMModel")
        if model is not None and (token is not None or model_load_kwargs):
            raise TypeError("token and model_load_kwargs apply to model_id, but model is already loaded")
        if max_concurrency is not None and (not isinstance(max_concurrency, int) or max_concurrency < 1):
            raise ValueError(f"max_concurrency must be an int of at least 1, or None; got {max_concurrency!r}")
        if max_context_size is not None and (not isinstance(max_context_size, int) or max_context_size < 2):
            raise ValueError(f"max_context_size must be an int of at least 2, or None; got {max_context_size!r}")
        if prompt_pipeline is not None and not callable(prompt_pipeline):
            raise TypeError(f"prompt_pipeline must be a PromptPipeline or a function; got {prompt_pipeline!r:.60}")
        model_options({"device": device}, ())  # raises for a device other than the CPU
        format = None if parser in ("auto", None) else format_named(parser)
        if str(getattr(tokenizer_cls, "__name__", "")).endswith("Processor"):
            logger.warning("tokenizer_cls=%s has no effect: pace has processors of its own", tokenizer_cls.__name__)
            tokenizer_cls = None
        for name in NEEDLESS_HERE.keys() & hyperparams.keys():
            if hyperparams.pop(name) is not None:
                logger.warning("%s has no effect: %s", name, NEEDLESS_HERE[name])
        self._defaults = hyper.read(hyperparams)
        self.model_id = None if model_id is None else str(model_id)
        self.hyperparams = hyperparams
        """Decoding options as given by the caller."""
        self.pipeline = prompt_pipeline
        self.token_reserve = token_reserve
        self._is_ours, self._is_closed = model is None, False
        if model is None:
            model = LLMModel(model_id, token=token, **_load_options(model_load_kwargs or {}))
        self._model = model
        try:
            self._tokenizer = self._read_tokenizer(tokenizer_cls, tokenizer_kwargs, token)
            try:
                self._template = ChatTemplate(self._tokenizer, format, model.generator.encoder)
            except ValueError as error:
                if self._makes_own_prompts:
                    raise ValueError(f"{error}, or give prompt_pipeline") from None
                self._template = None
            self.max_context_size = self._context_size(max_context_size)
        except BaseException:
            self._close()
            raise
        self._reasoning_key = chat_template_reasoning_content_key
        if self._reasoning_key is None and self._template is not None:
            found = (key for key in REASONING_KEYS if re.search(rf"\.{key}\b|['\"]{key}['\"]", self._template.source))
            self._reasoning_key = next(found, None)
        self._template_variables = dict(chat_template_kwargs or {})
        plain = SimpleNamespace(tokenizer=self._tokenizer, format=format or detect_format(""), reasoning=None)
        self._style: AnswerStyle = self._template or plain
        self._is_parsed = parser is not None
        self._constrains_calls = constrain_tool_calls
        self._reader = PromptReader(self._tokenizer, self._model.generator)
        self._markers = [] if self._is_parsed else _markers(self._style)
        self._shows_reasoning = show_reasoning_in_stream
        self._slots = Slots(max_concurrency)

    # -- kani's interface ----------------------------------------------------------------------------------------------

    def prompt_len(
        self, messages: list[ChatMessage], functions: list[AIFunction] | None = None, **hyperparams: Any
    ) -> int:
        """Returns the number of tokens of the prompt, those of images and sound included. Decodes no images.

        Messages that exceed the context even without the template's text are counted without it, because kani asks
        again for each message that it may drop. Without messages, returns the number of tokens that the functions
        add."""
        if not messages and self._makes_own_prompts:
            return self._num_tokens_of(functions)
        if self._makes_own_prompts and (num_tokens := self._reader.count_beyond(messages, self.max_context_size)):
            return num_tokens
        return len(self._read(messages, functions, copies_media=False).tokens)

    async def predict(
        self,
        messages: list[ChatMessage],
        functions: list[AIFunction] | None = None,
        *,
        decode_kwargs: Mapping[str, Any] | None = None,
        **hyperparams: Any,
    ) -> BaseCompletion:
        """Answers a conversation. Cancelling the task ends the generation after the current step.

        `functions` are those that the model may call; `hyperparams` override those of the engine. `decode_kwargs`:
        `skip_special_tokens`, for an engine without a parser.
        Raises PromptTooLong; NotImplementedError for video; TypeError and ValueError for unsupported arguments; and
        what the chat template raises. Raises ValueError for images and sound that cannot be read or are not taken.
        """
        stream = PaceEngine.stream(self, messages, functions, decode_kwargs=decode_kwargs, **hyperparams)
        async with contextlib.aclosing(stream) as items:
            return [item async for item in items][-1]

    async def stream(
        self,
        messages: list[ChatMessage],
        functions: list[AIFunction] | None = None,
        *,
        streamer_timeout: float | None = None,
        decode_kwargs: Mapping[str, Any] | None = None,
        **hyperparams: Any,
    ) -> AsyncGenerator[str | BaseCompletion]:
        """Yields the text of the answer as it is generated, then the completion. Leaving the iteration ends the
        generation after the current step. Raises what `predict` raises, and TimeoutError if no text comes for
        `streamer_timeout` seconds."""
        async with self._slots.one():
            answer = await asyncio.to_thread(self._begin, messages, functions, decode_kwargs, hyperparams)
            async with contextlib.aclosing(answer) as items:
                item: str | BaseCompletion = ""
                while isinstance(item, str):
                    async with asyncio.timeout(streamer_timeout):
                        item = await anext(items)
                    yield item

    async def close(self) -> None:
        """Frees the model if it was loaded here; running answers raise ValueError. May be called twice."""
        await asyncio.to_thread(self._close)

    # -- as in HuggingEngine -------------------------------------------------------------------------------------------

    def build_prompt(self, messages: list[ChatMessage], functions: list[AIFunction] | None = None) -> Any:
        """Returns the prompt of a conversation: text, token ids, a tensor of them, or the output of a tokenizer or of a
        processor. With images or sound: a dict of the text as `prompt`, `images` and `audio`. Subclasses may override
        it."""
        prompt = self._render(messages, functions).text if self.pipeline is None else self.pipeline(messages, functions)
        media = media_of(messages) if isinstance(prompt, str) else {}
        return {"prompt": prompt, **media} if media else prompt

    @property
    def model(self) -> LLMModel:
        return self._model

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers that encodes prompts and decodes answers."""
        return self._tokenizer

    @deprecated("Use Kani.prompt_token_len instead")
    def function_token_reserve(self, functions: list[AIFunction]) -> int:
        """Number of tokens that these functions add to a prompt."""
        return self._num_tokens_of(functions)

    # ------------------------------------------------------------------------------------------------------------------

    def _num_tokens_of(self, functions: list[AIFunction] | None) -> int:
        """Number of tokens that these functions add to a prompt."""
        asked = [ChatMessage.user("")]
        return self.prompt_len(asked, functions) - self.prompt_len(asked) if functions else 0

    def _render(
        self, messages: list[ChatMessage], functions: list[AIFunction] | None, copies_media: bool = False
    ) -> Rendered:
        """Applies the chat template. Without `copies_media`, the result's media are only for counting."""
        dicts = [as_dict(message, self._reasoning_key, copies_media) for message in messages]
        return self._template.render_media(dicts, as_tools(functions), variables=self._template_variables)

    def _read(
        self, messages: list[ChatMessage], functions: list[AIFunction] | None, copies_media: bool = True
    ) -> ReadPrompt:
        """Makes a prompt, and reads it."""
        if self._makes_own_prompts:
            rendered = self._render(messages, functions, copies_media)
            return self._reader.read_text(rendered.text, rendered.media)
        return self._reader.read(self.build_prompt(messages, functions))

    @property
    def _makes_own_prompts(self) -> bool:
        return self.pipeline is None and type(self).build_prompt is PaceEngine.build_prompt

    def _begin(
        self,
        messages: list[ChatMessage],
        functions: list[AIFunction] | None,
        decode_kwargs: Mapping[str, Any] | None,
        hyperparams: Mapping[str, Any],
    ) -> AsyncGenerator[str | BaseCompletion]:
        """Prepares an answer. Runs on a separate thread, because templates, tokenizers and grammars take time."""
        if self._is_closed:
            raise ValueError("this engine is closed; make another")
        generator = self._model.generator
        wanted = hyper.merged(self._defaults, hyper.read(hyperparams))
        prompt = self._read(messages, functions)
        tokens = prompt.tokens
        if len(tokens) >= self.max_context_size:
            raise PromptTooLong(f"the prompt has {len(tokens)} tokens, and the context {self.max_context_size}")
        config = hyper.sampling_config(wanted, self._end_tokens, self.max_context_size)
        end = self._tokenizer.decode(tokens[-NUM_LAST:]) if prompt.text is None else prompt.text
        turn = self._turn(end, as_tools(functions), wanted, config, _skips_special(decode_kwargs))
        if config.copy().merge_from(generator.defaults).num_beams == 1:
            source = stepwise(generator.answer(turn, prompt.inputs, config))
        else:
            config.take_grammar()
            config.grammar = turn.grammar
            source = beam_search(
                turn, lambda cancel: generator.generate_turn(turn, prompt.inputs, config, None, cancel)
            )
        return pieces_and_completion(source, self._shows_reasoning, self._markers)

    def _turn(
        self,
        prompt_end: str,
        tools: Sequence[Tool],
        wanted: Mapping[str, Any],
        config: SamplingConfig,
        skips_special_tokens: bool,
    ) -> Turn:
        """Plans the parser and the constraint of an answer. The constraint of the text is in `config`, and choices of
        calls in `wanted` apply if there are tools. Raises ValueError for an invalid choice."""
        choice = read_choice(wanted.get("tool_choice"), tools) if tools else ToolChoice("none")
        answer = config.make_grammar()
        turn = turn_after(prompt_end, self._style, tools, choice, wanted.get("parallel_tool_calls", True), answer)
        if answer is None and choice.mode == "auto" and not self._constrains_calls:
            turn = replace(turn, grammar=None)
        if self._is_parsed:
            return turn
        hidden = frozenset(self._tokenizer.all_special_ids if skips_special_tokens else ())
        return replace(turn, tools=(), choice=ToolChoice("none"), reasoning=None, hidden=hidden)

    @property
    def _end_tokens(self) -> list[int]:
        """End tokens of the checkpoint and of the tokenizer."""
        own = self._tokenizer.eos_token_id
        return [*(self._model.generator.defaults.eos_token_id or ()), *([] if own is None else [own])]

    def _read_tokenizer(self, cls: Any, options: Mapping[str, Any] | None, token: str | bool | None) -> Any:
        own = self._model.tokenizer
        if cls is None and own is None:
            raise ValueError("a conversation needs a tokenizer, but this model has none")
        if cls is None and not options:
            return own
        if self.model_id is None:
            raise TypeError("tokenizer_cls and tokenizer_kwargs need model_id, the place of the tokenizer")
        cls = cls or type(getattr(own, "transformers", own))
        return cls.from_pretrained(self.model_id, **{"token": token, **(options or {})})

    def _context_size(self, asked: int | None) -> int:
        limit = self._model.max_seq_len
        if asked is not None and asked > limit:
            why = self._model.generator.engine.explain_length_limit(asked)
            logger.warning("max_context_size is reduced from %d to %d: %s", asked, limit, why)
        return limit if asked is None else min(asked, limit)

    def _close(self) -> None:
        self._is_closed = True
        if self._is_ours:
            self._model.close()


def _load_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Converts arguments of LLMModel, or of transformers' `from_pretrained`, to arguments of LLMModel."""
    options: dict[str, Any] = {}
    for name, value in given.items():
        if name in NEEDLESS:
            logger.warning("%s has no effect: %s", name, NEEDLESS[name])
        elif name == "device_map" and isinstance(value, Mapping):
            options[name] = value.get("")
        elif not (name in ("dtype", "torch_dtype") and value in ("auto", None)):
            options["quantization" if name == "quantization_config" else name] = value
    return options


def _markers(style: AnswerStyle) -> list[str]:
    """Strings that parsers look for in a text: added tokens, and delimiters of calls and reasoning."""
    format, reasoning = style.format, style.reasoning
    found = [format.opening, format.trigger, format.tail, format.closing]
    found += [reasoning.opening, reasoning.closing] if reasoning else []
    added = [token.content for token in style.tokenizer.added_tokens_decoder.values()]
    return [marker.strip() for marker in (*found, *added)]


def _skips_special(decode_kwargs: Mapping[str, Any] | None) -> bool:
    """True if special tokens are left out of a text that is not parsed."""
    unknown = [name for name in decode_kwargs or () if name != "skip_special_tokens"]
    if unknown:
        warnings.warn(f"pace has no decode_kwargs {', '.join(unknown)}, and ignores them", stacklevel=2)
    return bool((decode_kwargs or {}).get("skip_special_tokens", False))
