"""What quantising a checkpoint cost: perplexity, KL divergence and agreement with bfloat16, before and after
calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pace.eval import Evaluation, evaluate
from pace.llm.llm import LLMModel
from pace.quant import QuantizationConfig


@dataclass(frozen=True)
class Quality:
    """Against the checkpoint in bfloat16, on windows of the text that calibration did not see."""

    uncalibrated: Evaluation
    """Quantised at load, by the same config."""
    calibrated: Evaluation


@dataclass(frozen=True)
class Report:
    out: Path
    format: str
    method: str
    num_tokens: int
    """That were calibrated on."""
    bytes_before: int
    bytes_after: int
    quality: Quality | None
    """None where there was no text, or nobody asked."""

    def __str__(self) -> str:
        lines = [
            f"{self.out}: {self.format}, {self.method}{f', calibrated on {self.num_tokens} tokens' if self.num_tokens else ''}",
            f"{_mib(self.bytes_before)} became {_mib(self.bytes_after)}, {self.bytes_before / self.bytes_after:.2f} times less",
        ]
        if self.quality is None:
            return "\n".join(lines)
        before, after = self.quality.uncalibrated, self.quality.calibrated
        lines += [
            f"on {after.num_tokens} other tokens of the text, against bfloat16 with perplexity {after.reference_perplexity:.4f}:",
            f"{'':<16}{'perplexity':>12}{'KL divergence':>16}{'top-1':>10}",
            *(
                f"{name:<16}{found.perplexity:>12.4f}{found.kl_divergence:>16.6f}{100 * found.top1_agreement:>8.2f} %"
                for name, found in (("quantised at load", before), (self.method, after))
            ),
        ]
        return "\n".join(lines)


def compare_models(
    source: Path,
    out: Path,
    config: QuantizationConfig,
    rows: Sequence[list[int]],
    tokenizer: str | Path | None,
    progress: bool,
) -> Quality:
    def quality(**options) -> Evaluation:
        with LLMModel(**options, tokenizer_name_or_path=tokenizer, progress=progress) as model:
            return evaluate(model, rows, reference, max(map(len, rows)), progress)

    with LLMModel(source, tokenizer, progress=progress) as reference:
        return Quality(quality(model_name_or_path=source, quantization=config), quality(model_name_or_path=out))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"
