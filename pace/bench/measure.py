"""Prefill and decode of a model on this machine, timed step by step beside the machine's limits."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import pace
from pace import _C
from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec, LayerBlocks
from pace.bench import limits
from pace.bench.costs import Costs
from pace.bench.prediction import Prediction, efficiency, predict
from pace.bench.shapes import SHAPES, RandomWeights, hint_of_shape
from pace.graph.instructions import Instruction
from pace.graph.recorded import Attention, Linear
from pace.llm.decoding.sampler import Greedy
from pace.llm.decoding.stopping_criteria import StoppingCriteria
from pace.llm.engine.engine import Engine
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.model_list import read_config
from pace.llm.models.model_utils import load_model, parse_dtype, parse_kv_cache_dtype, select_ops, use_threads
from pace.llm.runners import make_runner
from pace.llm.runners.program import ProgramRunner
from pace.llm.sequence import Sequence
from pace.memory import available_memory_bytes, format_bytes, resident_bytes
from pace.ops import native
from pace.quant import read_quantization

MIB = 2**20
CACHE_SHARE = 0.8
WARM_UP_STEPS = 2
LIMIT_SECONDS = 0.3
"""For each of the two limits, before every run and after it."""
DRAWN_BLOCKS = 64
"""Blocks of random keys and values that `draw_blocks` draws, to copy them over and over: drawing takes ten times as
long."""


@dataclass(frozen=True)
class Subject:
    """What is measured: a loaded model and an engine that runs it."""

    name: str
    model: BaseModelForCausalLM
    engine: Engine
    backend: str
    load_seconds: float
    load_peak_mib: float
    """Peak resident memory of the process, right after loading; `rss_before_mib` of it was there before."""
    rss_before_mib: float
    resident_mib: float

    @property
    def costs(self) -> Costs:
        return Costs.of(self.model, self.model.dtype, self.model.kv_dtype)


def load(
    model_or_shape: str,
    dtype: str = "bfloat16",
    backend: str = "native",
    num_threads: int | None = None,
    kv_cache_dtype: str = "auto",
    quantization: Any = None,
) -> Subject:
    """A shape of `SHAPES` with random weights, or a checkpoint as `model_utils.load_model` finds it. Raises what that
    raises, and ValueError for an unknown `kv_cache_dtype`."""
    kv_dtype = parse_kv_cache_dtype(kv_cache_dtype, parse_dtype(dtype))
    before, started = resident_bytes() / MIB, time.perf_counter()
    if model_or_shape in SHAPES:
        use_threads(num_threads)
        model_class, config = read_config(SHAPES[model_or_shape])
        model = model_class(config, parse_dtype(dtype), select_ops(backend))
        model.quantize(read_quantization(quantization))
        model.load_weights(RandomWeights(model), _C.get_num_threads())
    else:
        with hint_of_shape(model_or_shape):
            model = load_model(model_or_shape, dtype, backend, num_threads=num_threads, quantization=quantization)
    seconds = time.perf_counter() - started
    model.kv_dtype = kv_dtype
    engine = Engine.create(
        make_runner(model, backend), select_ops(backend), int(available_memory_bytes() * CACHE_SHARE)
    )
    name = model_or_shape if model_or_shape in SHAPES else Path(model_or_shape).name
    return Subject(name, model, engine, backend, seconds, resident_bytes(peak=True) / MIB, before, model.nbytes / MIB)


@dataclass(frozen=True)
class Phase:
    """Where the time of a step went: seconds per step of each kind of instruction, and what is left outside of the
    kernels."""

    seconds: float
    instructions: dict[str, tuple[int, float, float]]
    """What -> (instructions of this kind in a step, seconds of them all, bytes of weights, or of keys and values
    computed before, that they read)."""

    @property
    def outside(self) -> float:
        return self.seconds - sum(seconds for _, seconds, _ in self.instructions.values())


@dataclass(frozen=True)
class Repeat:
    """One run, and the machine's limits around it."""

    limits: limits.Limits
    first_token_seconds: float
    """From a prompt of `prompt` tokens to its first token."""
    step_seconds: float
    """Of a decode step of the whole batch, the median of the run."""


