"""Builds pace/_C by running CMake; everything else is in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class CMakeBuild(build_ext):
    """One build_ext that runs CMake. PACE_BUILD_JOBS sets the parallel compile jobs (default: the usable CPUs)."""

    def build_extension(self, ext: Extension) -> None:
        import pybind11

        target = Path(self.get_ext_fullpath(ext.name)).resolve().parent
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        jobs = os.environ.get("PACE_BUILD_JOBS") or str(len(os.sched_getaffinity(0)))
        configure = [
            "cmake",
            "-S",
            str(ROOT),
            "-B",
            str(build),
            "-G",
            "Ninja",
            "-DPACE_PYTHON=ON",
            "-DPACE_TESTS=OFF",
            f"-DPython_EXECUTABLE={sys.executable}",
            f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
            f"-DCMAKE_LIBRARY_OUTPUT_DIRECTORY={target}",
        ]
        # Build isolation installs ninja anew under a temporary path each time: a cached path would no longer exist.
        configure += ["-U", "CMAKE_MAKE_PROGRAM"]
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "--parallel", jobs], check=True)


setup(ext_modules=[Extension("pace._C", sources=[])], cmdclass={"build_ext": CMakeBuild})
