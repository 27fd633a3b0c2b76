"""`pace cache`, and the options and variables that set the folder of packed copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import pace
from pace.assets import TINY
from pace.llm import LLMModel
from pace.llm.loading import weights_cache
from tests.llm.models.variants import save_tiny


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """A cache folder with the copies of two models; one of the models no longer exists."""
    monkeypatch.setenv("PACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PACE_CACHE_SIZE", "64MiB")
    monkeypatch.setattr(weights_cache, "MIN_BYTES", 1)
    save_tiny(tmp_path / "gone", "llama", {})
    for path in (tmp_path / "gone", TINY):
        LLMModel(path, progress=False).close()
    (tmp_path / "gone").rename(tmp_path / "moved")
    capsys.readouterr()
    return tmp_path / "cache"


def names(folder):
    return sorted(path.name.partition(".")[0] for path in folder.iterdir())


def test_copies_are_listed_with_their_models(command, folder):
    code, out, err = command("cache")
    assert (code, err) == (0, "") and f"{folder}: 2 copies" in out and "of 64.0 MiB" in out and "used just now" in out
    lines = out.splitlines()
    [of_tiny] = [line for line in lines if str(TINY) in line]
    [of_gone] = [line for line in lines if line.endswith("(the model is gone)")]
    assert of_tiny in lines and f"of {folder.parent / 'gone'} " in of_gone
    code, out, _ = command("cache", "list", "--json")
    report = json.loads(out)
    assert (report["folder"], report["limit"]) == (str(folder), 64 << 20)
    assert {copy["name"]: copy["bytes"] for copy in report["copies"]} == {
        path.name: path.stat().st_size for path in folder.iterdir()
    }


def test_copies_are_removed_by_name_by_model_and_all(command, folder):
    [name] = [path.name for path in folder.iterdir() if path.name.startswith("gone")]
    assert command("cache", "clear", name)[1].startswith("removed 1 copy, ") and len(names(folder)) == 1
    assert command("cache", "clear", str(TINY))[0] == 0 and names(folder) == []
    LLMModel(TINY, progress=False).close()
    (folder / "mine").write_text("")
    assert json.loads(command("cache", "clear", "--json")[1])["copies"][0]["model"] == str(TINY)
    assert names(folder) == ["mine"]
    assert command("cache", "clear")[1] == "removed 0 copies, 0 bytes\n"


def test_a_name_of_no_copy_removes_none(command, folder):
    before = names(folder)
    code, out, err = command("cache", "clear", str(TINY), "/nowhere")
    assert (
        (code, out) == (1, "")
        and err.startswith("pace: error: there is no copy with the name or of the model /nowhere")
        and names(folder) == before
    )


def test_another_folder(command, folder, tmp_path):
    assert f"{tmp_path / 'empty'}: 0 copies" in command("cache", "--weights-cache", str(tmp_path / "empty"))[1]
    assert command("cache", "clear", "--weights-cache", str(tmp_path / "empty"))[0] == 0 and len(names(folder)) == 2


def test_where_none_are_kept(command, monkeypatch):
    monkeypatch.setenv("PACE_CACHE_SIZE", "0")
    assert command("cache") == (
        0,
        "no packed copies are kept (PACE_CACHE_SIZE is 0, or there is no home directory)\n",
        "",
    )


def test_commands_say_where_copies_are_or_that_there_are_none(command, folder, tmp_path):
    for path in folder.iterdir():
        path.unlink()
    generate = ("generate", "Once upon a time", "--max-new-tokens", "2")
    assert command(*generate, "--no-weights-cache")[0] == 0 and names(folder) == []
    assert command(*generate, "--weights-cache", str(tmp_path / "other"))[0] == 0
    assert names(folder) == [] and len(names(tmp_path / "other")) == 1
    assert command(*generate)[0] == 0 and len(names(folder)) == 1


def test_the_folder_follows_the_variables(monkeypatch, tmp_path):
    from pace import env

    monkeypatch.delenv("PACE_CACHE", raising=False)
    monkeypatch.setenv("PACE_CACHE_SIZE", "1GiB")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert env.cache_directory() == tmp_path / ".cache" / "pace"
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert str(env.cache_directory()) == "/else/pace"
    monkeypatch.setenv("PACE_CACHE", "/own")
    assert str(env.cache_directory()) == "/own"


@pytest.mark.parametrize(
    ("streams", "code", "message"),
    [(">&-", 0, ""), ("<&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 1, "pace: error: [Errno 28]")],
)
def test_streams_that_are_closed_or_full(streams, code, message, folder):
    done = subprocess.run(
        ["sh", "-c", f'"$0" -m pace cache {streams}', sys.executable],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(pace.__file__).parents[1])},
    )
    assert done.returncode == code and done.stderr.startswith(message) and done.stderr.count("\n") == bool(message)
