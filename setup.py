"""Builds pace/_C with CMake, and tags a wheel with the oldest system it runs on; everything else is in
pyproject.toml."""

import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """Runs CMake twice: in build/cmake for the kernels, which all versions of Python share, and in build/cmake-<python>
    for the extension. Copies the extension from there.

    PACE_TABLES selects the kernels (CMakeLists.txt; default: those for all CPUs). PACE_BUILD_JOBS sets the number of
    parallel compilers (default: the usable CPUs)."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        kernels = ROOT / "build" / "cmake"
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        python = [f"-DPython_EXECUTABLE={sys.executable}", f"-Dpybind11_DIR={pybind11.get_cmake_dir()}"]
        kernels.mkdir(parents=True, exist_ok=True)
        with open(kernels / "lock", "w") as lock:  # ninja does not detect another ninja in its folder
            fcntl.flock(lock, fcntl.LOCK_EX)
            configure(kernels, "-DPACE_PYTHON=OFF")
            configure(build, "-DPACE_PYTHON=ON", f"-DPACE_KERNELS={kernels}", *python)
            compile_both(kernels, build)
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        self.copy_file(str(build / target.name), str(target))


def configure(build: Path, *settings: str) -> None:
    """Writes the build files of a folder with CMake. Ends the program if that fails."""
    tables = os.environ.get("PACE_TABLES") or "all"
    command = ["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", f"-DPACE_TABLES={tables}", *settings]
    # Forget the earlier build's path of ninja (pip's isolated builds use a new path each time) and its output folder.
    command += ["-U", "CMAKE_MAKE_PROGRAM", "-U", "CMAKE_LIBRARY_OUTPUT_DIRECTORY"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)


def compile_both(kernels: Path, build: Path) -> None:
    """Compiles the bindings and the kernels in parallel, so that no CPUs are idle at the end of either, and links the
    extension. Raises CalledProcessError if a compiler fails."""
    jobs = int(os.environ.get("PACE_BUILD_JOBS") or len(os.sched_getaffinity(0)))
    of_kernels = compiling(kernels, "pace_kernels", "the kernels", jobs)
    with subprocess.Popen(**of_kernels) as running:
        try:
            subprocess.run(**compiling(build, "bindings", "the bindings", max(1, jobs // 2)), check=True)
        except BaseException:
            running.terminate()
            raise
    if running.returncode:
        raise subprocess.CalledProcessError(running.returncode, of_kernels["args"])
    subprocess.run(**compiling(build, "_C", "the extension", jobs), check=True)


def compiling(build: Path, target: str, what: str, jobs: int) -> dict:
    """Arguments for `subprocess` to build a target."""
    show = {"NINJA_STATUS": f"compiling {what}: %f of %t, %es "} | os.environ
    return {"args": ["cmake", "--build", build, "--target", target, "--parallel", str(jobs)], "env": show}


class Wheel(bdist_wheel):
    """Tags the wheel with the glibc version that the built extension needs (PEP 600). The extension needs no other
    libraries than the system's: libstdc++ is linked into it."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        built = sorted(Path(self.get_finalized_command("build").build_lib).glob("pace/_C.*.so"))
        if built and platform.startswith("linux_"):
            platform = platform.replace("linux", "manylinux_{}_{}".format(*newest_glibc(built[0])), 1)
        return python, abi, platform


def newest_glibc(library: Path) -> tuple[int, int]:
    """The glibc version of the newest symbol that `library` needs."""
    shown = subprocess.run(["readelf", "--version-info", "--wide", library], check=True, capture_output=True, text=True)
    return max((int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", shown.stdout))


setup(ext_modules=[Extension("pace._C", sources=[])], cmdclass={"build_ext": CMakeBuild, "bdist_wheel": Wheel})
