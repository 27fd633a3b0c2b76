"""Encoders in `pace bench` and `pace plan`: the costs of whole texts, their prediction and measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

import pace
from pace.bench import limits
from pace.bench.costs import usual_code
from pace.bench.limits import Limits
from pace.bench.plan import DTYPES, FORMATS, LOADED
from pace.bench.prediction import efficiency
from pace.checkpoints.safetensors_file import TensorInfo
from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.encoder_driver import EncoderDriver
from pace.llm.encoding.load import open_encoder
from pace.llm.encoding.steps import MAX_TEXTS, MAX_TOKENS
from pace.llm.layers import Attention, Embedding, Layer, Linear, MixtureOfExperts
from pace.llm.loading.options import LoadOptions
from pace.llm.models.encoders.encoder import Encoder
from pace.llm.models.encoders.encoder_list import read_encoder_config
from pace.memory import format_bytes, resident_bytes
from pace.naming import dtype_name
from pace.ops import native
from pace.ops.weight_layout import WeightLayout
from pace.quant import QuantizationConfig

STEPS = 4
"""Full steps of a measured call."""
LIMIT_SECONDS = 0.3
POOLING = ("mean",)


@dataclass(frozen=True)
class EncoderCosts:
    """Costs of an encoder with weights in one dtype, or quantised as planned. Units: bytes and operations (a
    multiply-add is two)."""

    weight_bytes: int
    step_weight_bytes: int
    """Bytes that a step reads. Tables are left out, because it reads only single rows of them."""
    flops_per_token: int
    """Operations of the layers' products."""
    attention: tuple[tuple[int, int | None], ...]
    """For each layer: the operations for a token and a position that it sees, and its reach on each side. None: it sees
    all positions."""
    row_bytes: int
    """Memory of a token in a step: activations, keys and values. Less if buffers are reused."""
    code: str | None
    """Code of most of the layers' weight bytes; None for floats."""

    @classmethod
    def of(cls, encoder: Encoder, dtype: torch.dtype) -> EncoderCosts:
        """The encoder need not be loaded."""
        parts = [part for child in encoder.children() for part in child.walk()]
        of_layers = [part for layer in encoder.layers for part in layer.walk()]
        matrices = [part for part in of_layers if isinstance(part, Linear)]
        chosen = _chosen(of_layers)
        tables = [part for part in parts if isinstance(part, Embedding)]
        weight_bytes = encoder.planned_nbytes(native, dtype)
        positions = [part.positions for part in of_layers if isinstance(part, Attention)]
        widest = max(
            sum(chosen.get(part, part.n) for part in layer.walk() if isinstance(part, Linear))
            for layer in encoder.layers
        )
        return cls(
            weight_bytes=weight_bytes,
            step_weight_bytes=weight_bytes - sum(part.planned_nbytes(native, dtype) for part in tables),
            flops_per_token=2 * sum(chosen.get(part, part.n) * part.k for part in matrices),
            attention=tuple(
                (
                    2 * part.num_heads * (part.positions.key_dim + part.positions.value_dim),
                    None if part.positions.window is None else part.positions.window - 1,
                )
                for part in of_layers
                if isinstance(part, Attention)
            ),
            row_bytes=4
            * (widest + encoder.hidden_size + max(p.kv_heads * (p.key_dim + p.value_dim) for p in positions)),
            code=usual_code(matrices, dtype),
        )

    def attention_flops(self, length: int) -> int:
        """Operations of the attention of one text."""
        return sum(flops * _pairs(length, side) for flops, side in self.attention)

    def flops(self, length: int) -> int:
        """Operations of one text of `length` tokens."""
        return length * self.flops_per_token + self.attention_flops(length)

    def seconds(self, length: int, num_texts: int, dtype: torch.dtype, now: Limits) -> float:
        """Predicted seconds of texts of one length, by the formulas of `prediction.py`."""
        reached, in_step = efficiency(now.isa, dtype, self.code), texts_of_step(length)
        bandwidth, peak = 1e9 * now.read_gb_s, 1e9 * now.fma_gflops
        read = -(-num_texts // in_step) * self.step_weight_bytes / (reached.weights * bandwidth)
        products = num_texts * length * self.flops_per_token / (reached.products * peak)
        return max(read, products) + num_texts * self.attention_flops(length) / (reached.prefill_attention * peak)


def _chosen(parts: Sequence[Layer]) -> dict[Linear, int]:
    """Rows of each expert's matrices that a token uses. All those that it chooses are counted for the first expert."""
    return {
        expert: mixture.router.top_k * expert.n if index == 0 else 0
        for mixture in parts
        if isinstance(mixture, MixtureOfExperts)
        for stack in (mixture.gate_up, mixture.down)
        for index, expert in enumerate(stack.experts)
    }


def _pairs(length: int, side: int | None) -> int:
    """Pairs of a token and a position of the same text that it sees."""
    if side is None or side >= length - 1:
        return length**2
    return length * (2 * side + 1) - side * (side + 1)


def texts_of_step(length: int) -> int:
    """Number of texts of one length in a full step."""
    return min(MAX_TEXTS, max(1, MAX_TOKENS // length))


# -- plan --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderPlan:
    """Memory and speed of an encoder for one dtype or format. Units: bytes, texts per second, seconds."""

    dtype: str
    weight_bytes: int
    step_bytes: int
    """Memory of a full step."""
    texts_per_second: float
    text_seconds: float
    """Time of one text alone."""
    fits: bool


def plan(
    config_json: dict[str, Any],
    now: Limits | Callable[[], Limits],
    available_bytes: int,
    length: int = 512,
    quantization: QuantizationConfig | None = None,
    tensors: Mapping[str, TensorInfo] | None = None,
) -> list[EncoderPlan]:
    """Plans for texts of `length` tokens: for each dtype and each of `FORMATS`, or for `quantization` only. `tensors`:
    those of a GGUF file, whose config does not say that they are quantised.

    Raises what reading the config raises, NotImplementedError for a checkpoint that is quantised already, and
    ValueError for a text that is too long."""
    encoder_class, config = read_encoder_config(config_json)
    in_codes = any(isinstance(tensor.dtype, WeightLayout) for tensor in (tensors or {}).values())
    if config.quantization_config is not None or in_codes:
        raise NotImplementedError(
            ("" if in_codes else "config.json: ")
            + "the checkpoint is quantised already; `pace bench` measures it, a plan needs float weights"
        )
    encoder = encoder_class(config, LOADED, native)
    check_length(encoder, length)
    now = now if isinstance(now, Limits) else now()
    plans = []
    for name, dtype, chosen in _ways(quantization):
        encoder.quantize(chosen)
        costs, in_step = EncoderCosts.of(encoder, dtype), texts_of_step(length)
        step_bytes = max(MAX_TOKENS, length) * costs.row_bytes
        plans.append(
            EncoderPlan(
                name if chosen is None or quantization is None else encoder.storage_name,
                costs.weight_bytes,
                step_bytes,
                in_step / costs.seconds(length, in_step, dtype, now),
                costs.seconds(length, 1, dtype, now),
                costs.weight_bytes + step_bytes <= available_bytes,
            )
        )
    return plans


def _ways(quantization: QuantizationConfig | None) -> list[tuple[str, torch.dtype, QuantizationConfig | None]]:
    if quantization is not None:
        return [("", LOADED, quantization)]
    floats = [(name, dtype, None) for name, dtype in DTYPES.items()]
    return floats + [(name, LOADED, QuantizationConfig(name)) for name in FORMATS]


def check_length(encoder: Encoder, length: int) -> None:
    """Raises ValueError for a text that the encoder cannot read."""
    if not 1 <= length <= encoder.max_length:
        raise ValueError(f"a text of this model has 1 to {encoder.max_length} tokens; got {length}")


def plan_table(plans: list[EncoderPlan], length: int) -> str:
    lines = [f"{'stored as':<12}{'weights':>13}{'a step':>13}{'texts/s':>12}{'one alone':>13}"]
    for each in plans:
        rate = f"{each.texts_per_second:,.1f}" if each.fits else "no room"
        lines.append(
            f"{each.dtype:<12}{format_bytes(each.weight_bytes):>13}{format_bytes(each.step_bytes):>13}{rate:>12}"
            f"{each.text_seconds * 1e3:>10,.2f} ms"
        )
    lines.append(f"speeds are predictions for texts of {length} tokens; `pace bench` measures them")
    return "\n".join(lines)


# -- bench -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderSubject:
    """A loaded encoder."""

    name: str
    driver: EncoderDriver
    backend: str
    load_seconds: float

    @property
    def encoder(self) -> Encoder:
        encoder = self.driver.encoder
        assert encoder is not None, "it is closed"
        return encoder


@dataclass(frozen=True)
class EncoderRun:
    """One run, and the machine's limits measured around it."""

    limits: Limits
    seconds: float
    """Seconds of all texts."""
    text_seconds: float
    """Seconds of one text alone."""


@dataclass(frozen=True)
class EncoderResult:
    """Medians over the runs."""

    subject: EncoderSubject
    length: int
    num_texts: int
    runs: list[EncoderRun] = field(repr=False)
    peak_mib: float

    def _median(self, of: Callable[[EncoderRun], float]) -> float:
        return statistics.median(map(of, self.runs))

    @cached_property
    def costs(self) -> EncoderCosts:
        return EncoderCosts.of(self.subject.encoder, self.subject.encoder.dtype)

    @property
    def texts_per_second(self) -> float:
        return self.num_texts / self._median(lambda run: run.seconds)

    @property
    def text_seconds(self) -> float:
        return self._median(lambda run: run.text_seconds)

    @property
    def mfu(self) -> float:
        """Share of the measured fp32 FMA peak."""
        flops = self.num_texts * self.costs.flops(self.length)
        return self._median(lambda run: flops / run.seconds / (1e9 * run.limits.fma_gflops))

    @property
    def ratio(self) -> float:
        """Measured speed over predicted speed."""
        dtype = self.subject.encoder.dtype
        expected = lambda now: self.costs.seconds(self.length, self.num_texts, dtype, now)
        return self._median(lambda run: expected(run.limits) / run.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers for JSON, with units in the names."""
        encoder = self.subject.encoder
        return {
            "pace": pace.__version__,
            "model": self.subject.name,
            "dtype": dtype_name(encoder.dtype),
            "held_as": encoder.storage_name,
            "backend": self.subject.backend,
            "isa": self.runs[0].limits.isa,
            "threads": self.runs[0].limits.threads,
            "tokens_of_a_text": self.length,
            "texts": self.num_texts,
            "repeats": len(self.runs),
            "texts_per_s": self.texts_per_second,
            "tokens_per_s": self.texts_per_second * self.length,
            "text_s": self.text_seconds,
            "mfu": self.mfu,
            "predicted_ratio": self.ratio,
            "fma_gflops": self._median(lambda run: run.limits.fma_gflops),
            "load_s": self.subject.load_seconds,
            "resident_mib": encoder.nbytes / 2**20,
            "peak_rss_mib": self.peak_mib,
        }

    def table(self) -> str:
        found = self.as_dict()
        return "\n".join(
            [
                f"{found['model']}, {found['held_as']}, {found['backend']} on {found['isa']}, {found['threads']} "
                f"threads; {self.num_texts} texts of {self.length} tokens, median of {len(self.runs)}",
                f"limits       {found['fma_gflops']:9.0f} GFLOPS fp32 FMA",
                f"texts        {self.texts_per_second:9.1f} texts/s        {found['tokens_per_s']:,.0f} tokens/s    "
                f"MFU {self.mfu:.2f}",
                f"one alone    {self.text_seconds * 1e3:9.2f} ms",
                f"predicted    measured is {self.ratio:.2f} of the predicted speed",
                f"memory       {found['resident_mib']:9.0f} MiB weights    resident: at most {self.peak_mib:,.0f} MiB",
                f"load         {self.subject.load_seconds:9.2f} s",
            ]
        )


def load(path: Path, dtype: str, backend: str, num_threads: int | None, quantization: Any) -> EncoderSubject:
    """Loads the encoder of a checkpoint. Raises as `open_encoder`."""
    started = time.perf_counter()
    options = LoadOptions(
        path, dtype=dtype, backend=backend, num_threads=num_threads, quantization=quantization, weights_cache=False
    )
    driver = open_encoder(options).driver
    return EncoderSubject(path.name, driver, backend, time.perf_counter() - started)


def measure(subject: EncoderSubject, length: int = 512, num_texts: int = 1, repeats: int = 5) -> EncoderResult:
    """Times texts of `length` random tokens: `num_texts` at once, and one alone. `num_texts` is raised to fill `STEPS`
    steps. Raises ValueError for a text that is too long."""
    encoder, driver = subject.encoder, subject.driver
    check_length(encoder, length)
    generator = torch.Generator().manual_seed(0)
    num_texts = max(num_texts, STEPS * texts_of_step(length))
    ids = torch.randint(encoder.vocab_size, (num_texts, length), generator=generator).tolist()
    texts, runs = [TextTokens(tuple(row)) for row in ids], []
    driver.rows(texts, POOLING)
    for _ in range(repeats):
        before = limits.measure(LIMIT_SECONDS)
        seconds = _timed(lambda: driver.rows(texts, POOLING))
        alone = statistics.median(_timed(lambda: driver.rows(texts[:1], POOLING)) for _ in range(3))
        runs.append(EncoderRun(limits.between(before, limits.measure(LIMIT_SECONDS)), seconds, alone))
    return EncoderResult(subject, length, num_texts, runs, resident_bytes(peak=True) / 2**20)


def _timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
