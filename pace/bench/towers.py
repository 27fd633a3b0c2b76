"""Predicts the memory and time to encode an image or a clip, and measures it. A tower encodes a blank one. For a
prediction, the runs of its slices are recorded instead of computed."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.bench.costs import attention_costs, usual_code
from pace.bench.limits import Limits, between
from pace.bench.prediction import efficiency
from pace.llm.layers import Attention, Layer, Linear, Vectors
from pace.llm.layers.rotary import Angles
from pace.llm.models.towers.tower import Slice, Tower
from pace.media.media import Media
from pace.ops import native

logger = logging.getLogger("pace")

IMAGE_TOKENS = 1280
"""Default limit of an image's tokens, as in `ServeOptions`."""


@dataclass(frozen=True)
class TowerPlan:
    """Memory and time to encode one image or clip. Units: bytes, seconds."""

    kind: str
    """"image" or "audio"."""
    num_tokens: int
    """Tokens of the image or clip."""
    clip_seconds: int
    """Length of the clip; 0 for an image."""
    weight_bytes: int
    """Bytes of the tower, a part of the model's weights."""
    encode_bytes: int
    """Memory while it is encoded, in addition to weights: its features, activations, keys and values, and its rows."""
    row_bytes: int
    """Bytes of its rows, which are kept after that in the cache of media."""
    flops: int
    """Operations of an encoding: 2 for each product of two numbers."""
    encode_seconds: float


