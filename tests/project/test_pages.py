"""README.md, CONTRIBUTING.md and docs/ are correct: every code block and command runs, every link has a target, every
name exists.

A block is fenced and names its language. `bash` and `python` blocks run here, in order; `text` is output and does not
run. The Python blocks of a page are one program. `make demo` really runs only if that is quick: if the tests run in the
environment that the Makefile made (`make test`, the continuous integration). Otherwise `make -n` shows its command.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.project import ready_commands
from tests.project.claims import CLAIMS

ROOT = Path(__file__).parents[2]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
}
README = PAGES["README.md"]
EXTRAS = {"docs/guidance.md": "guidance", "docs/kani.md": "kani", "docs/scaling.md": "ray"}
"""Page -> the library that its blocks need. The blocks are skipped if it is missing."""
APART = "docs/integrations.md"
"""Page whose Python blocks are separate programs, each for a library that it names."""
WANTED = {"kani": "tiktoken"}
"""Library -> a further library that its block needs."""
TALKATIVE = {"ray"}
"""Libraries that write to stderr even without errors."""
LOGS = {"docs/benchmarks.md"}
"""Pages whose commands name paths of the machine that ran them."""
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVED = "127.0.0.1:8000"
"""Address at which blocks expect `pace serve`."""
SERVER_OPTIONS = {"docs/embedding-server.md": ("--task", "embed")}
"""Page -> options of the server that its blocks expect."""
MAKE = re.compile(r"make ([a-z-]+)")


def blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


DEAR = ("pace quantize", "pace eval", "pace bench", "pace_llm_beam.py")
"""Blocks with these texts run only in `make test-all`. Other tests run each of these commands and examples."""
COMMANDS_OF_PAGES = {
    f"{page}: {block.splitlines()[0][:40]}": block
    for page, text in PAGES.items()
    for block in blocks(text, "bash")
    if not MAKE.match(block)
}


def test_the_reader_of_blocks_reads_them():
    text = "a\n```bash\none\n```\nb `make x`\n```python\ntwo\n\nthree\n```\n```bash\nfour\n```\n"
    assert blocks(text, "bash") == ["one\n", "four\n"] and blocks(text, "python") == ["two\n\nthree\n"]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_says_what_it_is(page):
    text = PAGES[page]
    assert text.count("```") == 2 * len(FENCE.findall(text))
    assert {kind for kind, _ in FENCE.findall(text)} <= {"bash", "python", "text", ""} - (
        set() if page.startswith("docs/architecture") else {""}
    )


def test_the_front_page_is_short_and_leads_to_every_other():
    assert README.count("\n") <= 120
    rooms = [page for page in PAGES if page.startswith("docs/architecture/")]
    assert not [page for page in PAGES if page not in ("README.md", *rooms) and f"]({page})" not in README]
    assert not [page for page in rooms if f"]({page.removeprefix('docs/')})" not in PAGES["docs/architecture.md"]]
    assert blocks(README, "bash") and blocks(README, "python")


@pytest.mark.parametrize("page", [page for page, text in PAGES.items() if blocks(text, "python") and page != APART])
def test_python_blocks_run_and_do_what_is_said(page, tmp_path, ready):
    """Blocks run one after another in one process, as a reader would paste them."""
    if page in EXTRAS:
        pytest.importorskip(EXTRAS[page])
    run_blocks(page, blocks(PAGES[page], "python"), tmp_path, ready)
    assert len(CLAIMS[page]) == len(blocks(PAGES[page], "python"))


@pytest.mark.parametrize("library", CLAIMS[APART])
def test_python_blocks_of_other_tools(library, tmp_path, ready):
    pytest.importorskip(WANTED.get(library, library))
    (block,) = (block for block in blocks(PAGES[APART], "python") if library in block)
    run_blocks(APART, [block], tmp_path, ready)


def test_every_block_of_other_tools_is_claimed():
    for block in blocks(PAGES[APART], "python"):
        assert sum(library in block for library in CLAIMS[APART]) == 1, block


def run_blocks(page, chosen, tmp_path, ready):
    """Runs blocks of a page as one program, with the checks of their claims."""
    program = []
    for block in chosen:
        claims = [textwrap.dedent(claim) for phrase, claim in CLAIMS[page].items() if phrase in block]
        assert len(claims) == 1, f"one entry of claims.py belongs to each block, and {len(claims)} to this:\n{block}"
        program += [block, *claims]
    file = tmp_path / "page.py"  # a file, so that a traceback shows the line
    text = "\n".join(program)
    with server(*SERVER_OPTIONS.get(page, ())) if SERVED in text else contextlib.nullcontext(SERVED) as address:
        file.write_text(text.replace(SERVED, address), encoding="utf-8")
        result = run_here([tmp_path / "python", file], tmp_path, ready)
    assert result.returncode == 0, result.stderr
    assert result.stderr == "" or EXTRAS.get(page) in TALKATIVE, result.stderr
    assert result.stdout


def run_here(command, tmp_path, ready, folder=ROOT):
    """Runs a command in which `pace` and `python` start with all libraries imported."""
    variables = environment(commands=tmp_path, ready=ready)
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=250)


def test_prefixes_are_reused_as_the_cache_guide_shows(tmp_path, ready):
    file = tmp_path / "page.py"
    file.write_text("\n".join(blocks(PAGES["docs/cache.md"], "python")))
    result = run_here([tmp_path / "python", file], tmp_path, ready)
    first, second, third = (int(line.split(" of ")[0]) for line in result.stdout.splitlines())
    assert first == 0 < second <= third, "what an earlier prompt began with is reused"


def test_the_demo_prints_what_is_shown(tmp_path, ready):
    """`…` in the README replaces text that differs between machines and models."""
    shown = blocks(README, "text")[0]
    pattern = ".+".join(re.escape(part) for part in shown.split("…"))
    result = run_here([tmp_path / "python", "examples/pace_llm_basic.py"], tmp_path, ready)
    assert re.fullmatch(pattern, result.stdout, re.DOTALL), result.stdout + result.stderr


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    """Socket of a server of `ready_commands.py`."""
    path = tmp_path_factory.mktemp("ready") / "socket"
    command = [sys.executable, ready_commands.__file__, "serve", path]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout.readline() == "ready\n"
        yield path
        server.stdin.close()


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] if any(word in block for word in DEAR) else [])
        for name, block in COMMANDS_OF_PAGES.items()
    ],
)
def test_bash_blocks_run(name, tmp_path, ready):
    """Commands of a block run in order, in a folder with the files of the repository's root, without build/."""
    root = tmp_path / "root"
    root.mkdir()
    for path in ROOT.iterdir():
        if path.name != "build" and not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    result = run_here(["bash", "-euo", "pipefail", "-c", COMMANDS_OF_PAGES[name]], tmp_path, ready, root)
    assert result.returncode == 0, result.stderr
    assert result.stdout and "error" not in result.stderr.lower()


