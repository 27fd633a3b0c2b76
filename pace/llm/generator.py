"""`Generator`: the methods generate, stream, add_request and chat of a model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pace.llm.chat import Tool, format_named, read_choice, read_tools
from pace.llm.chat.template import ChatTemplate, Message
from pace.llm.chat.turn import Turn, plan_turn
from pace.llm.clients.adapters import Adapters, Choice
from pace.llm.clients.batch import Batch
from pace.llm.clients.beam_search import BeamBatch
from pace.llm.clients.chat import ChatAnswer
from pace.llm.clients.decisions import LabelLogits
from pace.llm.clients.requests import Request, Stream
from pace.llm.clients.session import Session
from pace.llm.clients.streamer import Streamer, make_streamer
from pace.llm.configs import SamplingConfig
from pace.llm.decisions.config import DecisionConfig
from pace.llm.decisions.decide import Decider, answers_of, places_of
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.infill import infill_prompts
from pace.llm.inputs import Prompts, encode, is_media_prompt, read_media_prompt, read_prompts, with_keywords
from pace.llm.limits import checked_priority, checked_salt
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.outputs import GenerateOutput, Transcript
from pace.llm.preparation import PreparedCall, Preparer, model_name
from pace.llm.processors.prompts import NO_MEDIA, MediaPart, Prompt, PromptEncoder
from pace.llm.processors.transcription import (
    TranscriptReader,
    check_transcribes,
    language_name,
    transcription_prompt,
)
from pace.llm.sequence import Sequence
from pace.llm.sequences import make_beam_search, make_samples

logger = logging.getLogger("pace")


class Generator:
    """Turns inputs into sequences and sequences into outputs. Thread-safe: calls of several threads share the steps of
    the engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any = None,
        defaults: SamplingConfig | None = None,
        progress: bool = False,
        encoder: PromptEncoder = NO_MEDIA,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """`defaults` has the checkpoint's settings: its generation config, end and pad tokens. Without a tokenizer
        prompts must be token ids, and there are no texts and no stop strings. `progress` shows a bar for several rows,
        on a terminal or in a notebook. `encoder` puts images and sound into prompts, for models that take them.
        `checkpoint` is the one that the model was loaded from."""
        self.driver = EngineDriver(engine)
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingConfig()
        self.progress = progress
        self.encoder = encoder
        self._preparer = Preparer(self.driver, tokenizer, self.defaults, encoder)
        self.constraints = self._preparer.constraints
        self.adapters = Adapters(self.driver, checkpoint)
        self.decider = Decider(tokenizer, None if checkpoint is None else checkpoint.path)

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
    ) -> PreparedCall:
        """Checks everything that can be checked before any work is done. `sampling_config` and `fields` are as in
        `SamplingConfig.read`. `turn` is the turn of a conversation that the prompt asks for; it has the defaults of
        chats. Without `skip_special_tokens`, texts that need no parser show special tokens. Raises TypeError,
        ValueError, NotImplementedError."""
        asked = SamplingConfig.read(sampling_config, fields)
        return self._preparer.prepare(inputs, asked, turn, skip_special_tokens)

    def prepare_with_suffix(
        self,
        inputs: Any = None,
        sampling_config: SamplingConfig | None = None,
        suffix: str | list[str] | None = None,
        **fields: Any,
    ) -> PreparedCall:
        """Like `prepare_for_generate`, for text before an optional `suffix` (`LLMModel.generate`). `fields` may have
        the tensors of a processor instead of `inputs`."""
        inputs, fields = with_keywords(inputs, fields)
        if suffix is None:
            return self.prepare_for_generate(inputs, sampling_config, **fields)
        config = SamplingConfig.read(sampling_config, fields)
        rows, infill = infill_prompts(inputs, suffix, self.tokenizer)
        infill.add_ends(config, self.defaults)
        return self.prepare_for_generate(rows, config)

    def sequences_of(self, call: PreparedCall, index: int) -> list[Sequence]:
        """Makes the sequences of a prompt, one for each sample."""
        return make_samples(call, index, self.tokenizer, self.driver)

    # -- the run -------------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Any = None,
        sampling_config: SamplingConfig | None = None,
        streamer: Any = None,
        cancel: threading.Event | None = None,
        adapter: Choice = None,
        **fields: Any,
    ) -> GenerateOutput:
        """Continues the prompts; see `LLMModel.generate`. An exception, such as KeyboardInterrupt or an error of the
        streamer, frees what this call held; calls of other threads continue."""
        prepare = lambda: self.prepare_with_suffix(inputs, sampling_config, **fields)
        return self._generate(prepare, streamer, cancel, adapter)

    def generate_turn(
        self,
        turn: Turn,
        prompt: list[int] | Prompt,
        sampling_config: SamplingConfig | None = None,
        streamer: Any = None,
        cancel: threading.Event | None = None,
        adapter: Choice = None,
    ) -> GenerateOutput:
        """Like `generate`, for a turn of a conversation and its prompt in tokens. Texts are read by the turn's
        rules."""
        prepare = lambda: self.prepare_for_generate(prompt, sampling_config, turn)
        return self._generate(prepare, streamer, cancel, adapter)

    def _generate(
        self,
        prepare: Callable[[], PreparedCall],
        streamer: Any,
        cancel: threading.Event | None,
        adapter: Choice = None,
    ) -> GenerateOutput:
        if cancel is not None and not callable(getattr(cancel, "is_set", None)):
            raise TypeError(
                f"cancel must be a threading.Event, which another thread sets to end this call; got {cancel!r}"
            )
        unfinished = streamer
        try:
            with self.adapters.using(adapter) as key:
                call = dataclasses.replace(prepare(), adapter=key)
                prompts = call.row_prompts
                rules = [prompt.constraints.text_rules for prompt in prompts]
                unfinished = streamer = make_streamer(streamer, call.config, len(prompts), self.progress, rules)
                batch = self._batch(call, streamer, cancel)
                batch.run([prompt.tokens[:] for prompt in prompts])
        except BaseException:
            _end_quietly(unfinished)
            raise
        streamer.end()
        return self._output(call, batch.rows)

    def _batch(self, call: PreparedCall, streamer: Streamer, cancel: threading.Event | None) -> Batch:
        indices = range(len(call.prompts))
        if call.config.num_beams > 1:
            searches = (make_beam_search(call, index, self.tokenizer) for index in indices)
            return BeamBatch(self.driver, searches, streamer, cancel)
        return Batch(self.driver, (self.sequences_of(call, index) for index in indices), streamer, cancel)

    def _output(self, call: PreparedCall, rows: list[Sequence]) -> GenerateOutput:
        captures = [
            prompt.constraints.captures.read(row.generated, row.logprobs)
            for prompt, row in zip(call.row_prompts, rows)
            if call.has_captures
        ]
        return GenerateOutput.of(rows, call.config, call.padded_prompts, self.tokenizer, captures or None)

    def stream(
        self, prompt: Any, sampling_config: SamplingConfig | None = None, adapter: Choice = None, **fields: Any
    ) -> Iterator[str]:
        """Yields the text of one prompt's continuation in pieces; joined, they equal its text in `generate`'s output.
        Generation does not wait for the caller to take a piece. Closing the iterator ends it."""
        self.adapters.check(adapter)
        call = self._prepare_stream("stream", prompt, sampling_config, **fields)
        return Stream(lambda: self._request(call, adapter))

    async def astream(
        self, prompt: Any, sampling_config: SamplingConfig | None = None, adapter: Choice = None, **fields: Any
    ) -> AsyncIterator[str]:
        """Yields the pieces of `stream` without blocking the event loop: the prompt is read on another thread. Leaving
        the iteration ends the generation."""
        call = await asyncio.to_thread(self._prepare_stream, "astream", prompt, sampling_config, **fields)
        request = self._request(call, adapter)
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
        adapter: Choice = None,
        **fields: Any,
    ) -> Request:
        """Queues one prompt and returns at once; see `LLMModel.add_request`."""
        call = self.prepare_with_suffix(prompt, sampling_config, **fields).require_one_prompt("add_request")
        return self._request(call, adapter, checked_priority(priority), checked_salt(cache_salt))

    def chat(
        self,
        messages: str | list[Message],
        sampling_config: SamplingConfig | None = None,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        tool_format: str | None = None,
        template_variables: dict[str, Any] | None = None,
        adapter: Choice = None,
        **fields: Any,
    ) -> ChatAnswer:
        """Returns the answer to a conversation. Generation begins when its first event is requested; see
        `LLMModel.chat`."""
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer with a chat template, and this model has none")
        format = None if tool_format is None else format_named(tool_format)
        template = ChatTemplate(self.tokenizer, format, self.encoder)
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
        prompt = self.encoder.encode(turn.prompt, turn.media, self.tokenizer, add_special_tokens=False)
        return self.answer(turn, prompt, config, adapter)

    def answer(
        self, turn: Turn, prompt: list[int] | Prompt, sampling_config: SamplingConfig, adapter: Choice = None
    ) -> ChatAnswer:
        """Returns the answer of a turn, given its prompt in tokens, or with its media. The turn's grammar
        replaces the config's. Raises ValueError for settings that conversations do not support."""
        config = sampling_config.copy()
        config.take_grammar()
        config.grammar = turn.grammar
        call = self.prepare_for_generate(prompt, config, turn).require_one_prompt("chat", one_row=True)
        if call.config.step_callback is not None:
            raise ValueError(
                "chat reads tool calls and reasoning from the text, which step_callback may change; use generate"
            )
        if call.config.token_healing:
            raise ValueError("token_healing has no effect in chat, where the template ends the prompt; leave it out")
        self.adapters.check(adapter)
        return ChatAnswer(lambda: self._request(call, adapter), turn)

    def transcribe(
        self, audio: Any, language: str | None = None, prompt: str = "", sampling_config: SamplingConfig | None = None
    ) -> Transcript:
        """Returns the words of a clip; see `LLMModel.transcribe`."""
        check_transcribes(self.encoder)
        reader = TranscriptReader(language_name(language))
        config = SamplingConfig() if sampling_config is None else sampling_config.copy()
        if not config.explicit_fields & {"do_sample", "temperature"}:
            config.do_sample = False
        if not (config.has_length or self.defaults.has_length):
            config.max_length = self.engine.max_length
        text = transcription_prompt(reader.language, prompt)
        tokens = self.encoder.encode(text, [MediaPart("audio", audio)], self.tokenizer, add_special_tokens=False)
        prepare = lambda: self.prepare_for_generate(tokens, config).require_one_prompt("transcribe", one_row=True)
        output = self._generate(prepare, None, None)
        text = reader.read(output.texts[0], is_last=True)
        return Transcript(text, reader.language, output.finish_reasons[0], output.metrics)

    def decide(
        self,
        state: Any,
        questions: dict[str, Any],
        decision_config: DecisionConfig | str | Path | None = None,
        adapter: Choice = None,
    ) -> dict[str, dict[str, Any]]:
        """Answers questions about a state; see `LLMModel.decide`."""
        maker = self.decider.prompts(decision_config)
        prompts = maker.read(state, questions)
        with self.adapters.using(adapter) as key:
            logits = LabelLogits(self.driver, places_of(prompts), adapter=key).result()
        return answers_of(prompts, logits, maker.config)

    def session(self, adapter: Choice = None) -> Session:
        """Returns an empty session; see `LLMModel.session`."""
        with self.adapters.using(adapter) as key:
            return Session(self.driver, adapter=key, read_media=self._read_appended)

    def load_session(self, path: str | Path, adapter: Choice = None) -> Session:
        """Returns the session in a file; see `LLMModel.load_session`."""
        with self.adapters.using(adapter) as key:
            return Session.load(self.driver, path, adapter=key, read_media=self._read_appended)[0]

    def _read_appended(self, inputs: Mapping[str, Any], is_first: bool) -> Prompts:
        """Implements `MediaReader`. Raises what `read_prompts` raises."""
        model = self.engine.model
        if is_media_prompt(inputs):
            inputs = encode(*read_media_prompt(inputs, "append"), self.tokenizer, self.encoder, is_first)
        names = model.towers, model_name(model)
        return read_prompts(inputs, self.tokenizer, model.vocab_size, *names, self.encoder)

    def _prepare_stream(
        self, caller: str, prompt: Any, sampling_config: SamplingConfig | None, **fields: Any
    ) -> PreparedCall:
        if self.tokenizer is None:
            raise ValueError(
                f"{caller} returns text, and this model has no tokenizer; use generate with a CallbackStreamer"
            )
        return self.prepare_with_suffix(prompt, sampling_config, **fields).require_one_prompt(caller, one_row=True)

    def _request(
        self, call: PreparedCall, adapter: Choice = None, priority: int = 0, cache_salt: str | None = None
    ) -> Request:
        with self.adapters.using(adapter) as key:
            sequences = self.sequences_of(dataclasses.replace(call, adapter=key), 0)
            for sequence in sequences:
                sequence.priority, sequence.cache_salt = priority, cache_salt
            return Request(self.driver, sequences, lambda rows: self._output(call, rows))


def _end_quietly(streamer: Any) -> None:
    """Ends the streamer after a failed generation, so that its readers stop waiting. An error of `end` is only logged,
    because the generation's own error is raised."""
    try:
        if streamer is not None:
            streamer.end()
    except Exception as error:
        logger.debug("the streamer's end() failed after a failed generation: %s", error)
