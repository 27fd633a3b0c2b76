"""`pace plan`: predicts the memory and speed of a model on this machine without loading it."""

from __future__ import annotations

import argparse
import json
import logging
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING

from pace.cli.arguments import (
    MODEL_HELP,
    add_hub_arguments,
    add_kv_cache_dtype_argument,
    add_mmproj_argument,
    add_model_argument,
    add_quantization_argument,
    add_threads_argument,
    count,
)
from pace.cli.options_in_messages import refuse_given

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pace.bench.plan import MappedPlan
    from pace.bench.towers import TowerPlan
    from pace.llm.loading.checkpoint import Checkpoint

logger = logging.getLogger("pace")

OF_GENERATION = ["context", "batch", "sample", "kv_cache_dtype", "mmproj", "max_image_tokens"]
"""Options that do not apply to an encoder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(
        parser,
        None,
        "MODEL_OR_SHAPE",
        f"{MODEL_HELP}; or a shape of `pace bench --list`",
    )
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "--prompt",
        type=count,
        default=512,
        metavar="N",
        help="length of the prompt in tokens, for the predicted speeds (default: 512)",
    )
    parser.add_argument(
        "--context",
        type=count,
        metavar="N",
        help="tokens of each sequence while it decodes (default: those of the prompt)",
    )
    parser.add_argument("--batch", type=count, default=1, metavar="N", help="sequences decoded at once (default: 1)")
    parser.add_argument(
        "--no-sample",
        dest="sample",
        action="store_false",
        help="do not run a few layers of a local model; speeds then follow from the machine's limits, and are less "
        "certain",
    )
    add_quantization_argument(parser, None)
    add_kv_cache_dtype_argument(parser, "auto")
    add_mmproj_argument(parser, None)
    parser.add_argument(
        "--max-image-tokens",
        type=count,
        default=1280,
        metavar="N",
        help="tokens of the image whose encoding is predicted, if the model has a tower (default: 1280)",
    )
    add_threads_argument(parser, None)
    add_hub_arguments(parser, None)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    from pace.bench import plan
    from pace.bench.sample import CannotSample, Sample
    from pace.bench.shapes import SHAPES, hint_of_shape
    from pace.llm.loading.checkpoint import Checkpoint
    from pace.llm.loading.find import find_checkpoint
    from pace.llm.models.encoders.encoder_list import find_encoder
    from pace.memory import available_memory_bytes

    if arguments.model is None:
        arguments.parser.error("no model to plan for: give a checkpoint, or a shape of `pace bench --list`")
    config, found = SHAPES.get(arguments.model), None
    if config is None:
        with hint_of_shape(arguments.model):
            found = find_checkpoint(
                arguments.model,
                arguments.revision,
                cache_dir=arguments.cache_dir,
                local_files_only=arguments.local_files_only,
                weights=False,
                progress=False,
                media=arguments.mmproj is None,
            )
        checkpoint = Checkpoint(found, media=True, mmproj=arguments.mmproj)
        config = checkpoint.config
        if find_encoder(config) is not None:
            return _plan_encoder(arguments, checkpoint)
    elif arguments.mmproj is not None:
        raise ValueError(
            f"mmproj={arguments.mmproj!r} belongs to a GGUF file; {arguments.model!r} is a shape of `pace bench --list`"
        )
    elif arguments.revision is not None:
        raise ValueError(
            f"--revision {arguments.revision}: {arguments.model!r} is a shape of `pace bench --list`, which has no "
            "revisions"
        )
    available, limits = available_memory_bytes(), cache(partial(plan.machine_limits, arguments.num_threads))
    asked = (arguments.prompt, arguments.context, arguments.batch, arguments.kv_cache_dtype, arguments.quantization)
    with nullcontext() if found is None else plan.quantized_tensors(checkpoint) as tensors:
        sample = Sample(Checkpoint(found)) if found and arguments.sample else None
        try:
            plans = plan.plan(config, limits, available, *asked, tensors, sample, arguments.max_image_tokens)
        except (CannotSample, OSError, MemoryError) as error:
            if sample is None:
                raise
            logger.info("no layers were run: %s", error)
            sample = None
            plans = plan.plan(config, limits, available, *asked, tensors, None, arguments.max_image_tokens)
    measured = limits()
    if arguments.json:
        print(
            json.dumps(
                {
                    "model": arguments.model,
                    "available_bytes": available,
                    "limits": asdict(measured),
                    "sampled": sample is not None,
                    "plans": [asdict(p) for p in plans],
                }
            )
        )
        return 0
    print(
        f"{arguments.model} on {measured.isa}, {measured.threads} threads: {measured.read_gb_s:.1f} GB/s read, "
        f"{measured.fma_gflops:.0f} GFLOPS, {_gib(available)} available"
    )
    width = max(12, *(len(p.dtype) + 2 for p in plans))
    states = any(p.state_bytes_per_sequence for p in plans)
    titles = f"{'stored as':<{width}}{'weights':>11}" + (f"{'states':>11}" if states else "")
    print(f"{titles}{'cache/token':>14}{'max tokens':>14}{'prefill':>13}{'decode':>13}")
    for p in plans:
        longest = f"{p.max_context:,}" if p.fits else "does not fit"
        state = f"{p.state_bytes_per_sequence / 2**20:>7.1f} MiB" if states else ""
        print(
            f"{p.dtype:<{width}}{_gib(p.weight_bytes):>11}{state}{p.kv_bytes_per_token / 1024:>10.1f} KiB{longest:>14}"
            f"{p.prefill_tokens_per_second:>9,.0f} t/s{p.decode_tokens_per_second:>9,.1f} t/s"
        )
    if states:
        print("a sequence takes its states once, at any length; its tokens take cache in the other layers")
    if any(p.kv_bytes_per_late_token < p.kv_bytes_per_token for p in plans):
        late = ", ".join(f"{p.kv_bytes_per_late_token / 1024:.1f} KiB ({p.dtype})" for p in plans)
        print(f"layers with a window free earlier keys and values: a later token takes {late}")
    if plans[0].file_weights:
        print(f"{plans[0].file_weights / 1e9:.2f} billion weights of embeddings stay in the file, and take no memory")
    for p in plans:
        if p.mapped:
            print(f"{p.dtype}, --weights mapped: {_mapped(p.mapped)}")
    for towers in zip(*(p.towers for p in plans)):
        print(_encoding(towers, [p.dtype for p in plans]))
    for p in plans:
        print(f"{p.dtype}: {p.head}")
    context = arguments.context or arguments.prompt
    fitting = ", ".join(f"{p.max_sequences:,} ({p.dtype})" for p in plans)
    print(f"sequences of {context:,} tokens that fit: {fitting}")
    sequences = f"{arguments.batch} sequences" if arguments.batch > 1 else "one sequence"
    how = "predictions from a run of a few of its layers" if sample else "predictions"
    print(
        f"speeds are {how} for a prompt of {arguments.prompt} tokens, and {sequences} at "
        f"{context}; `pace bench` measures them"
    )
    print("by default, sequences get half of the memory that is left after loading (--kv-cache-bytes)")
    return 0


def _plan_encoder(arguments: argparse.Namespace, checkpoint: Checkpoint) -> int:
    from pace.bench import encoders, plan
    from pace.memory import available_memory_bytes
    from pace.quant import read_quantization

    refuse_given(arguments, OF_GENERATION, "an encoder, which generates nothing")
    available, limits = available_memory_bytes(), cache(partial(plan.machine_limits, arguments.num_threads))
    quantization = read_quantization(arguments.quantization)
    tensors = None if checkpoint.gguf is None else checkpoint.gguf.tensors
    plans = encoders.plan(checkpoint.config, limits, available, arguments.prompt, quantization, tensors)
    measured = limits()
    if arguments.json:
        found = {"model": arguments.model, "available_bytes": available, "limits": asdict(measured)}
        print(json.dumps({**found, "plans": [asdict(each) for each in plans]}))
    else:
        print(
            f"{arguments.model} on {measured.isa}, {measured.threads} threads: {measured.fma_gflops:.0f} GFLOPS, "
            f"{_gib(available)} available"
        )
        print(encoders.plan_table(plans, arguments.prompt))
    return 0


def _mapped(plan: MappedPlan) -> str:
    if not plan.fits:
        return f"what is not {_gib(plan.expert_bytes)} of experts does not fit, either"
    read = f"a token reads {plan.bytes_read_per_token / 2**20:,.0f} MiB from the disk"
    return (
        f"{_gib(plan.expert_bytes)} of experts in a file, {_gib(plan.bytes_in_memory)} of which fit into memory; "
        + (f"{read} where routing is uniform" if plan.bytes_read_per_token else "nothing is read twice")
    )


def _encoding(towers: Sequence[TowerPlan], dtypes: Sequence[str]) -> str:
    """A line about one tower, stored as each of `dtypes`."""
    from pace.memory import format_bytes

    first = towers[0]
    what = f"an image of {first.num_tokens:,} tokens"
    if first.clip_seconds:
        rate = first.num_tokens / first.clip_seconds
        what = f"a clip of {first.clip_seconds} s, {first.num_tokens:,} tokens and {rate:g} for each second,"
    times = ", ".join(f"{tower.encode_seconds:.1f} s ({dtype})" for tower, dtype in zip(towers, dtypes))
    weights = ", ".join(dict.fromkeys(_gib(tower.weight_bytes) for tower in towers))
    return (
        f"{what} is encoded in {times}, with {_gib(max(tower.encode_bytes for tower in towers))} of memory; its rows "
        f"take {format_bytes(first.row_bytes)}, and its tower {weights} of the weights"
    )


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
