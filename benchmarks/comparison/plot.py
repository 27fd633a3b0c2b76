"""Draws results as bars of prefill and decode. The picture of one result also shows the machine's limit for the same
bytes or operations. The front page's picture shows several results, one below the other."""

from __future__ import annotations

from pathlib import Path

from benchmarks.comparison.report import machine_line, measured
from benchmarks.comparison.results import Results

COLORS = {
    "pace": "#1b6ca8",
    "transformers": "#c9a227",
    "llama.cpp": "#6a994e",
    "openvino-genai": "#7b5ea7",
    "onnxruntime-genai": "#8d99ae",
    "ctranslate2": "#bc6c25",
}


def draw(results: Results, path: Path) -> None:
    """Writes one PNG: a row for each shape, with prefill left and decode right. Raises ImportError without
    matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    scenario, shapes = results.scenarios[0], results.shapes
    bars = max((len(measured(results, shape, scenario)) for shape in shapes), default=1)
    figure, axes = pyplot.subplots(len(shapes), 2, figsize=(13, len(shapes) * (1.2 + 0.28 * bars)), squeeze=False)
    for (left, right), shape in zip(axes, shapes):
        _bars(
            left,
            results,
            shape,
            f"{shape}: prefill of {scenario.prompt}, tokens/s",
            lambda run: run.prefill_rate,
            lambda run: run.prefill_rate / run.prefill_mfu,
        )
        _bars(
            right,
            results,
            shape,
            f"{shape}: decode, tokens/s",
            lambda run: run.decode_rate,
            lambda run: run.decode_rate / run.decode_mbu if run.decode_mbu else None,
        )
    figure.suptitle(f"{machine_line(results)}\nblack: fp32 FMA peak and read bandwidth", fontsize="medium")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _bars(axes, results: Results, shape: str, title: str, value, limit) -> None:
    scenario = results.scenarios[0]
    subjects = measured(results, shape, scenario)
    for index, subject in enumerate(subjects):
        rate, most = (results.median(subject, scenario, what) for what in (value, limit))
        axes.barh(index, rate, color=COLORS.get(subject.runtime, "gray"))
        axes.text(rate, index, f" {rate:.0f}" if rate >= 100 else f" {rate:.1f}", va="center", fontsize="small")
        if most:
            axes.plot([most, most], [index - 0.45, index + 0.45], color="black", linewidth=2)
    axes.set_yticks(range(len(subjects)), [subject.label for subject in subjects], fontsize="small")
    axes.invert_yaxis()
    axes.set_title(title, fontsize="medium")
    axes.grid(True, axis="x", alpha=0.25)


def draw_front_page(every: list[Results], path: Path) -> None:
    """Writes one PNG with prefill left and decode right, and a group of bars for each kind of weights in `every`. All
    results must have the same machine and shape. Raises ImportError without matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    pairs = [
        (results, subject)
        for results in every
        for subject in measured(results, results.shapes[0], results.scenarios[0])
    ]
    figure, axes = pyplot.subplots(1, 2, figsize=(13, 1.4 + 0.2 * len(pairs)))
    scenario, shape = every[0].scenarios[0], every[0].shapes[0]
    for axis, title, value in (
        (axes[0], f"prefill of {scenario.prompt} tokens, tokens/s", lambda run: run.prefill_rate),
        (axes[1], "decode, tokens/s", lambda run: run.decode_rate),
    ):
        place, centres = 0.0, {}
        for index, (results, subject) in enumerate(pairs):
            if index and pairs[index - 1][1].dtype != subject.dtype:
                place += 0.8
            rate = results.median(subject, results.scenarios[0], value)
            ours = subject.runtime == "pace"
            axis.barh(place, rate, height=0.9, color=COLORS.get(subject.runtime, "gray"))
            axis.text(rate, place, f" {rate:.0f}", va="center", fontsize="small", weight="bold" if ours else "normal")
            centres.setdefault(subject.dtype, []).append(place)
            place += 1
        axis.set_yticks([sum(places) / len(places) for places in centres.values()], list(centres))
        axis.tick_params(axis="y", length=0)
        axis.invert_yaxis()
        axis.set_title(title, fontsize="medium")
        axis.spines[["top", "right"]].set_visible(False)
    found = [name for name in COLORS if any(subject.runtime == name for _, subject in pairs)]
    axes[1].legend(handles=[Patch(color=COLORS[name], label=name) for name in found], frameon=False, loc="upper right")
    machine = every[0].machine
    figure.suptitle(
        f"{shape} on {machine['cpu']}, {machine['threads']} threads, {machine['isa']}; by kind of weights",
        fontsize="medium",
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
