"""Formats results: tables for the terminal, and `docs/benchmarks.md`, in which the part between two markers is
generated from all results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.comparison import targets
from benchmarks.comparison.results import Results, Run, Scenario, Subject
from benchmarks.comparison.runtimes.base import GGUF_FILES

BEGIN = "<!-- made by benchmarks/compare.py --render; what is between the markers is written anew each time -->"
END = "<!-- end of what benchmarks/compare.py makes -->"
TOLERANCES = {"fp32": 0.02, "fp16": 0.02, "bf16": 0.2, "int8": 0.3, "int4": 0.6}
TOLERANCES |= dict.fromkeys(GGUF_FILES, 0.5)  # compared with llama.cpp on the same file
"""Maximum relative error of the logits for a runtime to count as running the same model. With a wrong rotation or order
of heads it is above 1.

The bound includes approximations of the rotary scaling (CTranslate2: 0.008 in fp32) and the rounding of weights. For a
file, two runtimes round the inputs of products differently. With random weights this gives 0.33 in 16 layers, with both
equally far from fp32."""

Table = tuple[list[str], list[list[str]]]


def text(results: Results) -> str:
    """Formats one result for a terminal."""
    parts = [f"{results.name}: {machine_line(results)}"]
    for shape in results.shapes:
        parts += [f"{shape}, {scenario_line(results.scenarios[0])}", _plain(main_table(results, shape))]
        for scenario in _other_scenarios(results, shape):
            parts += [f"{shape}, {scenario_line(scenario)}", _plain(other_table(results, shape, scenario))]
    parts += ["Against the targets", _plain(target_table(results)), target_line(results), *notes(results)]
    return "\n\n".join(parts)


def render(page: str, every: list[Results], pictures: dict[str, list[str]]) -> str:
    """Returns `page` with the part between the markers generated anew. `pictures`: paths for the name of each result,
    relative to the page.

    Raises ValueError unless each marker occurs once, in order."""
    if page.count(BEGIN) != 1 or page.count(END) != 1 or page.index(BEGIN) > page.index(END):
        raise ValueError(f"the page must have these two lines once each, in this order:\n{BEGIN}\n{END}")
    before, rest = page.split(BEGIN)
    sections = [_section(results, pictures.get(results.name, [])) for results in every]
    return "\n\n".join([before + BEGIN, *_glance(every), *sections, END]) + rest.split(END)[1]


def disagreements(results: Results) -> list[str]:
    """Lists subjects whose logits differ too much to be from the same model."""
    return [
        f"{s.shape}, {s.label}: logits are {s.error:.2g} standard deviations off"
        for s in results.subjects
        if s.error is not None and not s.error <= TOLERANCES[s.dtype]
    ]


def machine_line(results: Results) -> str:
    machine = results.machine
    isa = machine["isa"] + (" (forced)" if machine["is_forced"] else "")
    peers = (
        f"on {machine['peers_isa']} if they have a variable for it" if machine["peers_isa"] else "on their own choice"
    )
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads; pace on {isa}, peers {peers}; "
        f"{results.date}"
    )


def scenario_line(scenario: Scenario) -> str:
    sequences = "one sequence" if scenario.batch == 1 else f"{scenario.batch} sequences"
    return f"{sequences}: prompts of {scenario.prompt:,} tokens, then {scenario.generate} decode steps"


def main_table(results: Results, shape: str) -> Table:
    """One row for each runtime and kind of weights. `pace / it` compares with pace in the same kind of weights, in the
    same rounds."""
    header = [
        "runtime",
        "weights",
        "prefill t/s",
        "MFU",
        "decode t/s",
        "MBU",
        "pace / it: prefill",
        "decode",
        "load s",
        "peak MiB",
        "error",
        "argmax",
    ]
    scenario, rows = results.scenarios[0], []
    for subject in measured(results, shape, scenario):

        def median(value: Callable[[Run], float | None], subject: Subject = subject) -> float | None:
            return results.median(subject, scenario, value)

        rows.append(
            [subject.runtime, subject.variant]
            + [_number(median(targets.prefill_rate), ".1f"), _number(median(targets.prefill_mfu), ".2f")]
            + [_number(median(targets.decode_rate), ".1f"), _number(median(targets.mbu), ".2f")]
            + [_ratio(results, subject, scenario, value) for value in (targets.prefill_rate, targets.decode_rate)]
            + [_number(subject.load_s, ".2f"), _number(subject.peak_mib, ",.0f"), _number(subject.error, ".2g")]
            + [{None: "", True: "same", False: "other"}[subject.same_argmax]]
        )
    return header, rows


def other_table(results: Results, shape: str, scenario: Scenario) -> Table:
    header = ["runtime", "weights", "prefill t/s", "decode t/s", "a sequence", "MBU", "MFU", "pace / it: decode"]
    rows = []
    for subject in measured(results, shape, scenario):
        values = [
            results.median(subject, scenario, value)
            for value in (targets.prefill_rate, targets.decode_rate, targets.mbu, targets.decode_mfu)
        ]
        prefill, decode, mbu, mfu = values
        rows.append(
            [
                subject.runtime,
                subject.variant,
                _number(prefill, ".1f"),
                _number(decode, ".1f"),
                _number(decode / scenario.batch, ".1f"),
            ]
            + [_number(mbu, ".2f"), _number(mfu, ".2f"), _ratio(results, subject, scenario, targets.decode_rate)]
        )
    return header, rows


def target_table(results: Results) -> Table:
    rows = []
    for finding in targets.findings(results):
        sign = "<=" if finding.at_most else ">="
        digits = ".0f" if finding.unit else ".2f"
        rows.append(
            [
                finding.shape,
                finding.what,
                f"{sign} {finding.target:{digits}}{finding.unit}",
                _number(finding.measured, digits),
                finding.verdict,
            ]
        )
    return ["shape", "what", "target", "measured", ""], rows


def target_line(results: Results) -> str:
    met = [finding.met for finding in targets.findings(results)]
    return f"{met.count(True)} met, {met.count(False)} missed, {met.count(None)} not measured."


def notes(results: Results) -> Iterator[str]:
    """Yields remarks that the tables need."""
    missing, began = {}, {run.key for run in results.runs}
    for subject in results.subjects:
        if subject.missing:
            how = "Not measured to the end" if subject.key in began else "Not measured"
            missing.setdefault((how, subject.runtime, subject.missing), []).append(f"{subject.shape} {subject.variant}")
    for (how, runtime, reason), where in missing.items():
        yield f"{how}: {runtime} ({', '.join(where)}): {reason.splitlines()[0]}"
    for line in results.skipped:
        yield f"Left out: {line}"
    for line in disagreements(results):
        yield f"NOT THE SAME MODEL: {line}"
    if results.rounds_again:
        yield (
            f"In some of the {results.rounds} rounds the limits changed too much. Repeated measurements: "
            f"{results.rounds_again}. Rounds still unsteady: {results.unsteady_rounds}."
        )
    if results.runs:
        worst = max(results.runs, key=lambda run: run.others_cpu)
        busy = sum(run.others_cpu > 0.05 for run in results.runs)
        yield (
            f"In {busy} of {len(results.runs)} runs other processes used more than 0.05 cores; the maximum was "
            f"{worst.others_cpu:.2f}."
        )


def cells(every: list[Results]) -> Iterator[tuple[Results, Subject, list[list[float]]]]:
    """Yields each peer measured next to pace with weights of the same kind. With it come pace's ratios of speed in
    pairs of neighbouring runs, of prefill and of decode."""
    for results in every:
        scenario = results.scenarios[0]
        for peer in (s for shape in results.shapes for s in measured(results, shape, scenario)):
            ours = results.ours(peer)
            if peer.runtime != "pace" and ours is not None:
                values = (targets.prefill_rate, targets.decode_rate)
                yield results, peer, [results.ratios(ours, peer, scenario, value) for value in values]


def medians(every: list[Results]) -> dict[str, tuple[int, float, float]]:
    """Returns, for each runtime, its number of cells and the median of pace's ratios of prefill and of decode."""
    ratios: dict[str, list[list[float]]] = {}
    for _, peer, pairs in cells(every):
        ratios.setdefault(peer.runtime, []).append([median(values) for values in pairs if values])
    ratios = {name: [both for both in found if len(both) == 2] for name, found in ratios.items()}
    return {name: (len(found), *map(median, zip(*found))) for name, found in ratios.items() if found}


