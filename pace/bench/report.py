"""Formats a measurement for people: tables, and a plot."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from pace import _C
from pace.bench.plots import two_diagrams
from pace.bench.result import Phase, Result
from pace.bench.towers import TowerResult
from pace.memory import format_bytes
from pace.naming import dtype_name

NO_PROFILE = "no profile: only the native backend runs a program whose instructions can be timed"


def table(result: Result) -> str:
    """Formats the speeds and their shares of the machine's limits."""
    subject, limits, predicted = result.subject, result.limits, result.predicted
    dtype, kv_dtype = subject.model.storage_name, dtype_name(subject.model.kv_dtype)
    dtype += f" (cache {kv_dtype})" if kv_dtype != dtype else ""
    tokens, decode = f"{result.batch} x ({result.prompt} + {result.generated}) tokens", "decode"
    if result.depth:
        tokens = f"prefill of {result.prompt}, decode of {result.batch} x {result.generated} at {result.depth} tokens"
        decode = f"decode at {result.depth}"
    machine = f"{subject.backend} on {limits.isa}, {limits.threads} threads"
    lines = [
        f"{subject.name}, {dtype}, {machine}; {tokens}, median of {len(result.repeats)}",
        f"limits       {limits.read_gb_s:9.1f} GB/s read      {limits.fma_gflops:8.0f} GFLOPS fp32 FMA",
        f"prefill      {result.prefill_tokens_per_second:9.1f} tokens/s       MFU {result.prefill_mfu:5.2f}    "
        f"first token after {result.first_token_seconds * 1e3:,.0f} ms",
        f"{decode}{result.decode_tokens_per_second:{22 - len(decode)}.1f} tokens/s       "
        f"MBU {result.decode_mbu:5.2f}    MFU {result.decode_mfu:.2f}, {result.step_seconds * 1e3:,.2f} ms a step "
        f"at {result.context} tokens",
        f"predicted    {result.prompt / predicted.prefill_seconds:9.1f} tokens/s prefill, "
        f"{result.batch / predicted.step_seconds:.1f} decode; measured is {result.prefill_ratio:.2f} and "
        f"{result.decode_ratio:.2f} of that",
        f"memory       {subject.resident_mib:9.0f} MiB weights    resident: {subject.rss_before_mib:,.0f} MiB before, "
        f"at most {subject.load_peak_mib:,.0f} while loading, {result.peak_mib:,.0f} while running",
        f"load         {subject.load_seconds:9.2f} s",
    ]
    if moved := result.costs.state_traffic:
        share = result.batch * moved / result.costs.decode_bytes(result.batch, result.context)
        lines.append(
            f"states       {format_bytes(result.costs.slot_bytes):>13} a sequence   a decode step reads and writes "
            f"them: {share:.1%} of its bytes"
        )
    lines += map(_tower, result.towers)
    if result.outside_share is not None:
        lines.append(f"outside      {100 * result.outside_share:9.1f} % of a decode step: Python, dispatch, sampling")
    lines.append(
        "MFU, MBU     shares of these limits: arithmetic of the model in fp32, and memory that a step must move"
    )
    return "\n".join(lines + _above_limits(result))


def _tower(tower: TowerResult) -> str:
    planned, name, length = tower.planned, "image", ""
    if planned.clip_seconds:
        name, length = "clip", f" for {planned.clip_seconds} s of sound"
    return (
        f"{name:<13}{tower.seconds:9.2f} s              MFU {tower.mfu:5.2f}    {planned.num_tokens:,} tokens{length}; "
        f"measured is {tower.ratio:.2f} of predicted\n"
        f"{'':<13}{format_bytes(planned.encode_bytes):>11} while it is encoded, {format_bytes(planned.row_bytes)} of "
        f"rows, {format_bytes(planned.weight_bytes)} of weights"
    )


def _above_limits(result: Result) -> list[str]:
    """Explains shares of the limits above 1."""
    lines = []
    if result.decode_mbu > 1:
        lines.append("MBU > 1      a part of what a step reads stays in the caches, and the limit is that of memory")
    if max(result.prefill_mfu, result.decode_mfu) > 1:
        lines.append("MFU > 1      products have instructions for narrower numbers, and the limit is that of fp32")
    return lines


