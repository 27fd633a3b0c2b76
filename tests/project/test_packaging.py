"""Files of an installation other than modules, the sources of a wheel, and its version."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pace

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with lib/, the modules and data of a wheel, and the list of files of a source archive."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", folder]
    command += ["build_py", "--build-lib", folder / "lib"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    return folder


def test_the_bundled_models_and_the_page_are_installed(built):
    """Every file of pace/assets, and the chat page, are installed."""
    files = [
        path.relative_to(ROOT)
        for path in (ROOT / "pace" / "assets").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert Path("pace/assets/tiny/model.safetensors") in files
    files.append(Path("pace/server/page/index.html"))
    assert not [path for path in files if not (built / "lib" / path).is_file()]


def test_a_source_archive_has_what_a_wheel_is_built_from(built):
    """`python -m build` builds the wheel from the source archive."""
    listed = set((built / "pace_llm.egg-info" / "SOURCES.txt").read_text().splitlines())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*") if path.is_file()}
    assert len(sources) > 50 and sources | {"CMakeLists.txt", "setup.py", "pyproject.toml"} <= listed


def test_the_newest_change_is_of_this_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == pace.__version__ and len(set(versions)) == len(versions)
    tags = subprocess.run(
        ["git", "tag", "--points-at", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    assert all(tag == f"v{pace.__version__}" for tag in tags if re.fullmatch(r"v\d+\.\d+\.\d+", tag))
