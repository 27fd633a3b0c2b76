"""What an installation holds beyond the modules: the bundled models, and the chat page."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_bundled_models_and_the_page_are_installed(tmp_path):
    """Every file of pace/assets, and the page, is part of what a wheel is made of."""
    pytest.importorskip("setuptools")
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "--egg-base",
        str(tmp_path),
        "build_py",
        "--build-lib",
        str(tmp_path / "lib"),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    files = [
        path.relative_to(ROOT)
        for path in (ROOT / "pace" / "assets").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert Path("pace/assets/tiny/model.safetensors") in files
    files.append(Path("pace/server/page/index.html"))
    assert not [path for path in files if not (tmp_path / "lib" / path).is_file()]
