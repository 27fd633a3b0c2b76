"""`pace env`: the machine's features, forced settings, and where each variable is read."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import pace
from pace import _C, env
from pace.assets import TINY
from pace.cli.environment import _instruction_set, memory
from pace.llm import LLMModel
from tests.cli.processes import ENVIRONMENT, process
from tests.support import finish


@pytest.mark.parametrize(("built", "missing"), [(["avx2", "generic"], False), (["generic"], True)])
def test_a_build_without_the_best_kernels_says_so(built, missing, monkeypatch, caplog):
    """Both the report and the log of loading a model have the warning."""
    monkeypatch.delenv("PACE_ISA", raising=False)
    extension = SimpleNamespace(
        built_isas=lambda: built, available_isas=lambda: built, best_isa=lambda: "avx2", isa=lambda: built[0]
    )
    found = _instruction_set(extension)
    assert found["built"] == built and ("build with PACE_TABLES=all" in found["reason"]) == missing
    monkeypatch.setattr(_C, "built_isas", extension.built_isas)
    monkeypatch.setattr(_C, "best_isa", extension.best_isa)
    with LLMModel(TINY, progress=False):
        assert ("has no kernels for avx2" in caplog.text) == missing


def test_env(command, monkeypatch):
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    code, out, err = command("env", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["pace"] == pace.__version__ and report["versions"]["torch"]
    assert report["instruction_set"]["chosen"] in report["instruction_set"]["available"]
    assert report["instruction_set"]["built"] == _C.built_isas()
    assert (
        1
        <= report["threads"]["default"]
        <= report["threads"]["physical_cores"]
        <= report["threads"]["logical_cpus"]
        == len(os.sched_getaffinity(0))
    )
    assert 0 < report["memory"]["available_bytes"] <= report["memory"]["total_bytes"]
    assert set(report["variables"]) == {variable.name for variable in env.VARIABLES}
    code, out, _ = command("env")
    assert code == 0 and report["instruction_set"]["chosen"] in out and report["threads"]["reason"] in out
    assert all(re.search(rf"^{variable.name} +not set \(.*default: ", out, re.MULTILINE) for variable in env.VARIABLES)


@pytest.mark.parametrize("isa, code", [("generic", 0), ("nonsense", 1)])
def test_env_tells_what_was_forced(isa, code):
    running = process("env", env={**ENVIRONMENT, "PACE_ISA": isa})
    out, err = finish(running)
    assert (running.returncode, err) == (code, "")
    assert re.search(
        rf"instruction set +{'generic: PACE_ISA asks for it' if code == 0 else 'none: PACE_ISA=nonsense'}", out
    )


@pytest.mark.parametrize(
    "threads, code, shown",
    [("3", 0, "3: PACE_NUM_THREADS asks for it"), ("many", 1, "none: PACE_NUM_THREADS must be"),
     ("99999", 1, "none: PACE_NUM_THREADS must be")],
)  # fmt: skip
def test_env_tells_the_threads_that_were_asked_for(command, monkeypatch, threads, code, shown):
    monkeypatch.setenv("PACE_NUM_THREADS", threads)
    found, out, _ = command("env")
    assert found == code and re.search(rf"^threads +{shown}", out, re.MULTILINE)


def test_env_variables_are_read_through_the_table():
    with pytest.raises(KeyError, match="PACE_NONSENSE"):
        env.value("PACE_NONSENSE")


def test_no_other_file_reads_the_environment():
    sources = [path for path in Path(pace.__file__).parent.rglob("*.py") if path.name != "env.py"]
    assert len(sources) > 20
    assert not [path for path in sources if re.search(r"os\.environ|getenv", path.read_text())]


@pytest.mark.parametrize(
    "files, expected",
    [
        ({}, (None, None)),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "1000\n",
         "sys/fs/cgroup/a/b/memory.max": "max\n"}, (1000, "/sys/fs/cgroup/a/memory.max")),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/memory.max": "500\n"}, (500, "/sys/fs/cgroup/memory.max")),
        (
            {"proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n", "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "700\n",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
            (700, "/sys/fs/cgroup/memory/x/memory.limit_in_bytes"),
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "99999999\n"}, (None, None)),
        (
            {"proc/self/limits": "Limit  Soft Limit Hard Limit Units\nMax address space    2000   unlimited   bytes\n"},
            (2000, "ulimit -v"),
        ),
    ],
    ids=["nothing", "an ancestor's", "in a container", "version 1", "more than there is", "address space"],
)  # fmt: skip
def test_memory_limits(tmp_path, files, expected):
    for name, text in {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 1024 kB\n", **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = memory(tmp_path)
    available = min(1024 * 1024, expected[0] or 1024 * 1024)  # the value that loading uses
    assert (found["total_bytes"], found["available_bytes"]) == (4096 * 1024, available)
    assert (found["limit_bytes"], found["limit_source"]) == expected
