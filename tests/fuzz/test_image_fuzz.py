"""Hostile images give one clear error, or pixels; the full run is `python -m tests.fuzz.images --cases 2000`."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from pace.media import images
from tests.fuzz import images as cases
from tests.media.samples import files
from tests.plugins.tiers import ROOT, commit


@pytest.mark.parametrize("num_cases", [200, pytest.param(2000, marks=pytest.mark.thorough)])
def test_damaged_images_and_bombs_give_pixels_or_one_clear_error(num_cases):
    """Runs in a process of its own, which limits its memory. Other commits have other cases."""
    first = 0 if num_cases == 2000 else 2000 + commit()[1] * num_cases
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.images", "--cases", str(num_cases)]
    done = subprocess.run([*command, "--first", str(first)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command} --first {first}\n{done.stderr[-5000:]}"
    counts = json.loads(done.stdout.splitlines()[-1])
    # Some mutations are harmless, most are not.
    assert counts["image"] >= num_cases // 10 and counts["MediaError"] >= 600 + num_cases // 4, counts


def test_the_same_seed_gives_the_same_case():
    assert [cases.mutated(seed) for seed in range(50)] == [cases.mutated(seed) for seed in range(50)]
    assert sum(data != files()[name] for name, data in map(cases.mutated, range(50))) > 40


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (lambda opened: sum(range(3 * 10**6)), " s ("),
        (lambda opened: 1 / 0, "ZeroDivisionError"),
        (lambda opened: (_ for _ in ()).throw(images.MediaError(f"cannot read {opened.data!r}")), "cannot read"),
    ],
    ids=["time", "another error", "quoted data"],
)
def test_the_harness_notices(behaviour, expected, monkeypatch):
    monkeypatch.setattr(cases, "load_rgb", behaviour)
    monkeypatch.setattr(cases, "MAX_SECONDS", 0.01 if expected == " s (" else 60)
    outcome = cases.outcome_of(files()["png"])
    assert outcome.startswith("FAIL: ") and expected in outcome


def test_the_harness_notices_memory():
    """In a process of its own, as the fuzz runs. Memory that earlier tests have freed would not count as growth."""
    code = (
        "from tests.fuzz import images; from tests.media.samples import files; "
        "images.load_rgb = lambda opened: bytearray(100 << 20).count(b'x'); "
        "print(images.outcome_of(files()['png']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.stdout.startswith("FAIL: ") and "MB of memory" in done.stdout, done