def profile(result: Result) -> str:
    """Formats the time of a prefill and of a decode step by kind of instruction, in the order of the program."""
    if result.decode is None:
        return NO_PROFILE
    return f"{_profile('prefill', result.prefill)}\n\n{_profile('decode step', result.decode)}"


def _profile(title: str, phase: Phase) -> str:
    lines = [f"{title:<26}{'count':>6}{'ms':>10}{'share':>8}{'GB/s':>8}"]
    rows = [*phase.instructions.items(), ("outside of the kernels", (0, phase.outside, 0.0))]
    for name, (count, seconds, num_bytes) in rows:
        speed = f"{num_bytes / seconds / 1e9:8.1f}" if num_bytes and seconds else ""
        lines.append(f"  {name:<24}{count or '':>6}{seconds * 1e3:>10.3f}{seconds / phase.seconds:>8.1%}{speed}")
    lines.append(f"  {'all':<24}{'':>6}{phase.seconds * 1e3:>10.3f}{1:>8.1%}")
    return "\n".join(lines)


def plot(result: Result, path: Path) -> None:
    """Plots the roofline of this machine with the model on it, and bars of the time by kind of instruction. Raises what
    `check_plot` raises."""
    limits = result.limits
    machine = f"{_C.cpu_info()['model_name']}, {limits.isa}, {limits.threads} threads, {date.today()}"
    title = f"{result.subject.name}, {result.subject.model.storage_name}\n{machine}"
    with two_diagrams(path, title, width_ratios=(3, 2)) as (roof, bars):
        _roofline(roof, result)
        _bars(bars, result)


def _roofline(axes, result: Result) -> None:
    limits, costs = result.limits, result.costs
    ridge = limits.fma_gflops / limits.read_gb_s
    intensities = sorted([2.0**-3, ridge, 2.0**11])
    axes.loglog(
        intensities,
        [min(limits.fma_gflops, limits.read_gb_s * x) for x in intensities],
        color="black",
        label="limit: read bandwidth, fp32 FMA",
    )
    prefill_flops = costs.prefill_flops(result.prompt)
    prefill_bytes = costs.step_weight_bytes(result.prompt) + costs.kv_bytes(result.prompt) + costs.state_traffic
    decode_bytes = costs.decode_bytes(result.batch, result.context)
    prefill = f"prefill of {result.prompt}: MFU {result.prefill_mfu:.2f}"
    decode = f"decode, batch {result.batch}: MBU {result.decode_mbu:.2f}"
    for label, flops, num_bytes, seconds, marker in (
        (prefill, prefill_flops, prefill_bytes, result.first_token_seconds, "s"),
        (decode, result.decode_flops, decode_bytes, result.step_seconds, "o"),
    ):
        axes.loglog([flops / num_bytes], [flops / seconds / 1e9], marker, markersize=9, label=label)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.6g}")  # 0.1, 10, 1,000 instead of powers of ten
    axes.set_xlabel("operations per byte moved")
    axes.set_ylabel("GFLOPS")
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(loc="lower right")


def _bars(axes, result: Result) -> None:
    phases = [(title, phase) for title, phase in (("prefill", result.prefill), ("decode", result.decode)) if phase]
    if not phases:
        axes.axis("off")
        axes.text(0.5, 0.5, NO_PROFILE.replace(": ", ":\n"), ha="center", va="center")
        return
    names = list(dict.fromkeys(name for _, phase in phases for name in phase.instructions)) + ["outside"]
    bottoms = [0.0] * len(phases)
    for name in names:
        shares = [
            (phase.outside if name == "outside" else phase.instructions.get(name, (0, 0.0, 0.0))[1]) / phase.seconds
            for _, phase in phases
        ]
        axes.bar([title for title, _ in phases], shares, bottom=bottoms, label=name)
        bottoms = [bottom + share for bottom, share in zip(bottoms, shares)]
    axes.set_ylabel("share of the time")
    # The order of the stack: the last on top.
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize="small", reverse=True)