def _glance(every: list[Results]) -> list[str]:
    """The ratios of all results in one table, after their medians."""
    header = ["result", "weights", "pace over", "prefill", "its pairs", "decode", "its pairs"]
    rows = []
    for results, peer, pairs in cells(every):
        row = [f"[{results.name}](#{results.name.replace('.', '')})", peer.dtype, peer.label]
        for ratios in pairs:
            row += [_number(median(ratios) if ratios else None, ".2f")]
            row += [f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else ""]
        rows.append(row)
    if not rows:
        return []
    words = (
        "This table shows how many times as fast as a peer `pace` is, with weights of the same kind. Ratios are of "
        "pairs of neighbouring runs: their median and their span."
    )
    summary = [
        [name, str(number), f"{prefill:.2f}", f"{decode:.2f}"]
        for name, (number, prefill, decode) in sorted(medians(every).items())
    ]
    return [
        "## At a glance",
        "Medians of all cells in the next table:",
        _markdown((["pace over", "cells", "prefill", "decode"], summary)),
        words,
        _markdown((header, rows)),
    ]


def _section(results: Results, pictures: list[str]) -> str:
    reads, peaks = [run.read_gb_s for run in results.runs], [run.fma_gflops for run in results.runs]
    machine = results.machine
    lines = [f"## {results.name}", ""]
    lines += [
        (
            f"{machine_line(results)}. {machine['memory_gib']} GiB, Linux {machine['system']}, Python "
            f"{machine['python']}; features: {', '.join(machine['features'])}."
        ),
        "",
    ]
    if reads:
        lines += [
            (
                f"Limits, measured before and after each of {len(reads)} runs: {_span(reads)} GB/s read, "
                f"{_span(peaks)} GFLOPS fp32 FMA (minimum, median, maximum)."
            ),
            "",
        ]
    lines += [
        f"Versions: {', '.join(f'{name} {version}' for name, version in results.versions.items())}.",
        "",
        "```text",
        results.command,
        "```",
        "",
    ]
    lines += [f"![Prefill and decode of every runtime, and the limit]({picture})\n" for picture in pictures]
    for shape in results.shapes:
        lines += [f"### {shape}, {results.parameters[shape] / 1e9:.2f} billion weights", ""]
        lines += [f"{scenario_line(results.scenarios[0])}:".capitalize(), "", _markdown(main_table(results, shape)), ""]
        for scenario in _other_scenarios(results, shape):
            lines += [
                f"{scenario_line(scenario)}:".capitalize(),
                "",
                _markdown(other_table(results, shape, scenario)),
                "",
            ]
    lines += ["### Against the targets", "", target_line(results), "", _markdown(target_table(results)), ""]
    lines += [f"- {line}" for line in notes(results)]
    lines += [f"- {line}" for line in _settings(results)]
    return "\n".join(lines).rstrip()