def test_command_lines_are_right_in_every_block(monkeypatch):
    """The options and files exist, even in blocks that run only in `make test-all`."""
    from pace.cli import COMMANDS, main

    for module, _ in COMMANDS.values():
        monkeypatch.setattr(importlib.import_module(module), "run", lambda arguments: 0)
    seen = set()
    for part in re.split(r"\n|\|", "\n".join(COMMANDS_OF_PAGES.values())):
        words = shlex.split(part) if part.strip().startswith(("pace ", "python ")) else []
        if words[:1] == ["pace"]:
            assert main(words[1:]) == 0, part
            seen.add(words[1])
        for path in (word for word in words if "/" in word and not word.startswith("build/")):
            assert (ROOT / path).exists(), part
    assert seen >= {"generate", "chat", "bench", "plan", "env", "eval", "quantize", "batch"}


def test_make_demo_runs_the_first_example_and_make_test_all_tests():
    assert {target for block in blocks(README, "bash") for target in MAKE.findall(block)} == {"demo"}
    assert "examples/pace_llm_basic.py" in make("-n", "demo").stdout
    everything = r"-m pytest -n \d+ --dist loadfile --no-loadscope-reorder *"
    assert re.search(everything + "$", make("-n", "test").stdout, re.MULTILINE)
    assert re.search(everything + " --tier all *$", make("-n", "test-all").stdout, re.MULTILINE)


def test_continuous_integration_runs_make_test():
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"