@dataclass(frozen=True)
class Result:
    """Medians over the repeats, of seconds as of shares of the limits: a shared machine's limits drift from one run to
    the next."""

    subject: Subject
    costs: Costs
    prompt: int
    generated: int
    batch: int
    depth: int | None
    """Positions that the cache of each sequence held, of random numbers, when decoding began; None where that was the
    prompt."""
    repeats: list[Repeat]
    prefill: Phase | None
    decode: Phase | None
    """None where the backend runs op by op: only a program times its instructions."""
    peak_mib: float
    """Peak resident memory of the process while the model ran."""

    @property
    def limits(self) -> limits.Limits:
        first = self.repeats[0].limits
        read, fma = (
            statistics.median(getattr(repeat.limits, name) for repeat in self.repeats)
            for name in ("read_gb_s", "fma_gflops")
        )
        return limits.Limits(first.isa, first.threads, read, fma)

    @property
    def first_token_seconds(self) -> float:
        return statistics.median(repeat.first_token_seconds for repeat in self.repeats)

    @property
    def step_seconds(self) -> float:
        return statistics.median(repeat.step_seconds for repeat in self.repeats)

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt / self.first_token_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        return self.batch / self.step_seconds

    @property
    def prefill_mfu(self) -> float:
        """2 x multiply-adds / time / measured fp32 FMA peak."""
        flops = self.costs.prefill_flops(self.prompt)
        return statistics.median(
            flops / repeat.first_token_seconds / (1e9 * repeat.limits.fma_gflops) for repeat in self.repeats
        )

    @property
    def decode_flops(self) -> int:
        return self.costs.decode_flops(self.batch, self.context)

    @property
    def decode_mfu(self) -> float:
        return statistics.median(
            self.decode_flops / repeat.step_seconds / (1e9 * repeat.limits.fma_gflops) for repeat in self.repeats
        )

    @property
    def decode_mbu(self) -> float:
        """Bytes of weights, keys and values that a step must read / time / measured read bandwidth."""
        num_bytes = self.costs.decode_bytes(self.batch, self.context)
        return statistics.median(
            num_bytes / repeat.step_seconds / (1e9 * repeat.limits.read_gb_s) for repeat in self.repeats
        )

    @property
    def predicted(self) -> Prediction:
        """What `pace plan` would have said."""
        return self._predict(self.limits)

    @property
    def prefill_ratio(self) -> float:
        """Measured speed over predicted speed."""
        return statistics.median(
            self._predict(repeat.limits).prefill_seconds / repeat.first_token_seconds for repeat in self.repeats
        )

    @property
    def decode_ratio(self) -> float:
        """Measured speed over predicted speed."""
        return statistics.median(
            self._predict(repeat.limits).step_seconds / repeat.step_seconds for repeat in self.repeats
        )

    def _predict(self, now: limits.Limits) -> Prediction:
        return predict(
            self.costs,
            efficiency(now.isa, self.subject.model.dtype, self.costs.code),
            now,
            self.prompt,
            self.context,
            self.batch,
        )

    @property
    def context(self) -> int:
        """Tokens of each sequence half-way through the decode steps."""
        return (self.depth or self.prompt) + self.generated // 2

    @property
    def outside_share(self) -> float | None:
        """Share of a decode step outside of the kernels: Python, dispatch, sampling."""
        return self.decode.outside / self.decode.seconds if self.decode else None

    def as_dict(self) -> dict[str, Any]:
        """For machines: plain numbers, units in the names."""
        subject = self.subject
        return {
            "pace": pace.__version__,
            "model": subject.name,
            "dtype": str(subject.model.dtype).removeprefix("torch."),
            "quantization": subject.model.quantization and subject.model.quantization.to_dict(),
            "kv_cache_dtype": str(subject.model.kv_dtype).removeprefix("torch."),
            "backend": subject.backend,
            "isa": self.limits.isa,
            "threads": self.limits.threads,
            "prompt": self.prompt,
            "generated": self.generated,
            "batch": self.batch,
            "context": self.depth or self.prompt,
            "repeats": len(self.repeats),
            "prefill_tokens_per_s": self.prefill_tokens_per_second,
            "decode_tokens_per_s": self.decode_tokens_per_second,
            "first_token_s": self.first_token_seconds,
            "step_s": self.step_seconds,
            "prefill_mfu": self.prefill_mfu,
            "decode_mfu": self.decode_mfu,
            "decode_mbu": self.decode_mbu,
            "predicted": {
                "prefill_tokens_per_s": self.prompt / self.predicted.prefill_seconds,
                "decode_tokens_per_s": self.batch / self.predicted.step_seconds,
                "prefill_ratio": self.prefill_ratio,
                "decode_ratio": self.decode_ratio,
            },
            "outside_kernels_share": self.outside_share,
            "read_gb_per_s": self.limits.read_gb_s,
            "fma_gflops": self.limits.fma_gflops,
            "load_s": subject.load_seconds,
            "resident_mib": subject.resident_mib,
            "rss_before_mib": subject.rss_before_mib,
            "load_peak_rss_mib": subject.load_peak_mib,
            "peak_rss_mib": self.peak_mib,
        }


