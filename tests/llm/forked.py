"""Runs programs in separate processes with the libraries already imported.

Importing takes seconds of processor time, so one process does it, runs nothing else, and forks for each program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pace
from tests.waiting import PATIENCE

SECONDS = int(PATIENCE)
"""Time limit of a program before it is killed."""

FORKS = f"""
import gc, json, os, signal, sys, tempfile

import transformers.models.auto
from transformers import PreTrainedTokenizerFast
import pace.llm.generator, pace.llm.loading.load, pace.llm.speculation.build

gc.collect()
gc.freeze()  # no collection in a program looks at the libraries
results = []
for program in json.load(sys.stdin):
    files = [tempfile.TemporaryFile("w+") for _ in range(2)]
    child = os.fork()
    if child == 0:
        for number, file in enumerate(files, 1):
            os.dup2(file.fileno(), number)
        signal.alarm({SECONDS})
        break
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    results.append([code, *(os.pread(file.fileno(), 1 << 20, 0).decode() for file in files)])
else:
    program = ""
    json.dump(results, sys.stdout)
exec(program)  # and the interpreter ends as one that was started for it
"""


class Ended(NamedTuple):
    code: int
    out: str
    err: str


def run_each(programs: list[str]) -> list[Ended]:
    """Runs the programs in turn. The code of one that hangs is -SIGALRM."""
    environment = {**os.environ, "PYTHONPATH": str(Path(pace.__file__).parents[1])}
    command, seconds = [sys.executable, "-c", FORKS], 60 + SECONDS * len(programs)
    done = subprocess.run(
        command, input=json.dumps(programs), env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [Ended(*result) for result in json.loads(done.stdout)]