@dataclass(frozen=True)
class TowerResult:
    """A measured encoding: medians over the repeats."""

    planned: TowerPlan
    seconds: float
    mfu: float
    """Model FLOPS utilisation: operations / time / measured fp32 FMA peak."""
    ratio: float
    """Measured speed over predicted speed."""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers for JSON, with units in the names."""
        planned = self.planned
        return {
            "kind": planned.kind,
            "tokens": planned.num_tokens,
            "clip_s": planned.clip_seconds,
            "encode_s": self.seconds,
            "encode_mfu": self.mfu,
            "predicted_s": planned.encode_seconds,
            "predicted_ratio": self.ratio,
            "weight_bytes": planned.weight_bytes,
            "encode_bytes": planned.encode_bytes,
            "row_bytes": planned.row_bytes,
        }


class Run(NamedTuple):
    """A run of a slice, on rows of one image or clip."""

    matrices: list[Linear]
    num_rows: int
    attention_flops: int
    num_bytes: int
    """Bytes of its rows, results of products, keys and values. Less if buffers are reused."""

    @property
    def flops(self) -> int:
        """Operations of products."""
        return 2 * self.num_rows * sum(matrix.n * matrix.k for matrix in self.matrices)

    def seconds(self, dtype: torch.dtype, limits: Limits) -> float:
        """Predicted seconds, by the formulas of `prediction.py`."""
        if not self.matrices:
            return 0.0
        reached = efficiency(limits.isa, dtype, usual_code(self.matrices, dtype))
        bandwidth, peak = 1e9 * limits.read_gb_s, 1e9 * limits.fma_gflops
        weight_bytes = sum(matrix.matrix_nbytes(native, dtype) for matrix in self.matrices)
        products = max(weight_bytes / (reached.weights * bandwidth), self.flops / (reached.products * peak))
        return products + self.attention_flops / (reached.prefill_attention * peak)


class Encoding:
    """The runs of an encoding: of an image of `image_tokens` tokens, or of a clip of `Tower.clip_seconds`."""

    def __init__(self, tower: Tower, image_tokens: int = IMAGE_TOKENS):
        """The tower need not be loaded."""
        self.tower = tower
        for vectors in vectors_outside(tower):
            if not vectors.nbytes:
                vectors.allocate(native, torch.float32)
        self.runs: list[Run] = []
        media = blank(tower, image_tokens)
        self.num_tokens = media.num_tokens
        self.first_bytes = 0
        """Bytes of the first rows, which are kept until the end."""
        encoding = tower.encode(media, self._run)
        while True:
            try:
                next(encoding)
            except StopIteration as end:
                self.row_bytes = end.value.nbytes
                break
        self.num_bytes = media.features.nbytes + self.first_bytes + self.row_bytes
        self.num_bytes += max(run.num_bytes for run in self.runs)

    def plan(self, dtype: torch.dtype, limits: Limits) -> TowerPlan:
        """Plans for weights in `dtype`, or as their matrices are planned."""
        return TowerPlan(
            kind=self.tower.kind,
            num_tokens=self.num_tokens,
            clip_seconds=self.tower.clip_seconds if self.tower.rows_a_second else 0,
            weight_bytes=self.tower.planned_nbytes(native, dtype),
            encode_bytes=self.num_bytes,
            row_bytes=self.row_bytes,
            flops=self.flops,
            encode_seconds=sum(run.seconds(dtype, limits) for run in self.runs),
        )

    @property
    def flops(self) -> int:
        return sum(run.flops + run.attention_flops for run in self.runs)

    def _run(self, piece: Slice, batch: ForwardBatch, angles: Angles) -> Tensor:
        """Records a run, and returns zeros of the shape of its result."""
        rows, matrices = batch.given.rows, list(piece.matrices())
        result = torch.zeros(len(rows), piece.width or (matrices[-1].n if matrices else rows.shape[1]))
        attention = 0
        for part in piece.walk():
            if isinstance(part, Attention):
                spans = batch.of_layer(batch.kv[getattr(piece, "group", 0)]).spans
                pairs = int((spans.kv_len.long() ** 2).sum())
                attention += pairs * attention_costs(part, torch.float32).flops_per_pair
        activations = 4 * len(rows) * (sum(matrix.n for matrix in matrices) + rows.shape[1])
        cached = max((sum(held.nbytes for held in layer.tensors) for layer in batch.kv), default=0)
        num_bytes = rows.nbytes + result.nbytes + activations + cached
        self.first_bytes = self.first_bytes or rows.nbytes
        self.runs.append(Run(matrices, len(rows), attention, num_bytes))
        return result


def vectors_outside(layer: Layer) -> Iterator[Vectors]:
    """Yields the vectors below a layer that are not in a slice: `encode` reads them."""
    for child in layer.children():
        if isinstance(child, Vectors):
            yield child
        elif not isinstance(child, Slice):
            yield from vectors_outside(child)


def encodings_of(towers: Iterable[Tower], image_tokens: int) -> Iterator[Encoding]:
    """Yields the encoding of each tower. One that makes no blank media is left out, with a warning."""
    for tower in towers:
        try:
            yield Encoding(tower, image_tokens)
        except NotImplementedError as error:
            logger.warning("the encoding by this tower is left out: %s", error)


def blank(tower: Tower, image_tokens: int) -> Media:
    """An image of this number of tokens, or a clip of `clip_seconds`."""
    return tower.blank(tower.clip_seconds * tower.rows_a_second or image_tokens)


def encode_seconds(runner: Any, tower: Tower, image_tokens: int) -> float:
    """Seconds of an encoding with a runner of the tower's model."""
    media = blank(tower, image_tokens)
    started = time.perf_counter()
    for _ in runner.encode(media):
        pass
    return time.perf_counter() - started


def measure_towers(
    runner: Any, dtype: torch.dtype, image_tokens: int, repeats: int, measure_limits: Callable[[], Limits]
) -> list[TowerResult]:
    """Times the encoding of an image and of a clip by each tower of a loaded model, after a warm-up. The machine's
    limits are measured before and after each run."""
    results = []
    for encoding in encodings_of(runner.towers, image_tokens):
        tower = encoding.tower
        encode_seconds(runner, tower, image_tokens)
        found = []
        for _ in range(repeats):
            before = measure_limits()
            seconds = encode_seconds(runner, tower, image_tokens)
            limits = between(before, measure_limits())
            planned = encoding.plan(dtype, limits)
            mfu = planned.flops / seconds / (1e9 * limits.fma_gflops)
            found.append(TowerResult(planned, seconds, mfu, planned.encode_seconds / seconds))
        found.sort(key=lambda result: result.seconds)
        seconds, mfu, ratio = (
            statistics.median(getattr(one, name) for one in found) for name in ("seconds", "mfu", "ratio")
        )
        results.append(TowerResult(found[len(found) // 2].planned, seconds, mfu, ratio))
    return results
