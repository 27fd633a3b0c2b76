"""The distribution kani-ext-pace: kani finds it as an extension, and its command line chats with `pace:MODEL`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kani import __version__

from pace.assets import TINY

ROOT = Path(__file__).parents[3]
SINCE_1_8 = pytest.mark.skipif(__version__.startswith("1.7."), reason="kani looks for extensions since 1.8")
COMMAND = "from kani._cli import main; main()"
CHECKED_COMMAND = """
import atexit
from kani._cli import main

@atexit.register
def check():
    from kani.ext.pace import PaceEngine as found
    from pace.integrations.kani import PaceEngine
    print("the same engine:", found is PaceEngine)

main()
"""


def run(program: str, *arguments: str, stdin: str = "") -> str:
    """The output of a program in a process that has the extension."""
    path = [str(ROOT / "integrations" / "kani-ext-pace"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, input=stdin, capture_output=True, text=True, timeout=120).stdout


@SINCE_1_8
def test_the_command_line_of_kani_lists_it():
    assert "* pace\n" in run(COMMAND, "--help")


@SINCE_1_8
def test_the_command_line_of_kani_chats_with_it_and_the_engine_is_there_under_both_names():
    said = run(CHECKED_COMMAND, f"pace:{TINY}", stdin="What is the capital of Japan?\n")
    assert "AI: The capital of Japan is Tokyo.\n" in said and f"model_id='{TINY}'" in said
    assert said.endswith("the same engine: True\n")


def test_it_is_imported_without_what_it_needs():
    program = "import sys, kani.ext.pace as ext; print([name in sys.modules for name in ('torch', 'pace')])"
    assert run(program) == "[False, False]\n"
