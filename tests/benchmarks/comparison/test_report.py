"""The report of `benchmarks/compare.py` on made-up figures: medians, ratios of pairs, verdicts on targets, and the
page."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from benchmarks import compare
from benchmarks.comparison import report, targets
from benchmarks.comparison.results import Results, Run, Scenario, Subject

MAIN, BATCH = Scenario(512, 64), Scenario(128, 32, 32)
SHAPE = "qwen2.5-0.5b"
FMA, READ = 200.0, 30.0


def run(
    runtime: str,
    variant: str,
    prefill_s: float,
    step_s: float,
    index: int = 0,
    scenario: Scenario = MAIN,
    group: int = 1,
) -> Run:
    """A run with 100 GFLOP per prompt, and 1 GFLOP and 0.9 GB per step."""
    return Run(
        SHAPE,
        runtime,
        variant,
        group,
        index,
        scenario,
        prefill_s,
        step_s,
        100 * 10**9,
        10**9,
        900 * 10**6,
        READ,
        FMA,
        0.01,
    )


@pytest.fixture
def results() -> Results:
    """Results in which pace's prefill is twice as fast as llama.cpp's in each round, while the machine slows down."""
    pace = Subject(
        SHAPE,
        "pace",
        "bf16",
        "bf16",
        load_s=1.0,
        peak_mib=1200.0,
        weight_bytes=988 * 10**6,
        error=0.01,
        same_argmax=True,
    )
    llama = Subject(
        SHAPE,
        "llama.cpp",
        "bf16",
        "bf16",
        load_s=0.1,
        peak_mib=1100.0,
        weight_bytes=988 * 10**6,
        error=0.01,
        same_argmax=True,
    )
    q8 = Subject(SHAPE, "llama.cpp", "q8_0", "int8", error=0.03, same_argmax=False)
    torch = Subject(
        SHAPE, "transformers", "bf16", "bf16", missing="ModuleNotFoundError: No module named 'transformers'\nmore"
    )
    made = Results(
        "made-up", "2026-01-01", "python benchmarks/compare.py", {"cpu": "CPU | one", "features": ["avx2"], "cores": 2,
        "threads": 2, "isa": "avx2"},
        {"llama-cpp-python": "0.3.36"}, [MAIN, BATCH], {SHAPE: 494 * 10**6}, [pace, llama, q8, torch],
    )  # fmt: skip
    made.machine |= {"is_forced": True, "peers_isa": None, "memory_gib": 24.0, "system": "6.1", "python": "3.11"}
    for index, slow in enumerate((1.0, 1.5, 4.0)):
        made.runs += [
            run("pace", "bf16", 1.0 * slow, 0.04 * slow, index),
            run("llama.cpp", "bf16", 2.0 * slow, 0.03 * slow, index),
        ]
        made.runs += [run("llama.cpp", "q8_0", 1.0, 0.02, index, group=2)]
    made.runs += [run("pace", "bf16", 1.0, 0.1, scenario=BATCH)]
    return made


def test_medians_and_ratios_of_pairs(results):
    pace, llama, q8, torch = results.subjects
    assert results.median(pace, MAIN, targets.prefill_rate) == 512 / 1.5
    assert results.median(pace, MAIN, targets.mbu) == pytest.approx(0.9 / (0.04 * 1.5) / READ)
    assert results.median(pace, MAIN, targets.prefill_mfu) == pytest.approx(100 / 1.5 / FMA)
    assert results.ratio(pace, llama, MAIN, targets.prefill_rate) == pytest.approx(2.0)
    assert results.ratio(pace, llama, MAIN, targets.decode_rate) == pytest.approx(0.75)
    assert results.ratio(pace, q8, MAIN, targets.decode_rate) is None  # no round has runs of both
    assert results.median(torch, MAIN, targets.decode_rate) is None
    assert results.ours(llama) is pace and results.ours(q8) is None


def test_a_ratio_is_of_the_runs_of_one_round(results):
    """The ratio of both medians differs if a slow round affects only one side."""
    pace, llama = results.subjects[:2]
    results.runs.append(run("llama.cpp", "bf16", 100.0, 1.0, index=9))
    assert results.ratio(pace, llama, MAIN, targets.prefill_rate) == pytest.approx(2.0)


def test_verdicts(results):
    found = {finding.what: finding for finding in targets.findings(results)}
    assert found["decode, bf16: MBU"].verdict == "missed by 45.7%"
    assert found["prefill of 512 tokens, bf16: times llama.cpp"].verdict == "met"
    assert found["prefill of 512 tokens, bf16: times transformers"].verdict == "not measured"
    assert found["decode, bf16: never slower than llama.cpp"].verdict == "missed by 25.0%"
    assert found["decode, int8: MBU"].verdict == "not measured"
    assert found["decode of 32 sequences, bf16: times one sequence"].measured == pytest.approx(320 / (1 / 0.06))
    assert found["decode of 32 sequences, bf16: times one sequence"].met
    memory = found["peak memory, bf16: 1.1 x weights + 300 MB"]
    assert memory.met and memory.target == pytest.approx((1.1 * 988e6 + 3e8) / 2**20)
    results.subjects[0].peak_mib = 1400.0
    assert next(f for f in targets.findings(results) if f.what == memory.what).verdict == "missed by 5.9%"
    results.subjects[0].weight_bytes = 1200 * 10**6  # some weights have more bits than their format
    assert next(f for f in targets.findings(results) if f.what == memory.what).met


def test_targets_are_for_large_shapes(results):
    results.parameters[SHAPE] = 10**8
    assert not list(targets.findings(results))


def test_of_several_kinds_of_as_many_bits_the_fastest_peer_counts(results):
    results.subjects.append(Subject(SHAPE, "llama.cpp", "bf16-fast", "bf16"))
    results.runs += [
        run("llama.cpp", "bf16-fast", 0.8 * slow, 1.0, index) for index, slow in enumerate((1.0, 1.5, 4.0))
    ]
    found = {finding.what: finding for finding in targets.findings(results)}
    assert found["prefill of 512 tokens, bf16: times llama.cpp"].measured == pytest.approx(0.8)


def test_the_page_keeps_what_is_written_by_hand(results):
    page = f"# By hand\n\n{report.BEGIN}\nold figures\n{report.END}\n\nBy hand too.\n"
    made = report.render(page, [results, replace(results, name="another")], {"made-up": ["picture.png"]})
    assert made.startswith("# By hand\n") and made.endswith("\n\nBy hand too.\n") and "old figures" not in made
    assert "## made-up" in made and "## another" in made and made.count("](picture.png)") == 1
    assert report.render(made, [results, replace(results, name="another")], {"made-up": ["picture.png"]}) == made
    row = next(line for line in made.splitlines() if line.startswith("| llama.cpp | bf16 |"))
    assert (
        re.sub(r"\s+", " ", row)
        == "| llama.cpp | bf16 | 170.7 | 0.17 | 22.2 | 0.67 | 2.00 | 0.75 | 0.10 | 1,100 | 0.01 | same |"
    )
    assert (
        "Not measured: transformers (qwen2.5-0.5b bf16): ModuleNotFoundError: No module named 'transformers'\n" in made
    )
    assert "```text\npython benchmarks/compare.py\n```" in made and "llama-cpp-python 0.3.36" in made
    assert "2 threads; pace on avx2 (forced), peers on their own choice; 2026-01-01" in made
    assert "\n4 met, 4 missed, 8 not measured.\n" in made
    assert "30, 30, 30 GB/s read, 200, 200, 200 GFLOPS" in made


@pytest.mark.parametrize(
    "page", ["no markers", f"{report.END}\n{report.BEGIN}", report.BEGIN, f"{report.BEGIN}{report.BEGIN}{report.END}"]
)
def test_a_page_without_its_markers_is_refused(page, results):
    with pytest.raises(ValueError, match="once each, in this order"):
        report.render(page, [results], {})


def test_the_text_for_a_terminal(results):
    text = report.text(results)
    assert "one sequence: prompts of 512 tokens, then 64 decode steps" in text and "missed by 45.7%" in text
    assert "Not measured: transformers" in text and "NOT THE SAME MODEL" not in text


def test_what_failed_half_way_keeps_its_runs(results):
    pace, llama = results.subjects[:2]
    pace.missing = "its process ended with code -9"
    assert "Not measured to the end: pace (qwen2.5-0.5b bf16): its process ended with code -9" in list(
        report.notes(results)
    )
    assert results.ratio(results.ours(llama), llama, MAIN, targets.prefill_rate) == pytest.approx(2.0)


def test_another_model_is_told(results):
    results.subjects[1].error = 1.4
    assert report.disagreements(results) == [f"{SHAPE}, llama.cpp bf16: logits are 1.4 standard deviations off"]
    assert "NOT THE SAME MODEL" in report.text(results)
    results.subjects[1].error = float("nan")
    assert report.disagreements(results)


def test_results_survive_their_file(results, tmp_path):
    results.save(tmp_path / "made-up.json")
    assert report.read_all(tmp_path) == [results]
    (tmp_path / "made-up.json").write_text('{"format": 0}')
    with pytest.raises(ValueError, match="not a result of this version"):
        report.read_all(tmp_path)


def test_the_picture(results, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.comparison import plot

    plot.draw(results, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_committed_page_is_what_the_committed_results_say():
    page = compare.PAGE.read_text()
    every = report.read_all(compare.RESULTS)
    assert report.render(page, every, compare.pictures(every)) == page, "run: python benchmarks/compare.py --render"


def test_the_front_page_says_what_was_measured():
    """The picture shows no runtime that is faster. The first bullet has the medians of all cells."""
    every = {results.name: results for results in report.read_all(compare.RESULTS)}
    runtimes = set()
    for results in map(every.get, compare.FRONT_PAGE):
        [shape], scenario = results.shapes, results.scenarios[0]
        for peer in report.measured(results, shape, scenario):
            runtimes.add(peer.runtime)
            for value in (targets.prefill_rate, targets.decode_rate):
                ratio = results.ratio(results.ours(peer), peer, scenario, value)
                assert peer.runtime == "pace" or ratio >= 1, (results.name, peer.label)
    words = " ".join((compare.ROOT / "README.md").read_text().split())
    number, *llama = report.medians(list(every.values()))["llama.cpp"]
    _, *ik_llama = report.medians(list(every.values()))["ik_llama.cpp"]
    assert len(runtimes - {"pace"}) == 5
    assert "prompts {:.1f} times as fast as llama.cpp, and writes {:.1f} times".format(*llama) in words
    assert (
        f"median of {number} cells" in words and "For ik_llama.cpp it is {:.1f} and {:.1f}.".format(*ik_llama) in words
    )


def test_a_glance_has_the_ratios_and_spans_of_all_results(results):
    [heading, _, summary, _, table] = report._glance([results])
    peers = [peer for peer in report.measured(results, SHAPE, MAIN) if peer.runtime != "pace" and results.ours(peer)]
    assert heading == "## At a glance" and table.count("\n") == 1 + len(peers)
    assert "| 2.00 | 2.00 to 2.00 |" in table and "| 1 | 2.00 | 0.75 |" in summary


def test_the_picture_of_the_front_page(results, tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.comparison import plot

    plot.draw_front_page([results, results], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