def measure(
    subject: Subject, prompt: int = 512, generated: int = 64, batch: int = 1, repeats: int = 5, depth: int | None = None
) -> Result:
    """Runs the model `repeats` times after a warm-up.

    Prefill is timed on one prompt alone, decode on `batch` sequences of that length, over those steps in which each of
    them gets a token. With `depth` these sequences have so many positions instead, whose keys and values are not
    computed but drawn at random.
    Raises ValueError where the model or its cache cannot hold them, or all of them at once."""
    _check(subject, prompt, generated, batch, repeats, depth)
    _prefill(subject, prompt)
    measured = []
    with _no_collection():
        for _ in range(repeats):
            before = limits.measure(LIMIT_SECONDS)
            seconds = _prefill(subject, prompt), statistics.median(_decode(subject, prompt, generated, batch, depth))
            measured.append(Repeat(limits.between(before, limits.measure(LIMIT_SECONDS)), *seconds))
        _forget_peak_memory()
        prefill, decode = _phases(subject, prompt, generated, batch, depth)
    return Result(
        subject,
        subject.costs,
        prompt,
        generated,
        batch,
        depth,
        measured,
        prefill,
        decode,
        resident_bytes(peak=True) / MIB,
    )


def _check(subject: Subject, prompt: int, generated: int, batch: int, repeats: int, depth: int | None) -> None:
    if min(prompt, generated, batch, repeats, 1 if depth is None else depth) < 1:
        raise ValueError(
            f"prompt, generated, batch, repeats and context must be at least 1; got {prompt}, {generated}, {batch}, {repeats}, {depth}"
        )
    engine, most = subject.engine, subject.model.max_position_embeddings
    length = (depth or prompt) + generated + WARM_UP_STEPS + 1
    if max(length, prompt + 1) > most:
        longest = f"a context of {depth} + {generated}" if depth and prompt < most else f"{prompt} + {generated}"
        raise ValueError(
            f"{longest} tokens are more than this model has positions for: {most} (max_position_embeddings; {WARM_UP_STEPS + 1} go to the warm-up)"
        )
    if batch > engine.scheduler.max_sequences_per_step:
        raise ValueError(
            f"a step decodes at most {engine.scheduler.max_sequences_per_step} sequences; got a batch of {batch}"
        )
    wanted, there = batch * engine.cache.bytes_for(length + BLOCK_SIZE), engine.cache.budget_bytes
    if wanted > there:
        raise ValueError(
            f"{batch} x {length} tokens need a cache of {format_bytes(wanted)}, and {format_bytes(there)} are there for it; take a smaller batch, context or prompt"
        )


