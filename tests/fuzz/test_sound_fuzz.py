"""Hostile clips give one clear error, or samples; the full run is `python -m tests.fuzz.sounds --cases 2000`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pace.media.media import Layout
from tests.fuzz import sounds as cases
from tests.fuzz.images import outcome_of
from tests.plugins.tiers import ROOT, commit


@pytest.mark.parametrize("num_cases", [200, pytest.param(2000, marks=pytest.mark.thorough)])
def test_damaged_clips_give_samples_or_one_clear_error(num_cases):
    """Runs in a process of its own, which limits its memory. Other commits have other cases."""
    first = 0 if num_cases == 2000 else 2000 + commit()[1] * num_cases
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.sounds", "--cases", str(num_cases)]
    done = subprocess.run([*command, "--first", str(first)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command} --first {first}\n{done.stderr[-5000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    # Some mutations are harmless, most are not.
    assert counts["sound"] >= num_cases // 10 and counts["MediaError"] >= 600 + num_cases // 4, counts


def test_the_same_seed_gives_the_same_case():
    assert [cases.mutated(seed) for seed in range(50)] == [cases.mutated(seed) for seed in range(50)]
    assert sum(data != cases.files()[name] for name, data in map(cases.mutated, range(50))) > 40


def test_the_harness_notices_wrong_counts_and_values(monkeypatch):
    data = cases.files()["wav 16"]
    assert outcome_of(data, cases.read) == "sound"
    monkeypatch.setattr(type(cases.PROCESSOR), "layout", lambda self, source: Layout("", (1,)))
    assert outcome_of(data, cases.read) == "FAIL: another number of tokens"
