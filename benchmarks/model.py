"""Prefill and decode of a whole model against this machine's limits, and the memory that loading took.

    python benchmarks/model.py                          # random weights of Qwen2.5-0.5B's shape, bf16
    python benchmarks/model.py --shape llama-3.2-1b --dtype float32 --repeats 5

MBU = bytes that a decode step must read (weights, and the keys and values of the context) / time / measured read bandwidth.
MFU = 2 x multiply-adds of the prefill / time / measured fp32 FMA peak. Both limits are measured in the same run, just before
and after. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch

import pace
from pace import _C
from pace.llm import LLMModel, SamplingConfig

import limits
from shapes import SHAPES, tensor_shapes, write_checkpoint

MIB = 2**20


def rss_mib(field: str) -> float:
    """`VmRSS` (now) or `VmHWM` (the peak so far) of this process, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def matrix_elements(config: dict, *, lm_head: bool) -> int:
    """Weights that one token is multiplied with: every matrix but the embedding; the LM head where asked."""
    total = 0
    for name, shape in tensor_shapes(config).items():
        if len(shape) == 2 and not name.startswith(("model.embed_tokens", "lm_head")):
            total += shape[0] * shape[1]
    return total + (config["vocab_size"] * config["hidden_size"] if lm_head else 0)


def prefill_flops(config: dict, tokens: int) -> int:
    """Multiply-adds count twice; attention is causal; the LM head runs on the last row only."""
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    attention = 2 * tokens * (tokens + 1) * config["num_attention_heads"] * head_dim * config["num_hidden_layers"]
    return 2 * tokens * matrix_elements(config, lm_head=False) + attention + 2 * config["vocab_size"] * config["hidden_size"]


def decode_bytes(config: dict, context: int, bytes_per_element: int) -> int:
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kv = 2 * context * config["num_key_value_heads"] * head_dim * config["num_hidden_layers"]
    return (matrix_elements(config, lm_head=True) + kv) * bytes_per_element


def measure(model: LLMModel, prompt: int, generated: int, repeats: int) -> tuple[float, float]:
    """Median seconds of a prefill of `prompt` tokens, and of one decode step after it (mean over `generated` steps)."""
    ids = torch.randint(2, model.config.vocab_size, (prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    prefill, decode = [], []
    for _ in range(repeats + 1):                       # the first is a warm-up
        with model.session() as session:
            start = time.perf_counter()
            session.append(ids)
            prefill.append(time.perf_counter() - start)
        out = model.generate([ids], SamplingConfig(max_new_tokens=generated + 1, ignore_eos=True, do_sample=False))
        decode.append(1 / out.metrics.decode_tokens_per_second)
    return statistics.median(prefill[1:]), statistics.median(decode[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--generate", type=int, default=64, help="decode steps measured")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num-threads", type=int, default=None)
    parser.add_argument("--checkpoint", type=Path, default=None, help="where the random checkpoint is kept (default: a temporary folder)")
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    config = SHAPES[args.shape]
    with tempfile.TemporaryDirectory() as scratch:
        path = args.checkpoint or Path(scratch) / args.shape
        writer = multiprocessing.get_context("spawn").Process(target=write_checkpoint, args=(args.shape, path))
        writer.start()                                 # in a process of its own: its memory must not count as ours
        writer.join()
        if writer.exitcode:
            raise SystemExit(f"the checkpoint in {path} could not be written")
        before = rss_mib("VmRSS")
        start = time.perf_counter()
        model = LLMModel(str(path), dtype=dtype, num_threads=args.num_threads, progress=False)
        load_s = time.perf_counter() - start
        peak = rss_mib("VmHWM")
    resident = sum(model.memory_report().weights.values()) / MIB

    first = limits.measure()
    prefill_s, step_s = measure(model, args.prompt, args.generate, args.repeats)
    last = limits.measure()
    bandwidth = 1e9 * max(first.read_gb_s, last.read_gb_s)
    peak_flops = 1e9 * max(first.fma_gflops, last.fma_gflops)

    context = args.prompt + args.generate // 2
    result = {
        "pace": pace.__version__, "shape": args.shape, "dtype": args.dtype, "isa": _C.isa(), "threads": _C.get_num_threads(),
        "prompt": args.prompt, "prefill_tokens_per_s": args.prompt / prefill_s, "decode_tokens_per_s": 1 / step_s,
        "mfu": prefill_flops(config, args.prompt) / prefill_s / peak_flops,
        "mbu": decode_bytes(config, context, dtype.itemsize) / step_s / bandwidth,
        "read_gb_per_s": bandwidth / 1e9, "fma_gflops": peak_flops / 1e9,
        "load_s": load_s, "resident_mib": resident, "rss_before_mib": before, "peak_rss_mib": peak,
        "peak_rss_bound_mib": 1.1 * resident + 300,
    }
    print(f"{args.shape} {args.dtype}, {result['isa']}, {result['threads']} threads")
    print(f"limits    {result['read_gb_per_s']:8.1f} GB/s read     {result['fma_gflops']:8.1f} GFLOPS fp32 FMA")
    print(f"prefill   {result['prefill_tokens_per_s']:8.1f} tokens/s      MFU {result['mfu']:.2f}   ({args.prompt} tokens)")
    print(f"decode    {result['decode_tokens_per_s']:8.1f} tokens/s      MBU {result['mbu']:.2f}   (context {context})")
    print(f"load      {load_s:8.2f} s             peak RSS {peak:.0f} MiB (bound {result['peak_rss_bound_mib']:.0f} MiB; {before:.0f} MiB before loading)")
    print(json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in result.items()}))


if __name__ == "__main__":
    main()