def test_the_quick_tests_are_there():
    """The files that `make check` names exist, and its words select some of the tests against transformers."""
    command = next(line for line in make("-n", "check").stdout.splitlines() if "-m pytest" in line)
    named = [ROOT / word for word in command.split() if word.startswith("tests/")]
    assert len(named) > 5 and all(path.exists() for path in named), command


@pytest.mark.skipif(
    Path(sys.prefix).resolve() != (ROOT / ".venv").resolve(), reason="outside .venv, make demo would install everything"
)
def test_make_demo_runs():
    result = make("demo")
    assert result.returncode == 0, result.stderr
    assert "tokens/s" in result.stdout


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_the_prose_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    from pace.cli import COMMANDS

    for command in re.findall(r"`([^`\n]+)`", FENCE.sub("", PAGES[page])):
        if match := MAKE.match(command):
            assert match[1] in targets, command
        if match := re.match(r"pace ([a-z]+)", command):
            assert match[1] in COMMANDS or page in LOGS, command
        if match := re.match(r"python (benchmarks/\w+\.py|-m (?:pace|tests|benchmarks)[\w.]*)", command):
            path = match[1].removeprefix("-m ").replace(".", "/") if match[1].startswith("-m") else match[1]
            assert any((ROOT / name).exists() for name in (path, f"{path}.py")), command


@pytest.mark.parametrize("page", [*PAGES, "benchmarks/RESULTS.md"])
def test_links_lead_somewhere(page):
    text, folder = (ROOT / page).read_text(encoding="utf-8"), (ROOT / page).parent
    for target in re.findall(r"\]\(([^)]+)\)", FENCE.sub("", text)):
        path, _, heading = target.partition("#")
        linked = folder / path if path else ROOT / page
        assert target.startswith("https://") or linked.exists(), target
        assert not heading or heading in anchors(linked.read_text(encoding="utf-8")), target


def anchors(text: str) -> set[str]:
    """GitHub's anchors for the headings of a page."""
    return {
        re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    }


def test_every_model_has_a_row():
    from pace.llm.models.encoders.encoder_list import ENCODER_LIST, OF_THE_HUB
    from pace.llm.models.model_list import MODEL_LIST

    rows = re.findall(r"^\| `(\w+)` \| [A-Z]", PAGES["docs/models.md"], re.MULTILINE)
    assert set(rows) == {*MODEL_LIST, *ENCODER_LIST, *OF_THE_HUB}


def test_what_is_said_to_be_refused_is_refused():
    from pace.llm.models.model_list import read_config

    with pytest.raises(NotImplementedError, match="MambaForCausalLM"):
        read_config({"architectures": ["MambaForCausalLM"]})


def make(*arguments: str) -> subprocess.CompletedProcess:
    """Runs make without the environment variables of an outer make."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MAKE") and name not in ("MFLAGS", "ARGS")
    }
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=250)


@contextlib.contextmanager
def server(*options: str) -> Iterator[str]:
    """Address of a ready `pace serve` with these options at a free port."""
    command = [sys.executable, "-m", "pace", "serve", "--port", "0", "--served-model-name", "tiny", *options]
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        line = next(line for line in process.stderr if "ready at http://" in line)
        yield line.rpartition("http://")[2].strip()
    finally:
        process.terminate()
        process.communicate(timeout=60)


def environment(commands: Path | None = None, ready: Path | None = None) -> dict[str, str]:
    """Environment that finds this interpreter's package, installed or not.

    With `commands`, this folder gets commands `pace` and `python`, and comes first on PATH. The server at the socket
    `ready` runs them."""
    clean = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore::RuntimeWarning:pydub.utils",  # of machines without ffmpeg; kani loads pydub
        "PYTHONPATH": os.pathsep.join(filter(None, [package_root(), os.environ.get("PYTHONPATH")])),
    }
    if commands is not None:
        for name in ("python", "pace"):
            script = commands / name
            client = f'"{sys.executable}" -IS "{ready_commands.__file__}" "{ready}"'
            script.write_text(f'#!{shutil.which("bash")}\nexec {client} {name} "$@"\n')
            script.chmod(0o755)
        clean["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"
    return clean


def package_root() -> str:
    """The folder that `import pace` comes from in this process."""
    import pace

    return str(Path(pace.__file__).parents[1])
