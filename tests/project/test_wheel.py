"""The wheel: in a new environment without a compiler, it runs on any x86-64 with the glibc version in its name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import pace

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
NEWEST_GLIBC = (2, 34)
"""Newest glibc that a wheel may need: Debian 12, Ubuntu 22.04 and RHEL 9 have at least this one. README.md names it."""
SYSTEM = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built with this environment's packages, in the tree's own build folder."""
    for module in ("pybind11", "setuptools", "cmake", "ninja"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", folder]
    command += [f"--config-settings=--build-option=--bdist-dir={folder / 'build'}", ROOT]
    tools = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # cmake, ninja
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, env=tools)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = folder.glob("pace_llm-*.whl")
    return file


@pytest.fixture(scope="module")
def commands(wheel, tmp_path_factory):
    """The folder of `pace` and `python` in a new environment with the wheel and its dependencies from the package
    index. If the index cannot be reached, this environment's packages are used instead."""
    home = tmp_path_factory.mktemp("bare")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True, timeout=60)
    site = next((home / "lib").glob("python*")) / "site-packages"
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    apart = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def install(*arguments: str | Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*pip, "install", "--quiet", *arguments], capture_output=True, text=True, timeout=600, env=apart, cwd=home
        )

    has_index = not install("--retries=0", "--timeout=5", "tqdm").returncode
    dependencies = ["--constraint", ROOT / "constraints.txt"] if has_index else ["--no-deps"]
    done = install(*dependencies, wheel)
    assert done.returncode == 0, done.stderr
    if not has_index:
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return home / "bin"


def run(commands: Path, *command: str, said: str = "", **variables: str) -> str:
    """Output of a command in an environment without a compiler and without this checkout."""
    clean = {"PATH": str(commands), "HOME": str(commands.parent), "PYTHONSAFEPATH": "1", **variables}
    done = subprocess.run(
        command, env=clean, cwd=commands.parent, input=said, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_name_says_which_systems_it_runs_on(wheel):
    version, python, abi, platform = wheel.stem.split("-")[1:]
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    assert (version, python, abi) == (pace.__version__, tag, tag)
    major, minor = map(int, re.fullmatch(r"manylinux_(\d+)_(\d+)_x86_64", platform).groups())
    assert (major, minor) <= NEWEST_GLIBC
    assert f"glibc {NEWEST_GLIBC[0]}.{NEWEST_GLIBC[1]}" in (ROOT / "README.md").read_text()


@pytest.mark.skipif(not shutil.which("readelf"), reason="needs readelf")
def test_it_needs_no_library_but_the_systems_own(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as files:
        (extension,) = (name for name in files.namelist() if re.match(r"pace/_C\..*so$", name))
        files.extract(extension, tmp_path)
    shown = subprocess.run(["readelf", "-d", tmp_path / extension], check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", shown)) <= SYSTEM


def test_auditwheel_says_the_same_of_it(wheel):
    pytest.importorskip("auditwheel")
    command = [sys.executable, "-m", "auditwheel", "show", wheel]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    platform = wheel.stem.rpartition("-")[2]
    assert f'consistent with the following platform tag: "{platform}"' in " ".join(shown.split())


def test_it_has_every_instruction_set(commands):
    """The wheel has every instruction set except those that only tests use."""
    program = "import pace; from pace import _C; print(pace.__file__); print(*_C.built_isas())"
    path, isas = run(commands, "python", "-c", program).splitlines()
    assert Path(path).is_relative_to(commands.parent), "the installed package, not this checkout"
    from pace import _C

    for_tests = ("avx2_vnni_evex", "emulated_avx512_bf16", "emulated_amx")
    assert isas.split() == [isa for isa in _C.built_isas() if isa not in for_tests]


def test_two_commands_to_a_chat(commands):
    assert "Paris" in run(commands, "pace", "chat", said="What is the capital of France?\n")


def test_it_runs_on_the_least_cpu(commands):
    """An x86-64 CPU without AVX, the minimum for numpy and torch."""
    emulator = shutil.which("qemu-x86_64")
    if emulator is None:
        pytest.skip("needs qemu-user")
    program = (
        "from pace.assets import TINY; from pace.llm import LLMModel, SamplingConfig; from pace import _C;"
        "model = LLMModel(TINY, dtype='float32', num_threads=1, progress=False);"
        "print(_C.isa(), model.generate('The capital of France is', SamplingConfig(max_new_tokens=2)).texts)"
    )
    python = str(commands / "python")
    assert "generic" in run(commands, emulator, "-cpu", "Nehalem", python, "-c", program)