def _other_scenarios(results: Results, shape: str) -> list[Scenario]:
    """Scenarios after the first with measurements; skipped ones are listed in the notes."""
    return [scenario for scenario in results.scenarios[1:] if measured(results, shape, scenario)]


def _settings(results: Results) -> Iterator[str]:
    for runtime in dict.fromkeys(subject.runtime for subject in results.subjects):
        chosen: dict[str, list[str]] = {}
        for subject in results.subjects:
            if subject.runtime == runtime and subject.settings:
                words = "; ".join(f"{name}: {value}" for name, value in subject.settings.items())
                chosen.setdefault(words, []).append(f"{subject.shape} {subject.variant}")
        for words, where in chosen.items():
            yield f"{runtime} ({', '.join(where)}): {words}"


def measured(results: Results, shape: str, scenario: Scenario) -> list[Subject]:
    """Measured subjects in the order of the kinds of weights, with pace first in each."""
    dtypes = list(TOLERANCES)
    found = [s for s in results.subjects if s.shape == shape and results.runs_of(s, scenario)]
    return sorted(found, key=lambda s: (dtypes.index(s.dtype), s.runtime != "pace"))


def _ratio(results: Results, subject: Subject, scenario: Scenario, value: Callable[[Run], float]) -> str:
    ours = results.ours(subject)
    if subject.runtime == "pace" or ours is None:
        return ""
    return _number(results.ratio(ours, subject, scenario, value), ".2f")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _span(values: list[float]) -> str:
    ordered = sorted(values)
    return ", ".join(f"{value:.0f}" for value in (ordered[0], ordered[len(ordered) // 2], ordered[-1]))


def _plain(table: Table) -> str:
    header, rows = table
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in [header, *rows]
    )


def _markdown(table: Table) -> str:
    header, rows = table
    lines = [header, ["---"] * 2 + ["---:"] * (len(header) - 2), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def read_all(folder: Path) -> list[Results]:
    """Reads every result in `folder`, by name."""
    return [Results.load(path) for path in sorted(folder.glob("*.json"))]
