"""Turns prompts into sequences, runs them, and turns finished sequences into outputs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import torch

from pace.llm.chat import Tool, format_named, read_choice, read_tools
from pace.llm.chat.template import ChatTemplate, Message
from pace.llm.chat.turn import Turn, plan_turn
from pace.llm.clients.batch import Batch
from pace.llm.clients.beam_search import BeamBatch, check_length_penalty
from pace.llm.clients.chat import ChatAnswer
from pace.llm.clients.requests import Request, Stream
from pace.llm.clients.streamer import Streamer, make_streamer
from pace.llm.configs import SamplingConfig
from pace.llm.defaults import with_defaults
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.guides import Guides
from pace.llm.infill import infill_prompts
from pace.llm.inputs import Prompts, read_prompts
from pace.llm.limits import checked_priority, checked_salt
from pace.llm.outputs import GenerateOutput, Metrics
from pace.llm.prepared import Prepared, end_tokens_of
from pace.llm.sampling.sampler import mix
from pace.llm.sequence import Sequence
from pace.llm.text.token_texts import with_texts

logger = logging.getLogger("pace")

DEFAULT_MAX_NEW_TOKENS = 256
"""Default for texts that are no chat answers, if neither the caller nor the checkpoint sets a limit. It is short enough
to wait for on a slow machine."""


class Generator:
    """Turns inputs into sequences and sequences into outputs. Thread-safe: calls of several threads share the steps of
    the engine."""

    def __init__(
        self, engine: Engine, tokenizer: Any = None, defaults: SamplingConfig | None = None, progress: bool = False
    ) -> None:
        """`defaults` has the checkpoint's settings: its generation config, end and pad tokens. Without a tokenizer
        prompts must be token ids, and there are no texts and no stop strings. `progress` shows a bar for several rows,
        on a terminal or in a notebook."""
        self.driver = EngineDriver(engine)
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingConfig()
        self.progress = progress
        self.guides = Guides(tokenizer, engine.model.vocab_size)

    @property
    def engine(self) -> Engine:
        """The engine, read-only: only its own thread may modify it. Raises ValueError once it is closed."""
        return self.driver.engine

    # -- before --------------------------------------------------------------------------------------------------------

    def prepare_for_generate(
        self,
        inputs: Any,
        sampling_config: SamplingConfig | None = None,
        turn: Turn | None = None,
        skip_special_tokens: bool = True,
        /,
        **fields: Any,
    ) -> Prepared:
        """Checks everything that can be checked before any work is done. `sampling_config` and `fields` are as in
        `SamplingConfig.read`. `turn` is the turn of a conversation that the prompt asks for; it has the defaults of
        chats. Without `skip_special_tokens`, texts that need no parser show special tokens. Raises TypeError,
        ValueError, NotImplementedError."""
        asked = SamplingConfig.read(sampling_config, fields)
        config = with_defaults(asked, self.defaults, is_chat=turn is not None)
        if turn is not None and not config.has_length:
            config.max_length = self.engine.max_length
        config.check_consistent(asked.explicit_fields)
        self._check_against_model(config)
        prompts = read_prompts(inputs, self.tokenizer, self.engine.model.vocab_size)
        limits = [self._max_length(config, len(row), index) for index, row in enumerate(prompts.rows)]
        if config.num_beams > 1:
            check_length_penalty(
                config.length_penalty, max(limit - len(row) for row, limit in zip(prompts.rows, limits))
            )
        seed = int(torch.randint(2**63 - 1, ())) if config.seed is None else config.seed
        # Without a seed every prompt draws from its own stream; with a seed, as if it were the only prompt.
        seeds = [mix((seed + index) % 2**64) if config.seed is None else seed for index in range(len(limits))]
        end_tokens = end_tokens_of(config)
        continues, hidden = turn is None or turn.continues, None if skip_special_tokens else frozenset()
        if turn is not None and (skip_special_tokens or not turn.is_plain):
            hidden = turn.hidden | frozenset(end_tokens)
        guides, warnings = self.guides.make(config, prompts.rows, end_tokens, continues, hidden)
        if any(guide.text_rules.prompt_end for guide in guides):
            prompts = Prompts([guide.prompt for guide in guides], None)
        return Prepared(prompts, config, limits, seeds, guides, warnings)

    def prepare_with_suffix(
        self,
        inputs: Any,
        sampling_config: SamplingConfig | None = None,
        suffix: str | list[str] | None = None,
        **fields: Any,
    ) -> Prepared:
        """Like `prepare_for_generate`, for text before an optional `suffix` (`LLMModel.generate`)."""
        if suffix is None:
            return self.prepare_for_generate(inputs, sampling_config, **fields)
        config = SamplingConfig.read(sampling_config, fields)
        rows, infill = infill_prompts(inputs, suffix, self.tokenizer)
        infill.add_ends(config, self.defaults)
        return self.prepare_for_generate(rows, config)

    def sequences_of(self, prepared: Prepared, index: int) -> list[Sequence]:
        """Calls `Prepared.sequences` with this tokenizer and driver."""
        return prepared.sequences(index, self.tokenizer, self.driver)

    def _max_length(self, config: SamplingConfig, num_prompt_tokens: int, index: int) -> int:
        """Maximum number of tokens in a row, prompt included. Raises ValueError if the prompt leaves no room for
        another one."""
        most = self.engine.max_length
        if num_prompt_tokens >= most:
            raise ValueError(
                f"prompt {index} has {num_prompt_tokens} tokens, and prompt and output together may have {most}: "
                f"{self.engine.explain_length_limit(num_prompt_tokens + 1)}"
            )
        if config.max_new_tokens is not None:
            wanted = num_prompt_tokens + config.max_new_tokens
        elif config.max_length is not None:
            wanted = config.max_length
            if wanted <= num_prompt_tokens:
                raise ValueError(
                    f"prompt {index} has {num_prompt_tokens} tokens, which max_length={wanted} leaves nothing of; set "
                    "max_new_tokens"
                )
        else:
            return min(most, num_prompt_tokens + DEFAULT_MAX_NEW_TOKENS)
        if wanted > most:
            why = self.engine.explain_length_limit(wanted)
            logger.warning(
                "prompt %d with its new tokens may reach %d tokens; it ends with 'length' at %d: %s",
                index,
                wanted,
                most,
                why,
            )
        return min(most, wanted)

    def _check_against_model(self, config: SamplingConfig) -> None:
        """Raises ValueError for token ids that the model does not have, and for stop strings without a tokenizer."""
        vocab_size = self.engine.model.vocab_size
        asked = {
            "logit_bias": config.logit_bias or (),
            "bad_words_ids": [token for word in config.bad_words_ids or () for token in word],
            "eos_token_id": end_tokens_of(config),
        }
        for name, tokens in asked.items():
            beyond = [token for token in tokens if token >= vocab_size]
            if beyond:
                raise ValueError(f"{name} names the token {beyond[0]}; this model's ids are 0 to {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (num_top := getattr(config, name)) is not None and num_top > vocab_size:
                raise ValueError(f"{name}={num_top} asks for more tokens than the vocabulary's {vocab_size}")
        if config.step_callback is not None and self.tokenizer is None:
            raise ValueError("step_callback is about text, and this model has no tokenizer; give one")
        if config.stop_strings and self.tokenizer is None:
            raise ValueError(
                "stop_strings need text, and this model has no tokenizer; give eos_token_id, or a tokenizer"
            )
        if any([token] in (config.bad_words_ids or ()) for token in end_tokens_of(config)):
            logger.warning(
                "bad_words_ids holds an end token, which is not banned (as in transformers); use ignore_eos or "
                "min_new_tokens for that",
            )

    # -- the run -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Any,
        sampling_config: SamplingConfig | None = None,
        streamer: Any = None,
        cancel: threading.Event | None = None,
        **fields: Any,
    ) -> GenerateOutput:
        """Continues the prompts; see `LLMModel.generate`. An exception, such as KeyboardInterrupt or an error of the
        streamer, frees what this call held; calls of other threads go on."""
        return self._generate(lambda: self.prepare_with_suffix(inputs, sampling_config, **fields), streamer, cancel)

    def generate_turn(
        self,
        turn: Turn,
        prompt: list[int],
        sampling_config: SamplingConfig | None = None,
        streamer: Any = None,
        cancel: threading.Event | None = None,
    ) -> GenerateOutput:
        """Like `generate`, for a turn of a conversation and its prompt in tokens. Texts are read by the turn's
        rules."""
        return self._generate(lambda: self.prepare_for_generate(prompt, sampling_config, turn), streamer, cancel)

    def _generate(
        self, prepare: Callable[[], Prepared], streamer: Any, cancel: threading.Event | None
    ) -> GenerateOutput:
        if cancel is not None and not callable(getattr(cancel, "is_set", None)):
            raise TypeError(
                f"cancel must be a threading.Event, which another thread sets to end this call; got {cancel!r}"
            )
        try:
            prepared = prepare()
            rules = [guide.text_rules for guide in prepared.row_guides]
            streamer = make_streamer(streamer, prepared.config, prepared.num_rows, self.progress, rules)
            batch = self._batch(prepared, streamer, cancel)
            batch.run(prepared.row_prompts)
        except BaseException:
            self._end_quietly(streamer)
            raise
        streamer.end()
        return self._output(prepared, batch.rows)

    def _batch(self, prepared: Prepared, streamer: Streamer, cancel: threading.Event | None) -> Batch:
        indices = range(len(prepared.limits))
        if prepared.config.num_beams > 1:
            return BeamBatch(
                self.driver, (prepared.beam_search(index, self.tokenizer) for index in indices), streamer, cancel
            )
        return Batch(self.driver, (self.sequences_of(prepared, index) for index in indices), streamer, cancel)

    def stream(self, prompt: Any, sampling_config: SamplingConfig | None = None, **fields: Any) -> Iterator[str]:
        """Yields the text of one prompt's continuation in pieces; joined, they equal its text in `generate`'s output.
        Generation does not wait for the caller to take a piece. Closing the iterator ends it."""
        prepared = self._prepare_stream("stream", prompt, sampling_config, **fields)
        return Stream(lambda: self._request(prepared))

    async def astream(
        self, prompt: Any, sampling_config: SamplingConfig | None = None, **fields: Any
    ) -> AsyncIterator[str]:
        """Yields the pieces of `stream` without blocking the event loop: the prompt is read on another thread. Leaving
        the iteration ends the generation."""
        prepared = await asyncio.to_thread(self._prepare_stream, "astream", prompt, sampling_config, **fields)
        request = self._request(prepared)
        try:
            async with contextlib.aclosing(aiter(request)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            request.cancel()

    def add_request(
        self,
        prompt: Any,
        sampling_config: SamplingConfig | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **fields: Any,
    ) -> Request:
        """Queues one prompt and returns at once; see `LLMModel.add_request`."""
        prepared = self._prepare_one("add_request", prompt, sampling_config, **fields)
        return self._request(prepared, checked_priority(priority), checked_salt(cache_salt))

    def chat(
        self,
        messages: str | list[Message],
        sampling_config: SamplingConfig | None = None,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        tool_format: str | None = None,
        template_variables: dict[str, Any] | None = None,
        **fields: Any,
    ) -> ChatAnswer:
        """Returns the answer to a conversation. Generation begins when its first event is requested; see
        `LLMModel.chat`."""
        if self.tokenizer is None:
            raise ValueError("a conversation needs a tokenizer with a chat template, and this model has none")
        template = ChatTemplate(self.tokenizer, None if tool_format is None else format_named(tool_format))
        listed = [tool.for_template() if isinstance(tool, Tool) else tool for tool in tools or ()]
        known = read_tools(listed)
        config = SamplingConfig.read(sampling_config, fields)
        turn = plan_turn(
            template,
            [{"role": "user", "content": messages}] if isinstance(messages, str) else messages,
            known,
            read_choice(tool_choice, known),
            parallel_tool_calls,
            config.take_grammar(),
            variables=template_variables,
        )
        prompt = list(self.tokenizer(turn.prompt, add_special_tokens=False)["input_ids"])
        return self.answer(turn, prompt, config)

    def answer(self, turn: Turn, prompt: list[int], sampling_config: SamplingConfig) -> ChatAnswer:
        """Returns the answer of a turn, given its prompt in tokens. The turn's grammar replaces the config's. Raises
        ValueError for settings that conversations do not support."""
        config = sampling_config.copy()
        config.take_grammar()
        config.grammar = turn.grammar
        prepared = self._prepare_one("chat", prompt, config, turn)
        if prepared.config.step_callback is not None:
            raise ValueError(
                "chat reads calls and thoughts from the text, which step_callback may change; use generate"
            )
        if prepared.config.token_healing:
            raise ValueError(
                "a conversation's prompt ends where its template says: token_healing has nothing to heal in it"
            )
        if prepared.num_rows > 1:
            raise ValueError(f"chat gives one answer, and this config asks for {prepared.num_rows}; use generate")
        return ChatAnswer(lambda: self._request(prepared), turn)

    def _prepare_stream(
        self, caller: str, prompt: Any, sampling_config: SamplingConfig | None, **fields: Any
    ) -> Prepared:
        if self.tokenizer is None:
            raise ValueError(
                "streaming text needs a tokenizer, and this model has none; use generate with a CallbackStreamer"
            )
        prepared = self._prepare_one(caller, prompt, sampling_config, **fields)
        if prepared.num_rows > 1:
            raise ValueError(
                f"{caller} gives the text of one continuation, and this call makes {prepared.num_rows}; use "
                f"add_request and its events()"
            )
        return prepared

    def _prepare_one(
        self,
        caller: str,
        prompt: Any,
        sampling_config: SamplingConfig | None,
        turn: Turn | None = None,
        /,
        **fields: Any,
    ) -> Prepared:
        if turn is None:
            prepared = self.prepare_with_suffix(prompt, sampling_config, **fields)
        else:
            prepared = self.prepare_for_generate(prompt, sampling_config, turn, **fields)
        if prepared.config.num_beams > 1:
            raise ValueError(
                f"{caller} tells tokens as they come, and beam search knows none for certain before its end: "
                f"use generate, or num_beams=1"
            )
        if len(prepared.prompts.rows) != 1:
            raise ValueError(f"{caller} continues one prompt, and was given {len(prepared.prompts.rows)}; use generate")
        return prepared

    def _request(self, prepared: Prepared, priority: int = 0, cache_salt: str | None = None) -> Request:
        sequences = self.sequences_of(prepared, 0)
        for sequence in sequences:
            sequence.priority, sequence.cache_salt = priority, cache_salt
        return Request(self.driver, sequences, lambda rows: self._output(prepared, rows))

    def _end_quietly(self, streamer: Any) -> None:
        """Ends the streamer after a failed generation, so that its readers stop waiting. An error of `end` is only
        logged, because the generation's own error is raised."""
        try:
            if streamer is not None:
                streamer.end()
        except Exception as error:
            logger.debug("the streamer's end() failed after a failed generation: %s", error)

    # -- after ---------------------------------------------------------------------------------------------------------

    def _output(self, prepared: Prepared, rows: list[Sequence]) -> GenerateOutput:
        config = prepared.config
        generated = [row.generated for row in rows]
        pad = self._pad_token(config)
        longest = max(map(len, generated))
        continuation = torch.tensor(
            [tokens + [pad] * (longest - len(tokens)) for tokens in generated], dtype=torch.int64
        )
        prompts = prepared.prompts.padded(pad).repeat_interleave(config.num_return_sequences, dim=0)
        return GenerateOutput(
            output_token_ids=torch.cat([prompts, continuation], dim=1),
            generated_token_ids=generated,
            texts=[row.stopping.text.text_of(row.generated) for row in rows] if self.tokenizer else [],
            finish_reasons=[row.finish_reason for row in rows],
            # Drafts may have been scored beyond the token that ended the row.
            logprobs=None
            if config.logprobs is None
            else [with_texts(row.logprobs[: len(tokens)], self.tokenizer) for row, tokens in zip(rows, generated)],
            prompt_logprobs=None
            if config.prompt_logprobs is None
            else [with_texts(row.prompt_logprobs, self.tokenizer) for row in rows],
            captures=[guide.captures.read(row.generated, row.logprobs) for guide, row in zip(prepared.row_guides, rows)]
            if prepared.has_captures
            else None,
            metrics=Metrics.of(rows),
            request_metrics=[Metrics.of([row]) for row in rows],
            sequence_scores=None if config.num_beams == 1 else [row.score for row in rows],
        )

    def _pad_token(self, config: SamplingConfig) -> int:
        if config.pad_token_id is not None:
            return config.pad_token_id
        return config.eos_token_id[0] if config.eos_token_id else 0
