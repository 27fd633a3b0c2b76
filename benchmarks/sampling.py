"""Measures the milliseconds that choosing a token takes, without the model, for many sequences of a large vocabulary.

    python benchmarks/sampling.py [--into benchmarks/RESULTS.md]

Logits are normally distributed random numbers, which is the hard case: their nucleus holds a good part of the
vocabulary. "Peaked" logits have a few likely tokens, like those of a trained model. The rate of two threads is relative
to that of one. The row "greedy" is the work needed in any case (searching for NaN and for the maximum).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from pace import _C  # noqa: E402
from pace.llm import SamplingConfig  # noqa: E402
from pace.llm.constraints.mask_filler import NO_MASKS, PendingMasks  # noqa: E402
from pace.llm.constraints.masks import fill_bits  # noqa: E402
from pace.llm.sampling.logits import Processors, build_processors  # noqa: E402
from pace.llm.sampling.sampler import Sampler, Sampling, rules_of  # noqa: E402
from pace.llm.sequence import Sequence, Span  # noqa: E402
from pace.ops import native  # noqa: E402

SCRIPT = "benchmarks/sampling.py"
CONFIGS = {
    "greedy": {},
    "temperature 0.8": dict(temperature=0.8, top_k=0),
    "temperature 0.8, top_k 50, top_p 0.95": dict(temperature=0.8, top_k=50, top_p=0.95),
    "top_p 0.95": dict(top_k=0, top_p=0.95),
    "temperature 0.8, top_p 0.95": dict(temperature=0.8, top_k=0, top_p=0.95),
    "min_p 0.05": dict(top_k=0, min_p=0.05),
    "typical_p 0.9": dict(top_k=0, typical_p=0.9),
    "top_k 50, typical_p 0.9": dict(top_k=50, typical_p=0.9),
    "top_k 50, 5 log-probabilities": dict(top_k=50, logprobs=5),
    "top_k 50, repetition_penalty 1.1": dict(top_k=50, repetition_penalty=1.1),
    "top_k 50, repetition_penalty 1.1, 5 log-probabilities": dict(top_k=50, repetition_penalty=1.1, logprobs=5),
    "top_k 50, frequency_penalty 0.2, presence_penalty 0.1": dict(
        top_k=50, frequency_penalty=0.2, presence_penalty=0.1
    ),
    "greedy, a mask of every other token": dict(allowed=0.5),
    "temperature 0.8, a mask of 1 in 1,000 tokens": dict(temperature=0.8, top_k=0, allowed=1e-3),
    "temperature 0.8, a mask of every other token": dict(temperature=0.8, top_k=0, allowed=0.5),
    "temperature 0.8, top_k 50, top_p 0.95, a mask of 0.99 of the tokens": dict(
        temperature=0.8, top_k=50, top_p=0.95, allowed=0.99
    ),
    "top_p 0.95, typical_p 0.9": dict(top_k=0, top_p=0.95, typical_p=0.9),
    "min_p 0.05, typical_p 0.9": dict(top_k=0, min_p=0.05, typical_p=0.9),
    "top_k 50, logit_bias of 100 tokens": dict(top_k=50, logit_bias={token: 1.0 for token in range(100)}),
}
LENGTH = 500
"""Tokens of each sequence that penalties look at."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, default=151_936, metavar="V", help="default: 151936, Qwen's")
    parser.add_argument("--sequences", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument("--repeats", type=int, default=9, metavar="N", help="medians are over so many (default: 9)")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)
    normal = torch.randn(options.sequences, options.vocabulary, generator=torch.Generator().manual_seed(0))
    peaked = normal - 6.0
    peaked[:, ::9001] += 14.0
    lines = [
        f"`{page.command(SCRIPT)}` on `{_C.isa()}`: {options.sequences} sequences, {options.vocabulary:,} tokens. "
        "Milliseconds a token on one thread, and the rate on two over that on one.\n",
        "| | normal | rate on 2 threads | peaked | rate on 2 threads |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, fields in CONFIGS.items():
        cells = []
        for logits in (normal, peaked):
            one, two = (measure(logits, fields, threads, options.repeats) for threads in (1, 2))
            cells += [f"{1e3 * one / options.sequences:.3f}", f"{one / two:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    page.publish(options.into, SCRIPT, "\n".join(lines) + "\n\n")
    return 0


def measure(logits: torch.Tensor, fields: dict, num_threads: int, repeats: int) -> float:
    """Seconds of a step's sampling, for all sequences together."""
    _C.set_num_threads(num_threads, False)
    allowed, fields = fields.get("allowed"), {name: fields[name] for name in fields if name != "allowed"}
    pending = NO_MASKS if allowed is None else make_masks(allowed, *logits.shape)
    spans = [make_span(fields, seed) for seed in range(len(logits))]
    sampler, seconds = Sampler(native, logits.shape[1]), []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        outcomes = sampler.sample(logits, spans, pending)
        seconds.append(time.perf_counter() - begin)
        assert all(outcomes), [span.sequence.error for span in spans]
        for span in spans:
            span.sequence.logprobs.clear()
    return statistics.median(seconds[1:])


def make_masks(share: float, num_rows: int, vocab_size: int) -> PendingMasks:
    """Returns filled masks, each of different tokens."""
    bits = torch.empty(num_rows, -(-vocab_size // 32), dtype=torch.int32)
    for seed, row in enumerate(bits):
        is_allowed = torch.rand(vocab_size, generator=torch.Generator().manual_seed(seed)) < share
        fill_bits(row, is_allowed.nonzero()[:, 0].numpy())
    return PendingMasks(list(range(num_rows)), bits, [], [])


def make_span(fields: dict, seed: int) -> Span:
    tokens = torch.randint(150_000, (LENGTH,), generator=torch.Generator().manual_seed(seed)).tolist()
    config = SamplingConfig(do_sample=True, **fields) if fields else SamplingConfig()
    processors = Processors(build_processors(config, 0, []))
    strategy = Sampling(processors, rules_of(config), seed, config.logprobs) if fields else Sampling()
    return Span(Sequence(tokens, strategy, None, 2 * LENGTH), LENGTH - 1, 1)


if __name__ == "__main__":
    sys.exit(main())
