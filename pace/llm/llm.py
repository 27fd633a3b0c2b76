"""The face: a checkpoint that generates, streams, keeps sessions and scores. No logic of its own."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE
from pace.llm.cache.manager import CacheManager, check_cache_options
from pace.llm.clients.requests import Request
from pace.llm.clients.session import Session, score
from pace.llm.configs import KVCacheType, SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.inputs import read_prompts
from pace.llm.models.hf_utils import find_checkpoint, load_tokenizer, read_config_json, read_generation_config
from pace.llm.models.model_utils import (
    fill_model,
    make_model,
    parse_dtype,
    parse_kv_cache_dtype,
    select_ops,
    use_threads,
)
from pace.llm.operators import OperatorConfig, OperatorReport
from pace.llm.outputs import GenerateOutput, MemoryReport
from pace.llm.runners import make_runner
from pace.llm.speculation.build import Speculation, check_spec_config
from pace.llm.speculation.configs import SpecConfig
from pace.memory import available_memory_bytes, format_bytes, parse_bytes
from pace.naming import argument
from pace.quant import read_quantization

logger = logging.getLogger("pace")

CACHE_SHARE = 0.5
"""Of the memory available once the weights are loaded, the part that keys and values may grow into."""


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
    ) -> None:
        """Loads a local directory, a GGUF file or a Hub id (`revision`, `token`, `cache_dir`, `local_files_only` say
        how it is found).

        `tokenizer_name_or_path`: where the tokenizer is, if not with the model. A model without one takes token ids.
        `dtype`: of the weights (bfloat16, float16, float32, or their names), whatever the checkpoint's own.
        `kv_cache_dtype`: of keys and values; "auto" for `dtype`, or a float dtype, or "int8": one byte for each
        element, and a scale for each head and token. That is about half of bfloat16's memory, and moves logits two to
        four times as far as a cache in bfloat16 does (docs/numerics.md); what is promised of bits holds for it as well.
        `quantization`: a format in which a checkpoint of floats is held, for less memory and faster decoding at some
        loss: "int8", "int4", "nf4", "fp4", "mxfp4", "mxfp8" or "fp8"; a QuantizationConfig, or a dict of its arguments,
        for options and choices by module; or transformers' BitsAndBytesConfig. docs/quantization.md compares them. What
        is promised of bits holds for each. `load_in_4bit` and `load_in_8bit` are "nf4" and "int8".
        `spec_config`: where drafts come from, for faster decoding of the same text (docs/decoding.md): a
        PromptLookupConfig, DraftModelConfig or PardConfig. A draft model is loaded with the dtypes, quantisation
        (without overrides) and backend of this one.
        `backend`: "native" for the C++ kernels, a whole step in one call; "native-eager" for the same kernels called
        one by one from Python; "torch" for their specification in plain torch. The first two give the same bits. An
        OperatorConfig, or "attention=torch,mlp=torch" for short, says for each operator whether the kernels or plain
        torch run it.
        `num_threads`: of this process's kernels; None for the physical cores that this process may use.
        `pin_threads`: each of them on a CPU of its own, for a process that has its CPUs to itself; None for what
        PACE_PIN_THREADS says, which is no by default.
        `max_seq_len`: the longest a sequence, prompt included, may get; None for what the model's config allows.
        `progress`: a bar while loading, and while several prompts are continued, on a terminal only.
        `kv_cache_bytes`: what keys and values may take, in bytes or as "2GiB"; None for half of the memory available
        after loading. It is address space until it is used. Sequences that do not fit all at once take turns, with the
        same results; a prompt that would not fit alone is refused, and a text that grows to fill it all ends with
        "length". A draft model's keys and values take their part of it.
        `kv_cache_type`: how a text's room grows, with the same results: "paged" in blocks that texts share; "bmc" as
        one run with spare rows, which moves when these are used up; "dynamic" as one run that moves whenever it is too
        short. See docs/cache.md.
        `bmc_rows`: new rows at a time of "bmc"; None for as many as balance time and memory.
        `prefix_cache_bytes`: of `kv_cache_bytes`, what the beginnings of texts that have ended may keep, so that a text
        which begins like one of them does not compute it again; "auto" for a quarter (with a cache type that shares no
        blocks: nothing), 0 for none. Texts that want the room get it; those at work share what they begin with at no
        cost.

        Raises: NotImplementedError for architectures that are not there yet; FileNotFoundError, PermissionError,
        ValueError, TypeError as in `model_utils.load_model`.
        """
        prefix_bytes = (
            None
            if prefix_cache_bytes == "auto"
            else _read_bytes("prefix_cache_bytes", prefix_cache_bytes, ', or "auto"')
        )
        check_cache_options(kv_cache_type, bmc_rows, prefix_bytes)
        cache_options = {"kv_cache_type": kv_cache_type, "bmc_rows": bmc_rows, "prefix_cache_bytes": prefix_bytes}
        check_spec_config(spec_config)
        quantization = read_quantization(quantization, load_in_4bit, load_in_8bit)
        if max_seq_len is not None and (isinstance(max_seq_len, bool) or not isinstance(max_seq_len, int)):
            raise TypeError(f"{argument('max_seq_len')} must be an int >= 2 or None, got {max_seq_len!r}")
        dtype, ops = parse_dtype(dtype), select_ops(backend)
        kv_dtype, threads = parse_kv_cache_dtype(kv_cache_dtype, dtype), use_threads(num_threads, pin_threads)
        hub = {
            "revision": revision,
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "progress": progress,
        }
        directory = find_checkpoint(model_name_or_path, **hub)
        # What can be wrong with the small files and the arguments is found before gigabytes of weights are read.
        self._model = make_model(directory, dtype, ops, kv_dtype, quantization)
        self._check_length(max_seq_len)
        if tokenizer_name_or_path is None:
            self.tokenizer = load_tokenizer(directory, self._model.vocab_size, required=False)
        else:
            found = find_checkpoint(tokenizer_name_or_path, **hub | {"revision": None}, weights=False)
            self.tokenizer = load_tokenizer(found, self._model.vocab_size)
        defaults = self._defaults(directory)
        speculation = Speculation.prepare(spec_config, self._model, self.tokenizer, ops, hub)
        share = speculation.cache_share(self._model)
        budget = None if kv_cache_bytes is None else self._checked_budget(kv_cache_bytes, max_seq_len, share)
        CacheManager(
            self._model.kv_spec, int((budget or available_memory_bytes()) * (1 - share)), **cache_options
        )  # raises for sizes that do not go together
        fill_model(self._model, directory, threads, progress)
        speculation.load(threads, progress)
        available = available_memory_bytes()
        if budget is None:
            budget = int(available * CACHE_SHARE)
        elif budget > available:
            logger.warning(
                "%s=%s is more than the %s of memory that are left; once that is used, the system ends the process",
                argument("kv_cache_bytes"),
                kv_cache_bytes,
                format_bytes(available),
            )
        drafter = speculation.drafter(self._model, ops, backend, int(budget * share))
        budget -= drafter.memory().cache_budget
        self._engine: Engine | None = Engine.create(
            make_runner(self._model, backend), ops, budget, drafter, max_seq_len, cache_options=cache_options
        )
        self._generator: Generator | None = Generator(self._engine, self.tokenizer, defaults, progress)
        self.config = self._model.config
        """The model's config, read from config.json, with that architecture's defaults."""

    # -- generation ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        inputs: Any,
        sampling_config: SamplingConfig | None = None,
        streamer: Any = None,
        cancel: threading.Event | None = None,
    ) -> GenerateOutput:
        """Continues one prompt or several.

        `inputs`: a string, a list of strings, token ids (a list, or a list of lists), an integer tensor `[S]` or
        `[B, S]`, or a tokenizer's output with its attention mask, padded on either side.
        `sampling_config`: beats the checkpoint's generation_config.json field by field, which beats the defaults.
        `streamer`: told each token as it comes; ours, or transformers' TextStreamer and TextIteratorStreamer. One that
        answers False ends its row there.
        `cancel`: an event that another thread sets to end the call after the step under way. Rows that had not ended
        come back as far as they are, as "cancelled".

        Any number of prompts: as many as run at once are in the engine, the others follow. Several show a bar on a
        terminal, where the model was loaded with `progress` and there is no streamer.

        Raises ValueError or TypeError for what the inputs or the config ask and cannot have, before any work is done.
        After an exception or Ctrl-C the model is usable, and what other threads generate goes on.
        """
        return self._open.generate(inputs, sampling_config, streamer, cancel)

    def stream(self, prompt: Any, sampling_config: SamplingConfig | None = None) -> Iterator[str]:
        """Yields the continuation of one prompt in pieces of text, which joined are its text in `generate`'s output.
        Closing the iterator ends the generation."""
        return self._open.stream(prompt, sampling_config)

    def add_request(self, prompt: Any, sampling_config: SamplingConfig | None = None, priority: int = 0) -> Request:
        """Queues one prompt, from any thread, and returns at once; it joins whatever else is generated. Its tokens are
        those of `generate`.

        `priority`: from -100 to 100, 0 for all of `generate`, `stream` and sessions. Each unit is a head start of 64
        requests: no request is passed by more than that of those that come later, so that none starves
        (docs/decoding.md).

        Raises what `generate` does, and ValueError for inputs or a config that make several texts.
        """
        return self._open.add_request(prompt, sampling_config, priority)

    def session(self) -> Session:
        """An empty sequence to append tokens to, look at logits of, take tokens back from, and fork."""
        return Session(self._open.engine)

    def score(self, texts_or_ids: Any) -> list[Tensor]:
        """For each text of T tokens (inputs as in `generate`) fp32 `[T - 1]`: entry i is the log-probability of token
        i + 1 after tokens 0 .. i. The first token has none."""
        generator = self._open
        return score(
            generator.engine, read_prompts(texts_or_ids, self.tokenizer, generator.engine.model.vocab_size).rows
        )

    # -- about the model -----------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> Any:
        """transformers' tokenizer of the checkpoint; None where it has none."""
        return self.tokenizer

    def get_config(self) -> Any:
        """The model's config."""
        return self.config

    def memory_report(self) -> MemoryReport:
        """Bytes of the weights by part, of the key/value cache (a draft model's included), and of the process; and how
        these weights compare with as many of float32 and bfloat16."""
        engine = self._open.engine
        cache, drafts = engine.cache, engine.drafter.memory()
        return MemoryReport(
            weights=self._model.resident_bytes() | drafts.weights,
            weight_counts=self._model.weight_counts() | drafts.weight_counts,
            cache_used=cache.used_bytes + drafts.cache_used,
            cache_kept=cache.prefix_bytes,
            cache_touched=cache.touched_bytes + drafts.cache_touched,
            cache_budget=cache.budget_bytes + drafts.cache_budget,
            cache_tokens=cache.capacity,
            process=_resident_bytes(),
        )

    def operator_report(self) -> OperatorReport:
        """Which implementation of each operator of the forward pass ran since the model was loaded, how often, and, op
        by op, how long."""
        return self._open.engine.model.operator_report()

    def close(self) -> None:
        """Frees weights and cache, once no other thread uses them. Every method but this raises ValueError from then
        on."""
        self._generator = self._engine = self._model = None

    def __enter__(self) -> LLMModel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> Generator:
        generator = self._generator
        if generator is None:
            raise ValueError("this model is closed; load it again with LLMModel(...)")
        return generator

    def _check_length(self, max_seq_len: int | None) -> None:
        most = self._model.max_position_embeddings
        if max_seq_len is not None and not 2 <= max_seq_len <= most:
            raise ValueError(
                f"{argument('max_seq_len')} must be from 2 to the {most} positions that config.json gives this model; got {max_seq_len}"
            )

    def _checked_budget(self, kv_cache_bytes: int | str, max_seq_len: int | None, draft_share: Fraction) -> int:
        """Bytes, enough for one block, or for one sequence of `max_seq_len` tokens, and a draft model's share of it."""
        budget = _read_bytes("kv_cache_bytes", kv_cache_bytes)
        least = math.ceil(-(-(max_seq_len or 1) // BLOCK_SIZE) * self._model.kv_spec.block_bytes / (1 - draft_share))
        if budget < least:
            why = (
                f"{argument('max_seq_len')}={max_seq_len} tokens take"
                if max_seq_len
                else f"a block of {BLOCK_SIZE} tokens takes"
            )
            raise ValueError(
                f"{argument('kv_cache_bytes')}={kv_cache_bytes} is too little: {why} {least} bytes ({format_bytes(least)}) in this model{' and its draft model' if draft_share else ''}"
            )
        return budget

    def _defaults(self, directory: Path) -> SamplingConfig:
        """What the checkpoint says about generation: generation_config.json, then config.json, then the tokenizer."""
        vocab_size = self._model.vocab_size
        defaults = SamplingConfig.from_dict(
            read_generation_config(directory), source=f"{directory}/generation_config.json"
        )
        config = read_config_json(directory)
        special = {name: config.get(name) for name in ("eos_token_id", "pad_token_id")}
        defaults.merge_from(SamplingConfig.from_dict(special, source=f"{directory}/config.json"))
        defaults.merge_from(SamplingConfig(**{name: getattr(self.tokenizer, name, None) for name in special}))
        if defaults.eos_token_id is not None:
            known = [token for token in defaults.eos_token_id if token < vocab_size]
            if len(known) < len(defaults.eos_token_id):
                logger.warning(
                    "the checkpoint's end tokens %s are not all among the model's %d ids",
                    defaults.eos_token_id,
                    vocab_size,
                )
            defaults.eos_token_id = known or None
        return defaults


def _read_bytes(name: str, size: int | str, otherwise: str = "") -> int:
    """Raises TypeError or ValueError that names the argument."""
    try:
        return parse_bytes(size)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{argument(name)}: {error}{otherwise}") from None


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
