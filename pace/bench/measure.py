"""Times prefill and decode of a model on this machine, step by step, along with the machine's limits."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from pace import _C
from pace.batch import BLOCK_SIZE, KVBlocks, KVSpec, Latent, LayerBlocks, keeps_positions
from pace.bench import limits
from pace.bench.costs import Costs
from pace.bench.result import Phase, Repeat, Result, Subject
from pace.bench.shapes import SHAPES, RandomWeights, hint_of_shape, shape_config
from pace.bench.towers import measure_towers
from pace.graph.instructions import Instruction
from pace.graph.recorded.heads import Attention
from pace.graph.recorded.mixtures import Experts
from pace.graph.recorded.products import HeadsLinear, Linear
from pace.graph.recorded.states import CausalConv, Recurrence
from pace.llm.cache.groups import most_bytes
from pace.llm.engine.engine import Engine
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions, parse_dtype, parse_kv_cache_dtype, select_ops, use_threads
from pace.llm.models.model_list import read_config
from pace.llm.runners import make_runner
from pace.llm.runners.program import ProgramRunner
from pace.llm.sampling.sampler import Sampling
from pace.llm.sequence import Sequence, Span
from pace.llm.text.stopping_criteria import StoppingCriteria
from pace.memory import available_memory_bytes, format_bytes, resident_bytes
from pace.ops import native
from pace.quant import read_quantization
from pace.states import StateSlots

MIB = 2**20
CACHE_SHARE = 0.8
WARM_UP_STEPS = 2
LIMIT_SECONDS = 0.3
"""Time to measure each of the two limits, before and after every run."""
DRAWN_BLOCKS = 64
"""Number of random blocks that `draw_blocks` draws and then copies repeatedly: drawing takes ten times as long."""


def load(
    model_or_shape: str,
    dtype: str = "bfloat16",
    backend: str = "native",
    num_threads: int | None = None,
    kv_cache_dtype: str = "auto",
    quantization: Any = None,
    layers: int | None = None,
    media: bool = False,
) -> Subject:
    """Loads a checkpoint, found as in `load_model`, or a shape of `SHAPES` with random weights. Of a shape,
    `layers` keeps only the first layers. With `media`, the model has its towers.

    Raises: what `load_model` raises; ValueError for an unknown `kv_cache_dtype`, for more layers than the shape has, or
    for `layers` with a checkpoint. The same for `media` of a model without towers."""
    kv_dtype = parse_kv_cache_dtype(kv_cache_dtype, parse_dtype(dtype))
    before, started = resident_bytes() / MIB, time.perf_counter()
    if model_or_shape in SHAPES:
        use_threads(num_threads)
        model_class, config = read_config(shape_config(model_or_shape, layers), media)
        model = model_class(config, parse_dtype(dtype), select_ops(backend))
        model.quantize(read_quantization(quantization))
        model.load_weights(RandomWeights(model), _C.get_num_threads())
    elif layers is not None:
        raise ValueError(f"layers is only for the shapes of `pace bench --list`, and {model_or_shape} is not one")
    else:
        options = {"dtype": dtype, "backend": backend, "num_threads": num_threads, "quantization": quantization}
        with hint_of_shape(model_or_shape):
            model = load_model(LoadOptions(model_or_shape, **options, weights_cache=False, media=media))
    if media and not model.towers:
        raise ValueError(f"{model_or_shape} has no tower for images or sound; leave image_tokens out")
    seconds = time.perf_counter() - started
    model.kv_dtype = kv_dtype
    engine = Engine.create(
        make_runner(model, backend), select_ops(backend), int(available_memory_bytes() * CACHE_SHARE)
    )
    name = model_or_shape if model_or_shape in SHAPES else Path(model_or_shape).name
    name += "" if layers is None else f", {layers} layers"
    return Subject(name, model, engine, backend, seconds, resident_bytes(peak=True) / MIB, before, model.nbytes / MIB)


def measure(
    subject: Subject,
    prompt: int = 512,
    generated: int = 64,
    batch: int = 1,
    repeats: int = 5,
    depth: int | None = None,
    image_tokens: int | None = None,
) -> Result:
    """Runs the model `repeats` times after a warm-up.

    Prefill is timed on a single prompt. Decode is timed on `batch` sequences of that length, over the steps in which
    each of them gets a token. With `depth`, these sequences have `depth` positions with random keys and values instead.
    With `image_tokens`, the encoding of an image of that many tokens is timed as well, and that of a clip of a minute.
    Raises: ValueError if the model or its cache cannot hold the sequences, or a step cannot run all of them."""
    _check(subject, prompt, generated, batch, repeats, depth)
    prefill_seconds(subject, prompt)
    measured, towers = [], []
    with _no_collection():
        if image_tokens is not None:
            limits_now = lambda: limits.measure(LIMIT_SECONDS)
            towers = measure_towers(subject.engine.model, subject.model.dtype, image_tokens, repeats, limits_now)
        for _ in range(repeats):
            before = limits.measure(LIMIT_SECONDS)
            seconds = prefill_seconds(subject, prompt), decode_seconds(subject, prompt, generated, batch, depth)
            measured.append(Repeat(limits.between(before, limits.measure(LIMIT_SECONDS)), *seconds))
        _forget_peak_memory()
        prefill, decode = _phases(subject, prompt, generated, batch, depth)
    peak_mib = resident_bytes(peak=True) / MIB
    costs = subject.costs
    return Result(subject, costs, prompt, generated, batch, depth, measured, prefill, decode, peak_mib, towers)


def _check(subject: Subject, prompt: int, generated: int, batch: int, repeats: int, depth: int | None) -> None:
    counts = {"prompt": prompt, "generated": generated, "batch": batch, "repeats": repeats, "context": depth}
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1; got {count}")
    engine, limit = subject.engine, subject.model.max_position_embeddings
    length = (depth or prompt) + generated + WARM_UP_STEPS + 1
    if max(length, prompt + 1) > limit:
        longest = f"a context of {depth} + {generated}" if depth and prompt < limit else f"{prompt} + {generated}"
        raise ValueError(
            f"{longest} tokens are more than this model has positions for: {limit} "
            f"({subject.model.length_field}; the warm-up takes {WARM_UP_STEPS + 1})"
        )
    if batch > engine.scheduler.max_sequences_per_step:
        raise ValueError(
            f"a step decodes at most {engine.scheduler.max_sequences_per_step} sequences; got a batch of {batch}"
        )
    cache = engine.cache
    if cache.has_states and batch > (num_slots := cache.free_room.slots):
        raise ValueError(
            f"{batch} sequences need {format_bytes(batch * cache.slot_bytes)} for their states, and the cache has room "
            f"for the states of {num_slots}; choose a smaller batch"
        )
    needed = batch * most_bytes(cache.spec, length + BLOCK_SIZE, cache.step_tokens)
    available = cache.num_blocks * cache.spec.block_bytes
    if needed > available:
        raise ValueError(
            f"{batch} x {length} tokens need a cache of {format_bytes(needed)}, and {format_bytes(available)} are "
            f"available; choose a smaller batch, context or prompt"
        )


def _sequences(subject: Subject, prompt: int, generated: int, batch: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(subject.model.vocab_size, (batch, prompt), generator=generator).tolist()
    return [Sequence(row, Sampling(), StoppingCriteria(prompt + generated, []), prompt + generated) for row in ids]


def prefill_seconds(subject: Subject, prompt: int) -> float:
    """Seconds from a prompt to its first token."""
    sequences = _sequences(subject, prompt, 1, 1)
    started = time.perf_counter()
    _run(subject.engine, sequences)
    return time.perf_counter() - started


def decode_seconds(subject: Subject, prompt: int, generated: int, batch: int, depth: int | None = None) -> float:
    """Median seconds of a step in which every sequence gets one token, without the first few steps. `depth` as in
    `measure`."""
    with _decoding(subject, prompt, generated + WARM_UP_STEPS + 1, batch, depth) as sequences:
        steps = []
        while not all(sequence.is_finished for sequence in sequences):
            running = sum(not sequence.is_finished for sequence in sequences)
            started = time.perf_counter()
            subject.engine.step()
            if running == batch:
                steps.append(time.perf_counter() - started)
        return statistics.median(steps[WARM_UP_STEPS:] or steps)


@contextmanager
def _decoding(subject: Subject, prompt: int, generated: int, batch: int, depth: int | None) -> Iterator[list[Sequence]]:
    """Yields sequences in the engine that have their first token and get one more with each step."""
    engine = subject.engine
    sequences = _sequences(subject, depth or prompt, generated, batch)
    try:
        if depth:
            fill_cache(engine, sequences)
        engine.submit(sequences)
        while any(not sequence.num_generated and not sequence.is_finished for sequence in sequences):
            engine.step()
        _raise_errors(sequences)
        yield sequences
    finally:
        engine.abort(sequences)


def fill_cache(engine: Engine, sequences: list[Sequence]) -> None:
    """Fills the cache with random keys, values and states for all tokens of new sequences except the last of each.

    They are standard normal, roughly what a normalised input and trained weights give, so that softmax gets scores of a
    realistic spread. The cache must have room for all sequences."""
    cache = engine.cache
    for sequence in sequences:
        last = len(sequence.tokens) - 1
        for end in (*range(cache.step_tokens, last, cache.step_tokens), last):  # like a prefill, for windows
            has_room = cache.reserve(sequence, end + 1)
            assert has_room, f"the cache is too small for {sequence}"
            cache.plan([Span(sequence, sequence.num_computed, end - sequence.num_computed)])
            cache.commit(sequence, end)
    tables = zip(*(sequence.block_tables for sequence in sequences))  # regrouped by cache group
    held = [[block for table in of_group for block in table if block >= 0] for of_group in tables]
    draw_blocks(cache.spec, cache.kv, [torch.tensor(blocks) for blocks in held])
    draw_states(cache.kv, [sequence.state.slot for sequence in sequences])


def draw_blocks(spec: KVSpec, kv: list[LayerBlocks], blocks: list[torch.Tensor]) -> None:
    """Fills the blocks of each group with random keys and values, in all layers of the group. Padding of values becomes
    zero."""
    num_drawn = min(max(map(len, blocks)), DRAWN_BLOCKS)
    layers = [(layer, found) for layer, found in zip(spec.layers, kv) if keeps_positions(layer)]
    drawn = {layer: _drawn(KVSpec((layer,), spec.dtype), num_drawn) for layer, _ in layers}
    for layer, found in layers:
        for some in blocks[found.group].split(num_drawn):
            for tensor, source in zip(found.tensors, drawn[layer].tensors):
                tensor.index_copy_(0, some, source[: len(some)])


def draw_states(kv: list[LayerBlocks], slots: list[int]) -> None:
    """Fills the slots with random states, in all layers that have one."""
    generator = torch.Generator().manual_seed(0)
    for layer in kv:
        for tensor in (layer.inputs, layer.matrix) if isinstance(layer, StateSlots) else ():
            for slot in slots if tensor is not None else ():
                tensor[slot] = torch.randn(tensor.shape[1:], generator=generator)


def _drawn(spec: KVSpec, num_blocks: int) -> KVBlocks:
    """Returns blocks of random keys and values of one layer; the same numbers at every call."""
    generator = torch.Generator().manual_seed(0)
    [layer], [blocks] = spec.layers, spec.allocate(num_blocks)
    layer = layer.positions if isinstance(layer, Latent) else layer
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
    _raise_errors(sequences)


def _raise_errors(sequences: list[Sequence]) -> None:
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error


def _phases(
    subject: Subject, prompt: int, generated: int, batch: int, depth: int | None
) -> tuple[Phase | None, Phase | None]:
    """Runs prefill and decode again and times every instruction."""
    runner = subject.engine.model
    if not isinstance(runner, ProgramRunner):
        return None, None
    try:
        runner.set_profiling(True)
        seconds = prefill_seconds(subject, prompt)
        prefill = Phase(seconds, _by_kind(runner.timings(), steps=1))
        generated = min(generated, 32)
        with _decoding(subject, prompt, generated + 1, batch, depth) as sequences:
            runner.set_profiling(True)
            started, steps = time.perf_counter(), 0
            while not any(sequence.is_finished for sequence in sequences):
                subject.engine.step()
                steps += 1
            seconds = (time.perf_counter() - started) / steps
            moved = _moved_bytes(subject.costs, batch, (depth or prompt) + generated // 2)
            decode = Phase(seconds, _by_kind(runner.timings(), steps, moved))
    finally:
        runner.set_profiling(False)
    return prefill, decode


def _moved_bytes(costs: Costs, batch: int, context: int) -> dict[type[Instruction], float]:
    """Bytes that all instructions of a kind move in a decode step, other than weights of matrices."""
    slots = costs.cache.slots()

    def of_states(name: str) -> float:
        """Bytes of a part of all states, read and written."""
        elements = sum(math.prod(part.shape) for part in slots.parts if part.name == name)
        return 2 * batch * elements * slots.dtype.itemsize

    return {
        Attention: batch * costs.kv_bytes(context),
        CausalConv: of_states("inputs"),
        Recurrence: of_states("matrix"),
        Experts: costs.step_weight_bytes(batch) - costs.dense_weight_bytes,
    }


def _by_kind(
    timings: list[tuple[Instruction, str, float]],
    steps: int,
    moved: Mapping[type[Instruction], float] = {},
) -> dict[str, tuple[int, float, float]]:
    """Sums the timings by kind of instruction, per step. `moved`: see `_moved_bytes`."""
    counts = Counter(type(instruction) for instruction, *_ in timings)
    kinds: dict[str, tuple[int, float, float]] = {}
    for instruction, name, seconds in timings:
        num_bytes = moved.get(type(instruction), 0) / counts[type(instruction)]
        if isinstance(instruction, Linear):
            num_bytes = instruction.weight.nbytes
        elif isinstance(instruction, HeadsLinear):
            num_bytes = instruction.weights.nbytes
        count, total, total_bytes = kinds.get(name, (0, 0.0, 0.0))
        kinds[name] = count + 1, total + seconds / steps, total_bytes + num_bytes
    return kinds


@contextmanager
def _no_collection() -> Iterator[None]:
    """Turns garbage collection off, so that it does not affect timings."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _forget_peak_memory() -> None:
    """Resets the peak memory that the system reports: measuring the bandwidth took a large buffer."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pass
