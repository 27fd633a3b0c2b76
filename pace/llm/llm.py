"""`LLMModel`: loads a checkpoint, generates, streams, keeps sessions and scores. Every method delegates."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.llm.clients.adapters import Choice, LoadedAdapter
from pace.llm.clients.chat import ChatAnswer, ChatOutput
from pace.llm.clients.requests import Request
from pace.llm.clients.scoring import Scores, score, score_from
from pace.llm.clients.session import Session
from pace.llm.configs import KVCacheType, SamplingConfig
from pace.llm.decisions.config import DecisionConfig
from pace.llm.embedding_model import EmbeddingModel
from pace.llm.encoding.open import causal_parts
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.inputs import read_prompts
from pace.llm.loading import load
from pace.llm.loading.options import LoadOptions
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.head_cost import head_cost
from pace.llm.operators import OperatorConfig, OperatorReport
from pace.llm.outputs import GenerateOutput, MemoryReport, Transcript
from pace.llm.processors.processor import Processors
from pace.llm.speculation.configs import SpecConfig
from pace.memory import resident_bytes


class LLMModel:
    """A Hugging Face checkpoint or a GGUF file, loaded as it is on disk.

    Thread-safe: generations of several threads share steps. `close`, or a `with` block, frees the weights.
    """

    def __init__(
        self,
        model_name_or_path: str | Path,
        tokenizer_name_or_path: str | Path | None = None,
        dtype: torch.dtype | str = torch.bfloat16,
        kv_cache_type: KVCacheType | str = "paged",
        spec_config: SpecConfig | str | None = None,
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
        media: bool = True,
        max_image_tokens: int | None = None,
        media_cache_bytes: int | str = "256MiB",
        mmproj: str | Path | None = None,
        adapter: str | Path | None = None,
        merge: bool = False,
        max_adapters: int = 8,
        max_lora_rank: int = 64,
        **other_names: Any,
    ) -> None:
        """Loads a local directory, a GGUF file or a Hub id. `help(LoadOptions)` describes each argument.

        What to load: `model_name_or_path`, `tokenizer_name_or_path`; from the Hub `revision`, `token`, `cache_dir`,
        `local_files_only`. Towers for images and sound: `media` (False leaves them out), `max_image_tokens`, and
        `mmproj`, the file with those of a GGUF file.
        How weights are stored: `dtype`, or `quantization` ("int8", "int4", "nf4", ...; `load_in_4bit`, `load_in_8bit`).
        Where: `weights` ("mapped" keeps experts in a file, which may be larger than memory) and `weights_cache`.
        Keys and values: `kv_cache_bytes` (such as "2GiB"), `kv_cache_dtype`, `kv_cache_type`, `bmc_rows`,
        `prefix_cache_bytes`, and `max_seq_len`, the maximum length of a sequence. Rows of images: `media_cache_bytes`.
        LoRA: `adapter` and `merge`, to merge one; `max_adapters` and `max_lora_rank`, limits of `load_adapter`.
        How it runs: `backend`, `num_threads`, `pin_threads`, and `spec_config` for speculative decoding. `progress`
        shows bars, on a terminal or in a notebook.
        `other_names`: names of other tools for the same arguments, such as `torch_dtype`.

        Raises: NotImplementedError for unsupported architectures; FileNotFoundError, PermissionError, ValueError,
        TypeError, MemoryError for a model that cannot be loaded this way, as `pace.llm.loading.load.open_model`.
        """
        given = {name: value for name, value in locals().items() if name not in ("self", "other_names")}
        options = LoadOptions.read(given, other_names)
        self._hold(options, load.open_model(options))

    def _hold(self, options: LoadOptions, loaded: load.Loaded) -> None:
        self._name = str(options.model_name_or_path)
        self.tokenizer = loaded.tokenizer
        self._model: BaseModelForCausalLM | None = loaded.model
        self._generator: Generator | None = Generator(
            loaded.engine, loaded.tokenizer, loaded.defaults, options.progress, loaded.encoder, loaded.checkpoint
        )
        self._checkpoint = loaded.checkpoint
        self._embedding: EmbeddingModel | None = None
        self.config = self._model.config
        """The model's config: config.json, completed with the architecture's defaults."""

    @classmethod
    def from_pretrained(cls, model_name_or_path: str | Path, **options: Any) -> LLMModel:
        """The same as `LLMModel(...)`, under transformers' name."""
        return cls(model_name_or_path, **options)

    @classmethod
    def _open(cls, options: LoadOptions, check_tokenizer: Callable[[Any], object]) -> LLMModel:
        """Loads a model for the command line; `check_tokenizer` as in `load.open_model`."""
        model = cls.__new__(cls)
        model._hold(options, load.open_model(options, check_tokenizer))
        return model

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Any = None,
        sampling_config: SamplingConfig | None = None,
        streamer: Any = None,
        cancel: threading.Event | None = None,
        suffix: str | list[str] | None = None,
        adapter: Choice = None,
        **fields: Any,
    ) -> GenerateOutput:
        """Continues one prompt or several.

        `inputs`: a string, a list of strings, token ids (a list, or a list of lists), or an integer tensor `[S]` or
        `[B, S]`. Or a tokenizer's output with its attention mask, padded on either side. Or the output of a processor
        of transformers, with images: as one argument, or as `generate(**processor(...))`.
        A prompt with media is `{"prompt": text, "images": [...], "audio": [...]}`: its text has one placeholder for
        each, in order (docs/media.md). Images are PIL images, paths or bytes; sound is paths, bytes or samples.
        `sampling_config`: overrides the checkpoint's generation_config.json field by field, which overrides the
        defaults. May be a transformers GenerationConfig.
        `fields`: fields of a SamplingConfig, which override `sampling_config`: `generate(prompt, max_new_tokens=8)`.
        `stream`, `astream`, `add_request` and `chat` take them, too.
        `streamer`: receives each token when it is generated: one of pace's streamers, or transformers' TextStreamer or
        TextIteratorStreamer. If its `put` returns False, the row ends.
        `suffix`: the text after a gap that the model fills (docs/decoding.md); one for all prompts, or one for each.
        `stream`, `astream` and `add_request` take it, too.
        `adapter`: the name of a loaded adapter for all prompts of the call, or names with weights such as
        `[("a", 0.5), ("b", 1.0)]`; None for the base model. `stream`, `astream`, `add_request`, `chat`, `session` and
        `decide` take it, too.
        `cancel`: an event that another thread sets to end the call after the current step. Unfinished rows are
        returned as they are, with finish reason "cancelled".

        Takes any number of prompts: the engine holds twice the number that it runs at once, the others follow. For
        several prompts without a streamer, a bar is shown on a terminal if the model was loaded with `progress`.

        Raises ValueError or TypeError for invalid inputs or an invalid config, before any work is done.
        After an exception or Ctrl-C the model is usable, and generations of other threads continue.
        """
        return self.generator.generate(inputs, sampling_config, streamer, cancel, adapter, suffix=suffix, **fields)

    def stream(
        self, prompt: Any, sampling_config: SamplingConfig | None = None, adapter: Choice = None, **fields: Any
    ) -> Iterator[str]:
        """Yields the continuation of one prompt in pieces of text; joined, they equal its text in `generate`'s output.
        Generation does not wait for the caller to take a piece. Closing the iterator ends it."""
        return self.generator.stream(prompt, sampling_config, adapter, **fields)

    def astream(
        self, prompt: Any, sampling_config: SamplingConfig | None = None, adapter: Choice = None, **fields: Any
    ) -> AsyncIterator[str]:
        """Yields the pieces of `stream` without blocking the event loop: `async for piece in model.astream(...)`.
        Closing the iterator, or cancelling its task, ends the generation after the current step. Raises the errors of
        `stream` when the first piece is requested."""
        return self.generator.astream(prompt, sampling_config, adapter, **fields)

    def add_request(
        self,
        prompt: Any,
        sampling_config: SamplingConfig | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: Choice = None,
        **fields: Any,
    ) -> Request:
        """Queues one prompt, from any thread, and returns at once. It runs in the same steps as all other requests,
        and no thread has to wait for it. Its tokens are the same as from `generate`. `num_return_sequences` makes
        several continuations.

        `priority`: from -100 to 100; `generate`, `stream` and sessions have 0. Each unit moves the request ahead of
        64 earlier ones. A request is therefore overtaken by at most 64 later requests per unit of difference, so that
        none starves (docs/decoding.md).
        `cache_salt`: up to 128 characters. The request shares cached prompts only with requests of the same salt. The
        time to the first token then does not reveal the prompts of other clients.

        Raises the errors of `generate`, and ValueError for several prompts and for beam search.
        """
        return self.generator.add_request(prompt, sampling_config, priority, cache_salt, adapter, **fields)

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
        adapter: Choice = None,
        **fields: Any,
    ) -> ChatOutput | ChatAnswer:
        """Answers a conversation, using the model's chat template. If neither `sampling_config` nor the checkpoint
        sets how to sample, the answer is sampled with temperature 0.7 and top_p 0.9. Its length is limited only by the
        context.

        `messages`: one question, or dicts with `role` and `content`, including tool calls and their results, as in
        OpenAI's API. Content with media is a list of parts: `{"type": "text", "text": ...}`,
        `{"type": "image", "image": ..., "detail": "auto"}` and `{"type": "audio", "audio": ...}`.
        `tools`: functions that the model may call, in the form of OpenAI's API, or `pace.llm.chat.Tool`. A call always
        names one of them, and its arguments follow the schema (docs/structured.md).
        `tool_choice`: "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`. The last two
        force the answer to be a call.
        `parallel_tool_calls`: False for one call at most.
        `response_format`: the format of the answer's text, as in `SamplingConfig`.
        `stream`: False returns a ChatOutput; True returns a ChatAnswer, which yields events as they come.
        `tool_format`: the name of a format of tool calls, if the model's own differs from the one in the template.
        `template_variables`: variables of the template, such as `{"enable_thinking": False}`.

        Raises ValueError or TypeError for an invalid request, before any work is done.
        """
        config = SamplingConfig.read(sampling_config, fields)
        if response_format is not None:
            config.response_format = response_format
        answer = self.generator.chat(
            messages, config, tools, tool_choice, parallel_tool_calls, tool_format, template_variables, adapter
        )
        return answer if stream else answer.output

    def transcribe(
        self,
        audio: Any,
        language: str | None = None,
        prompt: str = "",
        sampling_config: SamplingConfig | None = None,
        **fields: Any,
    ) -> Transcript:
        """Returns the words of a clip, from a model such as Qwen3-ASR. Decoding is greedy, unless a temperature or
        `do_sample` is given.

        `audio`: a path, bytes, samples at 16 kHz, or a pair of samples and their rate.
        `language`: its name or code, such as "English" or "en"; None lets the model find it.
        `prompt`: a text with words that are likely to occur.

        Raises ValueError or TypeError for invalid arguments, and for a model that does not transcribe.
        """
        return self.generator.transcribe(audio, language, prompt, SamplingConfig.read(sampling_config, fields))

    def decide(
        self,
        state: Any,
        questions: dict[str, Any],
        decision_config: DecisionConfig | str | Path | None = None,
        adapter: Choice = None,
    ) -> dict[str, dict[str, Any]]:
        """Answers questions about a state, each with the probability of every allowed answer. Nothing is generated: the
        logits of the answers' labels are read after one forward pass. The state is computed once for all questions
        (docs/decisions.md).

        `state`: a text, or a dict or list, which the model reads as JSON.
        `questions`: name -> `{"type", "instructions", "criteria"}`. The type "noul" asks whether something is true. It
        may have criteria for "true" and "false". "choice" asks for one option of `{option: description or None}`, and
        "score" for one level of a list of descriptions, the lowest first.
        `decision_config`: settings, or the path of a decision.json; None for those of the checkpoint.

        Returns name -> `{"type": "noul", "noul": probability}`, `{"type": "choice", "choice", "confidence",
        "probabilities"}` or `{"type": "score", "score", "legend", "confidence", "probabilities"}`.

        Raises ValueError for invalid questions, more options than labels, and labels that are not different single
        tokens. Also for a model without a chat template, and for prompts that are too long."""
        return self.generator.decide(state, questions, decision_config, adapter)

    def load_adapter(self, path: str | Path, name: str | None = None) -> LoadedAdapter:
        """Loads a LoRA adapter next to the model, while generations go on: a directory that PEFT has saved, or a GGUF
        file. Calls name it in `adapter=`; all others use the base model, with the bits it has without adapters
        (docs/adapters.md). Without `name`, the last part of the path is its name, for a file without `.gguf`.

        Raises ValueError for a name that is taken, damaged or unknown contents, and values that are not finite. The
        same for modules and shapes that the model does not have, and beyond `max_adapters` and `max_lora_rank`. Raises
        NotImplementedError for what is not implemented, such as DoRA; FileNotFoundError and PermissionError."""
        return self.generator.adapters.load(path, name)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter. Calls that use it go on, and its memory is freed when the last of them ends. The name is
        free at once. Raises ValueError for an unknown name."""
        self.generator.adapters.unload(name)

    @property
    def adapters(self) -> list[LoadedAdapter]:
        """The loaded adapters, in the order in which they were loaded."""
        return self.generator.adapters.loaded

    def session(self, adapter: Choice = None) -> Session:
        """Returns an empty sequence: append tokens, read logits, remove tokens, fork it. `adapter` as in
        `generate`."""
        return self.generator.session(adapter)

    def load_session(self, path: str | Path, adapter: Choice = None) -> Session:
        """Returns the session that `Session.save` wrote to a file, with its tokens and what the cache held of them.
        Later logits have the same bits as if its tokens had been computed here. Other requests that begin with the same
        tokens reuse them, too (docs/cache.md).

        Raises FileNotFoundError if there is no file. Raises ValueError, which names the file and the reason, for a file
        that is damaged or truncated. Also for one of another checkpoint, dtype, cache dtype, cache type, quantisation,
        backend, instruction set or version of pace. The same for other adapters, and more tokens than
        `max_seq_len`."""
        return self.generator.load_session(path, adapter)

    def score(self, texts_or_ids: Any) -> list[Tensor]:
        """Returns fp32 `[T - 1]` for each sequence of T tokens (inputs as in `generate`). Entry i is the
        log-probability of token i + 1 after tokens 0 .. i. The first token has none."""
        return score(self.generator.driver, self._scored(texts_or_ids))

    def score_from(self, texts_or_ids: Any, starts: list[int]) -> list[Scores]:
        """Scores the tokens of each sequence from `starts[i]` on: their log-probabilities, and whether greedy decoding
        would have taken them. A prefix shared with a text of an earlier call is not computed again.

        Raises ValueError for a start below 1, and the errors of `score`."""
        return score_from(self.generator.driver, self._scored(texts_or_ids), starts)

    # -- vectors and scores of texts -----------------------------------------------------------------------------------

    def embed(
        self,
        texts: str | list[str],
        prompt: str | None = None,
        dimensions: int | None = None,
        normalise: bool | None = None,
        truncate: bool = True,
    ) -> Tensor:
        """Returns vectors of texts, float32 `[N, D]`, as `EmbeddingModel.embed`: the row of the last token, unless the
        checkpoint says otherwise. They run in the same steps as generations."""
        return self.embedding_model.embed(texts, prompt, dimensions, normalise, truncate)

    def rank(
        self, query: str, documents: list[str], truncate: bool = False, instruction: str | None = None
    ) -> list[tuple[int, float]]:
        """Returns (index of the document, score), best first, as `EmbeddingModel.rank`. For Qwen3 models; the query is
        computed once for all documents. Raises ValueError for other models."""
        return self.embedding_model.rank(query, documents, truncate, instruction)

    @property
    def embedding_model(self) -> EmbeddingModel:
        """This model as an `EmbeddingModel`. The two share the engine; close this one. Raises the errors of settings of
        sentence-transformers in the checkpoint."""
        generator = self.generator
        if self._embedding is None:
            parts = causal_parts(generator.driver, self._model, self.tokenizer, self._checkpoint)
            self._embedding = EmbeddingModel._of(self._name, parts)
        return self._embedding

    def _scored(self, texts_or_ids: Any) -> list[list[int]]:
        generator = self.generator
        vocab_size = generator.engine.model.vocab_size
        prompts = read_prompts(texts_or_ids, self.tokenizer, vocab_size, encoder=generator.encoder)
        if prompts.media:
            raise ValueError("only texts and token ids are scored, without images and sound")
        return prompts.rows

    # -- about the model -----------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """The transformers tokenizer of the checkpoint; None if it has none."""
        return self.tokenizer

    def get_config(self) -> Any:
        """The model's config."""
        return self.config

    @property
    def held_as(self) -> str:
        """The format of most of its weights: a dtype, a quantisation format, or a GGUF file's name for its own, such as
        "Q4_K_M"."""
        _ = self.generator  # raises once it is closed
        return self._model.storage_name

    @property
    def max_seq_len(self) -> int:
        """Maximum number of tokens in a sequence, prompt included: the smallest of the loading option, the config's
        limit and the cache's capacity."""
        return self.generator.engine.max_length

    @property
    def processor(self) -> Processors:
        """Prepares media for the model: `model.processor(images=[...])` and `(audio=[...])` return numpy arrays, with
        the names, shapes and bits of the checkpoint's transformers processor."""
        return self.generator.encoder.all

    @property
    def generator(self) -> Generator:
        """The generator behind this class, for code that makes turns or sequences, such as `pace.integrations`. Treat
        its engine as read-only. Raises ValueError once the model is closed."""
        generator = self._generator
        if generator is None:
            raise ValueError("this model is closed; load it again with LLMModel(...)")
        return generator

    def memory_report(self) -> MemoryReport:
        """Bytes of the weights by part, of the cache (a draft model's included), and of the process. Also counts
        weights, to compare with their size in float32 and bfloat16."""
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
            cache_slot_bytes=cache.slot_bytes,
            cache_slots=cache.states.pool.num_blocks,
            process=resident_bytes(),
            mapped=self._model.mapped_nbytes + self._model.file_nbytes,
            head=head_cost(self._model, self._model.ops, self._model.dtype),
        )

    def operator_report(self) -> OperatorReport:
        """The implementation of each operator of the forward pass that ran since the model was loaded, and the number
        of calls. Op by op, also their time."""
        return self.generator.engine.model.operator_report()

    def close(self) -> None:
        """Frees weights and cache after the current step. Calls that other threads wait for raise ValueError, and so
        does every later method but this one."""
        generator = self._generator
        if generator is not None:
            generator.driver.close()  # first: it may refuse
        self._generator = self._model = self._embedding = None

    def __repr__(self) -> str:
        if self._generator is None:
            return f"LLMModel({self._name!r}, closed)"
        model = self._model
        millions = sum(model.weight_counts().values()) / 1e6
        return (
            f"LLMModel({self._name!r}: {type(model).__name__}, {millions:,.0f} million weights, {model.storage_name}, "
            f"up to {self.max_seq_len} tokens)"
        )

    def __enter__(self) -> LLMModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _engine(self) -> Engine:
        return self.generator.engine
