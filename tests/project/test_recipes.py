"""The recipes of CONTRIBUTING.md: a toy is added by their steps to a copy of the sources, and the tests that they name
cover it there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")

MODEL = '''"""Seed-OSS: Llama with one switch for the biases of queries, keys and values, and another for the output's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import flag


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    attention_bias: bool = flag(True)
    attention_out_bias: bool = flag(False)

    only_here: ClassVar[dict[str, tuple]] = {**LlamaConfig.only_here, "clip_qkv": (None,)}

    @property
    def output_bias(self) -> bool:
        return self.attention_out_bias


class SeedOssForCausalLM(LlamaForCausalLM):
    Config = SeedOssConfig
'''


class Copy:
    """The sources that a recipe touches and that tests read, in a folder of their own."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.touched: list[str] = []
        for name in ("pace", "tests", "docs"):
            ignored = shutil.ignore_patterns("__pycache__", "*.png")
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"):
            shutil.copy(ROOT / name, folder)

    def write(self, path: str, text: str) -> None:
        assert not (self.folder / path).exists(), f"{path} is there already: choose another toy"
        (self.folder / path).write_text(text)
        self.touched.append(path)

    def add_line(self, path: str, after: str, line: str) -> None:
        """Behind the first line that begins with `after`."""
        text = (self.folder / path).read_text()
        found = re.search(rf"^{re.escape(after)}.*\n", text, re.MULTILINE)
        assert found, f"{path} has no line that begins with {after!r}"
        (self.folder / path).write_text(f"{text[: found.end()]}{line}\n{text[found.end() :]}")
        self.touched.append(path)

    def pytest(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of the copy's own tests, which import the copy's `pace`."""
        environment = {**os.environ, "PYTHONPATH": str(self.folder), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=250)
        return result.returncode, result.stdout + result.stderr


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "copy")


def recipe(heading: str) -> str:
    return re.search(rf"^## {heading}\n(.*?)^## ", CONTRIBUTING, re.MULTILINE | re.DOTALL)[1]


def paths_of(heading: str) -> set[str]:
    """Files that the numbered steps of a recipe name."""
    return set(re.findall(r"`((?:pace|csrc|tests|docs)/[^`]+\.\w+)`", recipe(heading).partition("\n\n`tests/")[0]))


def add_model(copy: Copy, source: str) -> None:
    """The steps of "A model" but the last one."""
    copy.write("pace/llm/models/families/seed_oss.py", source)
    models = "pace/llm/models/model_list.py"
    copy.add_line(
        models, "from pace.llm.models.families", "from pace.llm.models.families import seed_oss  # noqa: I001"
    )
    copy.add_line(models, "MODEL_LIST:", '    "SeedOssForCausalLM": seed_oss.SeedOssForCausalLM,')
    variants = "tests/llm/models/variants.py"
    copy.add_line(variants, "BASE = {", '    "seed_oss": {"num_key_value_heads": 2, "head_dim": 8},')
    copy.add_line(variants, "VARIANTS:", '    ("seed_oss", "default", {}),')
    copy.add_line(variants, "VARIANTS:", '    ("seed_oss", "out-bias", {"attention_out_bias": True}),')


def test_a_model(copy):
    add_model(copy, MODEL)
    list_of_models = "tests/project/test_pages.py::test_every_model_has_a_row"
    status, output = copy.pytest(list_of_models)
    assert status == 1 and "SeedOssForCausalLM" in output, "a model without its row is noticed"
    copy.add_line(
        "docs/models.md",
        "| `LlamaForCausalLM`",
        "| `SeedOssForCausalLM` | Seed-OSS | biases on queries, keys and values |",
    )
    assert {path.replace("seed_oss", "<name>") for path in copy.touched} == paths_of("A model")
    status, output = copy.pytest(
        list_of_models,
        "tests/project/test_layering.py",
        "tests/llm/models/test_oracle.py",
        "tests/llm/runners/test_program.py",
        "-k",
        "row or seed_oss",
    )
    passed = int((re.search(r"(\d+) passed", output) or [0, 0])[1])
    assert status == 0 and passed > 10, output


def test_a_model_that_is_wrong(copy):
    """The comparison with `transformers` covers a new model with nothing but its tuple."""
    add_model(copy, MODEL + "    gate_up_names = ('up_proj', 'gate_proj')\n")
    status, output = copy.pytest("tests/llm/models/test_oracle.py", "-k", "seed_oss and test_float32_logits")
    assert status == 1 and "relative_error" in output, output
