"""README.md, CONTRIBUTING.md, docs/decoding.md, docs/cache.md and docs/quantization.md tell the truth: every code block
and command runs, every name exists.

A block is fenced and says its language. `bash` and `python` blocks run here, in order; `text` is output, and nothing to
run. The Python blocks are one program. `make demo` runs for real where that is quick, which is when the tests run in
the environment that the Makefile made (`make test`, the continuous integration); elsewhere what it would run is looked
up with `make -n`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
DECODING, CACHE, QUANTIZATION = (
    (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("decoding.md", "cache.md", "quantization.md")
)
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MAKE = re.compile(r"make ([a-z-]+)")


def blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def test_the_reader_of_blocks_reads_them():
    text = "a\n```bash\none\n```\nb `make x`\n```python\ntwo\n\nthree\n```\n```bash\nfour\n```\n"
    assert blocks(text, "bash") == ["one\n", "four\n"] and blocks(text, "python") == ["two\n\nthree\n"]


def test_every_block_says_what_it_is():
    for text in (README, CONTRIBUTING):
        assert text.count("```") == 2 * len(FENCE.findall(text))
        assert {kind for kind, _ in FENCE.findall(text)} <= {"bash", "python", "text"}
    assert blocks(README, "bash") and blocks(README, "python")


def test_python_blocks_run():
    """One after the other in one process, as a reader would paste them."""
    program = "\n".join(blocks(README, "python"))
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, timeout=250
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "Cairo" in result.stdout and "5, 6, 7, 8" in result.stdout and "Tokyo" in result.stdout


def test_python_blocks_of_the_decoding_guide_run():
    assert DECODING.count("```") == 2 * len(FENCE.findall(DECODING))
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks(DECODING, "python"))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" and "Tokyo" in result.stdout and "cancelled" in result.stdout


def test_python_blocks_of_the_guide_to_quantisation_run():
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks(QUANTIZATION, "python"))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (result.returncode, result.stderr) == (0, "") and "all weights" in result.stdout


def test_python_blocks_of_the_cache_guide_run():
    result = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks(CACHE, "python"))],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (result.returncode, result.stderr) == (0, "")
    first, second, third = (int(line.split(" of ")[0]) for line in result.stdout.splitlines())
    assert first == 0 < second <= third, "what an earlier prompt began with is reused"


def test_the_demo_prints_what_is_shown():
    """`…` in the README stands for what differs between machines and models."""
    (shown,) = blocks(README, "text")
    pattern = ".+".join(re.escape(part) for part in shown.split("…"))
    result = subprocess.run(
        [sys.executable, "examples/pace_llm_basic.py"],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert re.fullmatch(pattern, result.stdout, re.DOTALL), result.stdout


@pytest.mark.parametrize(
    "block",
    [block for block in blocks(README, "bash") if not MAKE.match(block)],
    ids=lambda block: block.split("\n")[0][:40],
)
def test_bash_blocks_run(block, tmp_path):
    result = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block],
        cwd=ROOT,
        env=environment(commands=tmp_path),
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout and "error" not in result.stderr.lower()


def test_make_demo_and_make_test_run_what_is_tested():
    """`make test` is what runs this test, or at least runs all tests; `make demo` runs the first example."""
    named = {target for block in blocks(README, "bash") for target in MAKE.findall(block)}
    assert named == {"demo", "test"}
    assert "examples/pace_llm_basic.py" in make("-n", "demo").stdout
    assert "pytest" in make("-n", "test").stdout


@pytest.mark.skipif(
    Path(sys.prefix).resolve() != (ROOT / ".venv").resolve(), reason="outside .venv, make demo would install everything"
)
def test_make_demo_runs():
    result = make("demo")
    assert result.returncode == 0, result.stderr
    assert "tokens/s" in result.stdout


def test_commands_in_the_prose_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    from pace.cli import COMMANDS

    for text in (README, CONTRIBUTING):
        inline = re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
        for command in inline:
            if match := MAKE.match(command):
                assert match[1] in targets, command
            if match := re.match(r"pace ([a-z]+)", command):
                assert match[1] in COMMANDS, command


def test_links_lead_somewhere():
    for text in (README, CONTRIBUTING):
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, heading = target.partition("#")
            assert target.startswith("https://") or (ROOT / path).exists(), target
            assert not heading or heading in anchors((ROOT / path).read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    return {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    }


def test_every_model_has_a_row():
    from pace.llm.models.model_list import MODEL_LIST

    assert set(re.findall(r"^\| `(\w+ForCausalLM)`", README, re.MULTILINE)) == set(MODEL_LIST)


def test_what_is_said_to_be_refused_is_refused():
    from pace.llm.models.model_list import read_config

    with pytest.raises(NotImplementedError, match="MixtralForCausalLM"):
        read_config({"architectures": ["MixtralForCausalLM"]})


def make(*arguments: str) -> subprocess.CompletedProcess:
    """make without what an outer make left in the environment."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MAKE") and name != "MFLAGS"}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=250)


def environment(commands: Path | None = None) -> dict[str, str]:
    """This interpreter's package, whether it is installed or not; with `commands`, a folder that gets `pace` and
    `python` and comes first on PATH."""
    clean = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root(), os.environ.get("PYTHONPATH")])),
    }
    if commands is not None:
        for name, command in {"python": "", "pace": "-m pace"}.items():
            script = commands / name
            script.write_text(f'#!{shutil.which("bash")}\nexec "{sys.executable}" {command} "$@"\n')
            script.chmod(0o755)
        clean["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return clean


def package_root() -> str:
    """The folder that `import pace` comes from in this process."""
    import pace

    return str(Path(pace.__file__).parents[1])
