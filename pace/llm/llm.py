"""The face: a checkpoint that generates, streams, keeps sessions and scores. No logic of its own."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.llm import loading
from pace.llm.clients.chat import ChatAnswer, ChatOutput
from pace.llm.clients.requests import Request
from pace.llm.clients.scoring import Scores, score, score_from
from pace.llm.clients.session import Session
from pace.llm.configs import KVCacheType, SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.inputs import read_prompts
from pace.llm.loading import LoadOptions
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.operators import OperatorConfig, OperatorReport
from pace.llm.outputs import GenerateOutput, MemoryReport
from pace.llm.speculation.configs import SpecConfig
from pace.memory import resident_bytes


class LLMModel:
    """A Hugging Face checkpoint or a GGUF file, loaded as it is on disk.

    Safe to use from several threads, whose generations then share steps. `close`, or a `with` block, frees the weights.
    """

    def __init__(
        self,
        model_name_or_path: str | Path,
        tokenizer_name_or_path: str | Path | None = None,
        dtype: torch.dtype | str = torch.bfloat16,
        kv_cache_type: KVCacheType | str = "paged",
        spec_config: SpecConfig | None = None,
        quantization: Any = None,
        backend: str | OperatorConfig = "native",
        num_threads: int | None = None,
        max_seq_len: int | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        progress: bool = True,
        kv_cache_bytes: int | str | None = None,
        pin_threads: bool | None = None,
        bmc_rows: int | None = None,
        prefix_cache_bytes: int | str = "auto",
        kv_cache_dtype: torch.dtype | str = "auto",
        load_in_4bit: bool = False,
        load_in_8bit: bool = False,
        weights: str = "memory",
        weights_cache: str | Path | bool | None = None,
        **other_names: Any,
    ) -> None:
        """Loads a local directory, a GGUF file or a Hub id. `help(LoadOptions)` says what each argument does, and takes
        the same.

        What to load: `model_name_or_path`, `tokenizer_name_or_path`; from the Hub `revision`, `token`, `cache_dir`,
        `local_files_only`.
        How weights are held: `dtype`, or `quantization` ("int8", "int4", "nf4", ...; `load_in_4bit`, `load_in_8bit`);
        `weights` ("mapped" for experts in a file, larger than memory) and `weights_cache`.
        Keys and values: `kv_cache_bytes` (such as "2GiB"), `kv_cache_dtype`, `kv_cache_type`, `bmc_rows`,
        `prefix_cache_bytes`, and `max_seq_len`, the longest a sequence may get.
        How it runs: `backend`, `num_threads`, `pin_threads`, and `spec_config` for speculative decoding. `progress`
        shows bars, on a terminal or in a notebook.
        `other_names`: names of other tools for the same, such as `torch_dtype`.

        Raises: NotImplementedError for architectures that are not there yet; FileNotFoundError, PermissionError,
        ValueError, TypeError, MemoryError for what cannot be loaded so, as `pace.llm.loading.open`.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "other_names")}
        options = LoadOptions.read(given, other_names)
        loaded = loading.open(options)
        self._name = str(options.model_name_or_path)
        self.tokenizer = loaded.tokenizer
        self._model: BaseModelForCausalLM | None = loaded.model
        self._generator: Generator | None = Generator(loaded.engine, loaded.tokenizer, loaded.defaults, progress)
        self.config = self._model.config
        """The model's config, read from config.json, with that architecture's defaults."""

    @classmethod
    def from_pretrained(cls, model_name_or_path: str | Path, **options: Any) -> LLMModel:
        """The same as `LLMModel(...)`, by the name that transformers has for it."""
        return cls(model_name_or_path, **options)

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Any,
        sampling_config: SamplingConfig | None = None,
        streamer: Any = None,
        cancel: threading.Event | None = None,
        suffix: str | list[str] | None = None,
        **fields: Any,
    ) -> GenerateOutput:
        """Continues one prompt or several.

        `inputs`: a string, a list of strings, token ids (a list, or a list of lists), an integer tensor `[S]` or
        `[B, S]`, or a tokenizer's output with its attention mask, padded on either side.
        `sampling_config`: beats the checkpoint's generation_config.json field by field, which beats the defaults. It may
        be a GenerationConfig of transformers.
        `fields`: of a SamplingConfig, which beat those of `sampling_config`: `generate(prompt, max_new_tokens=8)`.
        `stream`, `astream`, `add_request` and `chat` take them, too.
        `streamer`: receives each token as it comes; ours, or transformers' TextStreamer and TextIteratorStreamer. A
        `put` that returns False ends its row.
        `suffix`: what follows the text to be written, for models that fill gaps (docs/decoding.md); one for all prompts,
        or one each. `stream`, `astream` and `add_request` take it, too.
        `cancel`: an event that another thread sets to end the call after the step under way. Rows that had not ended
        come back as far as they are, as "cancelled".

        Any number of prompts: the engine has twice as many as run at once, the others follow. Several show a bar on a
        terminal, where the model was loaded with `progress` and there is no streamer.

        Raises ValueError or TypeError, before any work, for inputs or a config that cannot be served.
        After an exception or Ctrl-C the model is usable, and what other threads generate goes on.
        """
        return self.generator.generate(inputs, sampling_config, streamer, cancel, suffix=suffix, **fields)

    def stream(self, prompt: Any, sampling_config: SamplingConfig | None = None, **fields: Any) -> Iterator[str]:
        """Yields the continuation of one prompt in pieces of text, which joined are its text in `generate`'s output. It
        goes on whether or not the next piece is asked for; closing the iterator ends it."""
        return self.generator.stream(prompt, sampling_config, **fields)

    def astream(self, prompt: Any, sampling_config: SamplingConfig | None = None, **fields: Any) -> AsyncIterator[str]:
        """The pieces of `stream`, for a task of an event loop: `async for piece in model.astream(...)`. The loop goes on
        while the model computes. Closing the iterator, or cancelling its task, ends the generation after the step under
        way. Raises what `stream` does, with the first piece that is asked for."""
        return self.generator.astream(prompt, sampling_config, **fields)

    def add_request(
        self,
        prompt: Any,
        sampling_config: SamplingConfig | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        **fields: Any,
    ) -> Request:
        """Queues one prompt, from any thread, and returns at once: it joins whatever else is generated, and needs nobody
        to wait for it. Its tokens are those of `generate`; `num_return_sequences` makes several continuations.

        `priority`: from -100 to 100, 0 for all of `generate`, `stream` and sessions. Each unit is a head start of 64
        requests: no request is passed by more than that of those that come later, so that none starves
        (docs/decoding.md).
        `cache_salt`: up to 128 characters. The request shares cached prompts with those of the same salt alone, so that
        nobody learns from the time to the first token what others have asked.

        Raises what `generate` does, and ValueError for several prompts and for beams.
        """
        return self.generator.add_request(prompt, sampling_config, priority, cache_salt, **fields)

    def chat(
        self,
        messages: str | list[Any],
        sampling_config: SamplingConfig | None = None,
        *,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        response_format: dict[str, Any] | None = None,
        stream: bool = False,
        tool_format: str | None = None,
        template_variables: dict[str, Any] | None = None,
        **fields: Any,
    ) -> ChatOutput | ChatAnswer:
        """Answers a conversation, by the model's chat template. Where neither `sampling_config` nor the checkpoint says
        how, the answer is drawn with temperature 0.7 and top_p 0.9, and goes on to its end or that of the context.

        `messages`: dicts with `role` and `content`, calls and results of tools among them, as OpenAI's API has them; or
        one question.
        `tools`: what the model may call, as OpenAI's API describes functions, or `pace.llm.chat.Tool`. A call that it
        begins names one of them, and its arguments follow the schema (docs/structured.md).
        `tool_choice`: "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`. With the last two
        the answer is a call, whatever the weights.
        `parallel_tool_calls`: False for one call at most.
        `response_format`: what the text of the answer must be, as in `SamplingConfig`.
        `stream`: False for a ChatOutput; True for a ChatAnswer, which gives events as they come.
        `tool_format`: the name of a format of calls, where the one that the template shows is not the model's.
        `template_variables`: what the template may look at, such as `{"enable_thinking": False}`.

        Raises ValueError or TypeError, before any work, for what cannot be served.
        """
        config = SamplingConfig.read(sampling_config, fields)
        if response_format is not None:
            config.response_format = response_format
        answer = self.generator.chat(
            messages, config, tools, tool_choice, parallel_tool_calls, tool_format, template_variables
        )
        return answer if stream else answer.output

    def session(self) -> Session:
        """An empty sequence to append tokens to, look at logits of, take tokens back from, and fork."""
        return Session(self.generator.driver)

    def score(self, texts_or_ids: Any) -> list[Tensor]:
        """For each sequence of T tokens (inputs as in `generate`) fp32 `[T - 1]`: entry i is the log-probability of token
        i + 1 after tokens 0 .. i. The first token has none."""
        generator = self.generator
        return score(
            generator.driver, read_prompts(texts_or_ids, self.tokenizer, generator.engine.model.vocab_size).rows
        )

    def score_from(self, texts_or_ids: Any, starts: list[int]) -> list[Scores]:
        """For each sequence the scores of its tokens from `starts[i]` on: their log-probabilities, and whether greedy
        decoding would have taken them. What stands before, and begins a text of a call before, is not computed again.

        Raises ValueError for a start below 1, and what `score` does."""
        generator = self.generator
        rows = read_prompts(texts_or_ids, self.tokenizer, generator.engine.model.vocab_size).rows
        return score_from(generator.driver, rows, starts)

    # -- about the model -----------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the checkpoint; None where it has none."""
        return self.tokenizer

    def get_config(self) -> Any:
        """The model's config."""
        return self.config

    @property
    def held_as(self) -> str:
        """How most of its weights are held: a dtype, a format, or the name that a GGUF file gives its own, as "Q4_K_M"."""
        _ = self.generator  # raises once it is closed
        return self._model.held_as

    @property
    def max_seq_len(self) -> int:
        """Tokens that a sequence, prompt included, may get: what the model was loaded with, its config allows, or its
        cache holds if that is less."""
        return self.generator.engine.max_length

    @property
    def generator(self) -> Generator:
        """What is behind this face, for programs that make turns or sequences of their own, such as `pace.integrations`.
        Its engine is to be looked at only. Raises ValueError once the model is closed."""
        generator = self._generator
        if generator is None:
            raise ValueError("this model is closed; load it again with LLMModel(...)")
        return generator

    def memory_report(self) -> MemoryReport:
        """Bytes of the weights by part, of the key/value cache (a draft model's included), and of the process; and how
        these weights compare with as many of float32 and bfloat16."""
        engine = self.generator.engine
        cache, drafts = engine.cache, engine.drafter.memory()
        return MemoryReport(
            weights=self._model.resident_bytes() | drafts.weights,
            weight_counts=self._model.weight_counts() | drafts.weight_counts,
            cache_used=cache.used_bytes + drafts.cache_used,
            cache_kept=cache.prefix_bytes,
            cache_touched=cache.touched_bytes + drafts.cache_touched,
            cache_budget=cache.budget_bytes + drafts.cache_budget,
            cache_tokens=cache.capacity,
            cache_token_bytes=cache.token_bytes,
            process=resident_bytes(),
            mapped=self._model.mapped_nbytes,
        )

    def operator_report(self) -> OperatorReport:
        """Which implementation of each operator of the forward pass ran since the model was loaded, how often, and, op
        by op, how long."""
        return self.generator.engine.model.operator_report()

    def close(self) -> None:
        """Frees weights and cache, after the step under way. What other threads wait for raises ValueError, and from
        then on so does every method but this."""
        generator = self._generator
        if generator is not None:
            generator.driver.close()  # first: it may refuse
        self._generator = self._model = None

    def __repr__(self) -> str:
        if self._generator is None:
            return f"LLMModel({self._name!r}, closed)"
        model = self._model
        millions = sum(model.weight_counts().values()) / 1e6
        return f"LLMModel({self._name!r}: {type(model).__name__}, {millions:,.0f} million weights, {model.held_as}, up to {self.max_seq_len} tokens)"

    def __enter__(self) -> LLMModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        return self.generator.engine
