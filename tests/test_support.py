"""`support.finish`: a process that hangs is killed, and the error shows its output."""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import time

import pytest

from tests.support import exit_code_in_fork, finish


def start(program: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_that_hangs_is_killed_and_what_it_wrote_is_told():
    process = start(
        "import sys, time; print('one', flush=True); print('two', file=sys.stderr, flush=True); time.sleep(600)"
    )
    for stream in (process.stdout, process.stderr):
        assert select.select([stream], [], [], 60)[0]
    with pytest.raises(
        AssertionError, match=r"time\.sleep\(600\).* did not end in 0\.1 s, and wrote 'one\\n', and to stderr 'two\\n'"
    ):
        finish(process, timeout=0.1)
    assert process.returncode == -signal.SIGKILL


def test_a_process_whose_test_is_interrupted_is_killed(monkeypatch):
    process, communicate = start("import time; time.sleep(600)"), subprocess.Popen.communicate

    def interrupted(self, timeout=None):
        if timeout is None:  # after it was killed
            return communicate(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(process)
    assert process.returncode == -signal.SIGKILL


def test_of_a_process_that_ends_its_output_is_returned():
    process = start("import sys; print('one'); sys.exit('two')")
    assert finish(process) == ("one\n", "two\n") and process.returncode == 1


def test_what_a_fork_finds():
    assert exit_code_in_fork(lambda: True) == 0
    assert exit_code_in_fork(lambda: False) == exit_code_in_fork(lambda: 1 // 0) == 1
    assert exit_code_in_fork(lambda: time.sleep(600), timeout=1) == -signal.SIGALRM
