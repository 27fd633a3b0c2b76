"""Measures loading time and peak memory of a random checkpoint of Qwen2.5-0.5B's shape, for each requested combination.

    python benchmarks/load.py [--stored bfloat16 float16 float32] [--dtype bfloat16 int4] [--kinds safetensors]
    [--layers 24] [--model DIR]

Each load runs in a separate process. The output is a table and, as the last line, one JSON object. `bound` is the
promise: 1.1 times the resident weights + 300 MB. `above start` is peak resident memory minus the memory after the
imports. The files are in the page cache, so GB/s (of the checkpoint's bytes) measures packing, not the disk. `CPU s` is
the sum over the threads.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

DTYPES = ("bfloat16", "float16", "float32")
FORMATS = ("int8", "int4", "nf4", "fp4", "mxfp4", "mxfp8", "fp8")
KINDS = ("safetensors", "safetensors-sharded", "bin", "bin-legacy")
ALLOWED_FACTOR, ALLOWED_BYTES = 1.1, 300_000_000

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


def write_checkpoint(folder: Path, stored: torch.dtype, kind: str, **changes: int) -> None:
    """Writes a checkpoint of random weights: config.json and one or two files of weights."""
    from pace.llm.models.model_list import read_config
    from pace.ops import reference

    config = QWEN | changes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    model_class, parsed = read_config(config)
    generator = torch.Generator().manual_seed(0)
    shapes = {
        name: target.shape for name, [target, *_] in model_class(parsed, torch.float32, reference).targets().items()
    }
    state = {name: torch.randn(shape, generator=generator).mul_(0.02).to(stored) for name, shape in shapes.items()}
    if kind.startswith("bin"):
        if parsed.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]  # as in a model's state_dict
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=kind == "bin")
    elif kind == "safetensors":
        save_file(state, folder / "model.safetensors")
    else:
        names = list(state)
        shards = {f"model-{i + 1:05}-of-00002.safetensors": names[i::2] for i in range(2)}
        for shard, part in shards.items():
            save_file({name: state[name] for name in part}, folder / shard)
        weight_map = {name: shard for shard, part in shards.items() for name in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def measure(folder: Path, dtype: str, num_threads: int | None = None) -> dict:
    """Loads in a new process, in a dtype or a format of `quantization=`; returns bytes and seconds."""
    command = [sys.executable, __file__, "--load", str(folder), "--dtype", dtype]
    if num_threads:
        command += ["--threads", str(num_threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"loading {folder} as {dtype} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def load_here(folder: str, dtype: str, num_threads: int | None) -> dict:
    from pace.llm.loading.load import load_model
    from pace.llm.loading.options import LoadOptions
    from pace.memory import resident_bytes

    start_bytes = resident_bytes()
    began, cpu_began = time.perf_counter(), time.process_time()
    kind = {"dtype": dtype} if dtype in DTYPES else {"quantization": dtype}
    model = load_model(LoadOptions(folder, **kind, progress=False, num_threads=num_threads))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    weights = sum(model.resident_bytes().values())
    stored = sum(path.stat().st_size for path in Path(folder).iterdir())
    peak = resident_bytes(peak=True)
    return {
        "weights_bytes": weights,
        "stored_bytes": stored,
        "peak_bytes": peak,
        "start_bytes": start_bytes,
        "bound_bytes": int(ALLOWED_FACTOR * weights + ALLOWED_BYTES),
        "resident_after_bytes": resident_bytes(),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "gb_per_s": stored / seconds / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stored", nargs="+", choices=DTYPES, default=list(DTYPES), help="dtype of the checkpoint")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES + FORMATS,
        default=["bfloat16"],
        help="dtype to load as, or format to quantise to",
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["safetensors"])
    parser.add_argument("--layers", type=int, default=QWEN["num_hidden_layers"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--model", type=Path, help="load this checkpoint instead of random ones")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load_here(options.load, options.dtype[0], options.threads)))
        return
    rows = []
    print(
        f"{'stored':>10} {'kind':>20} {'as':>9} {'weights MB':>10} {'peak MB':>8} {'bound MB':>8} "
        f"{'above start':>11} {'s':>6} {'CPU s':>6} {'GB/s':>6}"
    )
    with tempfile.TemporaryDirectory() as scratch:
        for stored in ["as is"] if options.model else options.stored:
            for kind in ["as is"] if options.model else options.kinds:
                folder = options.model or Path(scratch) / f"{stored}-{kind}"
                if not options.model:
                    write_checkpoint(folder, getattr(torch, stored), kind, num_hidden_layers=options.layers)
                for dtype in options.dtype:
                    row = {"stored": stored, "kind": kind, "dtype": dtype, **measure(folder, dtype, options.threads)}
                    rows.append(row)
                    megabytes = {
                        name[:-6]: round(value / 1e6) for name, value in row.items() if name.endswith("_bytes")
                    }
                    print(
                        f"{stored:>10} {kind:>20} {dtype:>9} {megabytes['weights']:>10} {megabytes['peak']:>8} "
                        f"{megabytes['bound']:>8} "
                        f"{megabytes['peak'] - megabytes['start']:>11} {row['seconds']:>6.2f} "
                        f"{row['cpu_seconds']:>6.2f} {row['gb_per_s']:>6.2f}"
                    )
    print(json.dumps({"benchmark": "load", "rows": rows}))


if __name__ == "__main__":
    main()
