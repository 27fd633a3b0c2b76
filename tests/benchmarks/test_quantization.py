"""Results that `benchmarks/quantization.py` computes from runs, with made-up runtimes and speeds."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import quantization
from benchmarks.comparison.worker import WorkerError
from benchmarks.page import markers

SECONDS = {"bf16": 4.0, "int4": 1.0, "q4_0": 2.0}


class FakeWorker:
    log: list[tuple[str, str]] = []

    def __init__(self, runtime: str) -> None:
        self.runtime, self.variant = runtime, ""

    def ask(self, operation: str, **arguments):
        if operation == "load":
            self.variant = arguments["variant"]
            return {"step_weight_bytes": 1 << 20}
        if operation == "run":
            self.log.append((self.variant, operation))
            first = sum(variant == self.variant for variant, _ in self.log) == 1
            seconds = SECONDS[self.variant] * (100 if first else 1)
            return {"prefill_s": seconds, "step_s": seconds / 10}
        if operation == "limits":  # 10 and 100 between two of them
            self.share = 2.0 - getattr(self, "share", 1.5)
            return {"isa": "avx2", "threads": 2, "read_gb_s": 10 * self.share, "fma_gflops": 100 * self.share}
        return {"machine": {"isa": "avx2", "threads": 2}, "status": {"peak_mib": 500.0}}[operation]

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        pass


@pytest.fixture
def fake(monkeypatch, tmp_path):
    def conversion(runtime, variant, *others):
        if variant != "q4_0":
            raise WorkerError("there is no llama.cpp here")
        return tmp_path

    FakeWorker.log = []
    monkeypatch.setattr(quantization, "start", lambda runtime, options: FakeWorker(runtime))
    monkeypatch.setattr(quantization, "ensure_checkpoint", lambda shape, folder: tmp_path)
    monkeypatch.setattr(quantization, "ensure_conversion", conversion)

    def run(*arguments: str) -> tuple[dict, str]:
        page = tmp_path / "page.md"
        page.write_text("\n".join(markers(quantization.SCRIPT)))
        monkeypatch.setattr(
            sys, "argv", ["quantization.py", "smollm2-135m", *arguments, "--folder", str(tmp_path), "--into", str(page)]
        )
        quantization.main()
        return page.read_text()

    return run


def test_ratios_are_of_a_round_and_the_first_round_does_not_count(fake, capsys):
    page = fake("--formats", "int4", "--rounds", "2", "--prompt", "100")
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    [row] = report["rows"]
    assert [variant for variant, _ in FakeWorker.log] == [
        "bf16",
        "int4",
        "q4_0",
        "q4_0",
        "int4",
        "bf16",
        "bf16",
        "int4",
        "q4_0",
    ]
    assert (row["prefill"], row["decode"]) == (100.0, 10.0)
    kv_bytes = 124 * 30 * 2 * 3 * 64 * 2  # half-way through 48 steps
    assert row["decode_mbu"] == pytest.approx(((1 << 20) + kv_bytes) * 10.0 / 10e9)
    assert (
        row["prefill_over_bf16"],
        row["decode_over_bf16"],
        row["prefill_over_nearest"],
        row["decode_over_nearest"],
    ) == (4.0, 4.0, 2.0, 2.0)
    assert "| int4 |" in page and "| q4_0 | 2.00 | 2.00 |" in page and "--prompt 100 --rounds 2" in page


def test_without_llama_cpp_its_columns_are_empty(fake, capsys):
    SECONDS["nf4"] = 1.0
    page = fake("--formats", "nf4", "--rounds", "1")
    assert "| iq4_nl |  |  |" in page and "no llama.cpp iq4_nl: there is no llama.cpp here" in capsys.readouterr().err


def test_every_format_has_a_nearest_type_that_llama_cpp_can_make():
    from benchmarks.comparison.runtimes.llama_cpp_runtime import FILE_TYPES
    from pace.quant import FORMATS

    assert set(quantization.NEAREST) == set(FORMATS) and set(quantization.NEAREST.values()) <= set(FILE_TYPES)


def test_the_machines_paths_are_not_in_the_command(fake, tmp_path: Path):
    assert str(tmp_path) not in fake("--formats", "int4", "--rounds", "1")