def _sequences(subject: Subject, prompt: int, generated: int, batch: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(subject.model.vocab_size, (batch, prompt), generator=generator).tolist()
    return [Sequence(row, Greedy(), StoppingCriteria(prompt + generated, []), prompt + generated) for row in ids]


def _prefill(subject: Subject, prompt: int) -> float:
    """Seconds until a prompt has its first token."""
    sequences = _sequences(subject, prompt, 1, 1)
    started = time.perf_counter()
    _run(subject.engine, sequences)
    return time.perf_counter() - started


def _decode(subject: Subject, prompt: int, generated: int, batch: int, depth: int | None) -> list[float]:
    """Seconds of each step in which every sequence got one token, the first few left out."""
    with _decoding(subject, prompt, generated + WARM_UP_STEPS + 1, batch, depth) as sequences:
        steps = []
        while not all(sequence.is_finished for sequence in sequences):
            running = sum(not sequence.is_finished for sequence in sequences)
            started = time.perf_counter()
            subject.engine.step()
            if running == batch:
                steps.append(time.perf_counter() - started)
        return steps[WARM_UP_STEPS:] or steps


@contextmanager
def _decoding(subject: Subject, prompt: int, generated: int, batch: int, depth: int | None) -> Iterator[list[Sequence]]:
    """Sequences in the engine that have their first token, and get one more with each step."""
    engine = subject.engine
    sequences = _sequences(subject, depth or prompt, generated, batch)
    try:
        if depth:
            fill_cache(engine, sequences)
        engine.submit(sequences)
        while any(not sequence.num_generated for sequence in sequences):
            engine.step()
        yield sequences
    finally:
        engine.abort(sequences)


def fill_cache(engine: Engine, sequences: list[Sequence]) -> None:
    """Random keys and values in the place of computed ones, for all tokens of new sequences but the last of each.

    They are standard normal, about what a normalised input makes of weights of a trained scale, so that softmax sees
    scores of an ordinary spread. The cache must have room for all."""
    for sequence in sequences:
        has_room = engine.cache.reserve(sequence, len(sequence.tokens))
        assert has_room, f"the cache is too small for {sequence}"
        engine.cache.commit(sequence, len(sequence.tokens) - 1)
    draw_blocks(
        engine.cache.spec,
        engine.cache.kv,
        torch.tensor([block for sequence in sequences for block in sequence.block_table]),
    )


def draw_blocks(spec: KVSpec, kv: list[LayerBlocks], blocks: torch.Tensor) -> None:
    """Random keys and values in these blocks of every layer; what pads the values becomes zero."""
    num_drawn = min(len(blocks), DRAWN_BLOCKS)
    drawn = {layer: _drawn(replace(spec, layers=(layer,)), num_drawn) for layer in spec.layers if layer}
    for layer, found in zip(spec.layers, kv):
        for some in blocks.split(num_drawn) if layer else ():
            for tensor, source in zip(found.tensors, drawn[layer].tensors):
                tensor.index_copy_(0, some, source[: len(some)])


def _drawn(spec: KVSpec, num_blocks: int) -> KVBlocks:
    """Blocks of random keys and values of one layer; the same numbers at every call."""
    generator = torch.Generator().manual_seed(0)
    [layer], [blocks] = spec.layers, spec.allocate(num_blocks)
    tokens = num_blocks * BLOCK_SIZE
    keys, values = (
        torch.randn(tokens, layer.kv_heads, dim, generator=generator) for dim in (layer.key_dim, layer.value_dim)
    )
    native.store_kv(keys, values, blocks, torch.arange(tokens))
    return blocks


def _run(engine: Engine, sequences: list[Sequence]) -> None:
    engine.submit(sequences)
    try:
        while not all(sequence.is_finished for sequence in sequences):
            engine.step()
    finally:
        engine.abort(sequences)


def _phases(
    subject: Subject, prompt: int, generated: int, batch: int, depth: int | None
) -> tuple[Phase | None, Phase | None]:
    """Once more with the clock on every instruction."""
    runner = subject.engine.model
    if not isinstance(runner, ProgramRunner):
        return None, None
    program = runner.program
    try:
        program.set_profiling(True)
        seconds = _prefill(subject, prompt)
        prefill = Phase(seconds, _by_kind(program.instructions, program.timings(), steps=1))
        generated = min(generated, 32)
        with _decoding(subject, prompt, generated + 1, batch, depth) as sequences:
            program.set_profiling(True)
            started, steps = time.perf_counter(), 0
            while not any(sequence.is_finished for sequence in sequences):
                subject.engine.step()
                steps += 1
            seconds = (time.perf_counter() - started) / steps
            kv_bytes = batch * subject.costs.kv_bytes((depth or prompt) + generated // 2)
            decode = Phase(seconds, _by_kind(program.instructions, program.timings(), steps, kv_bytes))
    finally:
        program.set_profiling(False)
    return prefill, decode


def _by_kind(
    instructions: list[Instruction], timings: list[tuple[str, int, float]], steps: int, kv_bytes: int = 0
) -> dict[str, tuple[int, float, float]]:
    """`kv_bytes`: of keys and values that a step reads."""
    num_layers = sum(isinstance(instruction, Attention) for instruction in instructions)
    kinds: dict[str, tuple[int, float, float]] = {}
    for instruction, (name, _, seconds) in zip(instructions, timings, strict=True):
        num_bytes = (
            instruction.weight.nbytes
            if isinstance(instruction, Linear)
            else kv_bytes / num_layers
            if isinstance(instruction, Attention)
            else 0
        )
        count, total, total_bytes = kinds.get(name, (0, 0.0, 0.0))
        kinds[name] = count + 1, total + seconds / steps, total_bytes + num_bytes
    return kinds


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps the garbage collector out of the times."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _forget_peak_memory() -> None:
    """Has the system count the peak anew: measuring the bandwidth took a large buffer."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass
