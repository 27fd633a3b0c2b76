"""Report on a quantised checkpoint: size, decoding speed, and perplexity, KL divergence and agreement with bfloat16,
before and after calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pace.eval import Evaluation, evaluate
from pace.llm.configs import SamplingConfig
from pace.llm.llm import LLMModel
from pace.llm.models.head_cost import HeadCost
from pace.quant import QuantizationConfig

FAR = 0.9
"""Agreement with bfloat16 below which the advice calls the result far from it."""
FASTER = 1.1
"""Ratio of speeds from which a difference is more than noise."""
RUNS, PROMPT_TOKENS, RUN_TOKENS = 3, 16, 32
"""Number of decoding runs (the fastest counts), tokens of the prompt, and tokens generated per run."""


@dataclass(frozen=True)
class Quality:
    """Comparison with the checkpoint in bfloat16, on windows of the text that calibration did not see."""

    uncalibrated: Evaluation
    """Results when quantised at load, with the same config."""
    calibrated: Evaluation
    decode_tokens_per_second: dict[str, float]
    """Decoding rates of one sequence, for "bfloat16", "uncalibrated" and "calibrated"."""

    @property
    def advice(self) -> str:
        """A recommendation based on these numbers."""
        before, after, speeds = self.uncalibrated, self.calibrated, self.decode_tokens_per_second
        advice = []
        if after.top1_agreement < FAR:
            advice.append("it is far from bfloat16: take int8, a smaller --group, or --keep the modules that matter")
        if after.kl_divergence > before.kl_divergence:
            advice.append("on this text the format at load (--quantization) is closer to bfloat16: calibrate on more")
        if speeds["calibrated"] < FASTER * speeds["bfloat16"]:
            advice.append("it is hardly faster than bfloat16 here: take it for the memory that it spares")
        return "; ".join(advice) or "use it in place of the original"


@dataclass(frozen=True)
class Report:
    out: Path
    format: str
    method: str
    num_tokens: int
    """Number of calibration tokens."""
    bytes_before: int
    bytes_after: int
    met_few: tuple[str, ...]
    """The experts' matrices that read fewer rows of the text than they have inputs. For these, gate and up are
    calibrated on the rows of all experts, and down is rounded to the nearest."""
    head: HeadCost | None
    """Size of the LM head in memory, and its share of the weights that a token reads; None for an encoder."""
    quality: Quality | None
    """None if there is no comparison."""
    not_compared: str | None = None
    """Reason why there is no comparison. None if there is one, or if it was turned off."""

    def __str__(self) -> str:
        calibrated = f", calibrated on {self.num_tokens} tokens" if self.num_tokens else ""
        ratio = self.bytes_before / self.bytes_after
        lines = [
            f"{self.out}: {self.format}, {self.method}{calibrated}",
            f"{_mib(self.bytes_before)} became {_mib(self.bytes_after)}, {ratio:.2f} times less",
        ]
        if self.head:
            lines.append(str(self.head))
        if self.met_few:
            some = f"{', '.join(self.met_few[:3])}{', ...' if len(self.met_few) > 3 else ''}"
            lines.append(
                f"{len(self.met_few)} matrices of experts met too few tokens of the text ({some}): give more of it"
            )
        if self.not_compared:
            lines.append(f"not compared with bfloat16: {self.not_compared}")
        if self.quality is None:
            return "\n".join(lines)
        before, after = self.quality.uncalibrated, self.quality.calibrated
        speeds = self.quality.decode_tokens_per_second
        rows = ("quantised at load", before, speeds["uncalibrated"]), (self.method, after, speeds["calibrated"])
        lines += [
            f"on {after.num_tokens} other tokens of the text, against bfloat16; decoding here, one sequence:",
            f"{'':<20}{'perplexity':>12}{'KL divergence':>16}{'top-1':>10}{'tokens/s':>12}",
            f"{'bfloat16':<20}{after.reference_perplexity:>12.4f}{'':>26}{speeds['bfloat16']:>12,.1f}",
            *(
                f"{name:<20}{found.perplexity:>12.4f}{found.kl_divergence:>16.6f}{100 * found.top1_agreement:>8.2f} %"
                f"{speed:>12,.1f}"
                for name, found, speed in rows
            ),
            f"advice: {self.quality.advice}",
        ]
        return "\n".join(lines)


def compare_models(
    source: Path,
    out: Path,
    config: QuantizationConfig,
    rows: Sequence[list[int]],
    tokenizer: str | Path | None,
    progress: bool,
    adapter: str | Path | None = None,
) -> Quality:
    def quality(**options) -> tuple[Evaluation, float]:
        with LLMModel(**options, tokenizer_name_or_path=tokenizer, progress=progress) as model:
            return evaluate(model, rows, reference, max(map(len, rows)), progress), _decode_speed(model, rows[0])

    merged = {} if adapter is None else {"adapter": adapter, "merge": True}
    with LLMModel(source, tokenizer, progress=progress, **merged) as reference:
        uncalibrated, uncalibrated_speed = quality(model_name_or_path=source, quantization=config, **merged)
        calibrated, calibrated_speed = quality(model_name_or_path=out)
        speeds = {"bfloat16": _decode_speed(reference, rows[0])}
        speeds |= {"uncalibrated": uncalibrated_speed, "calibrated": calibrated_speed}
        return Quality(uncalibrated, calibrated, speeds)


def _decode_speed(model: LLMModel, row: list[int]) -> float:
    """Decoded tokens per second of a single sequence after a short prompt."""
    prompt = row[: min(PROMPT_TOKENS, model.max_seq_len // 2)]
    config = SamplingConfig(max_new_tokens=min(RUN_TOKENS, model.max_seq_len - len(prompt)), ignore_eos=True)
    return max(model.generate([prompt], config).metrics.decode_tokens_per_second for _ in range(RUNS))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
