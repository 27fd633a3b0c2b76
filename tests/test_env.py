"""The table of environment variables is complete and strict, and no other Python code reads the environment."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pace import env

ROOT = Path(__file__).parent.parent


def test_every_variable_that_the_sources_name_is_in_the_table():
    named = set()
    for path in [*(ROOT / "pace").rglob("*.py"), *(ROOT / "csrc").rglob("*.cpp")]:
        text = path.read_text()
        if path.suffix == ".py" and path.name != "env.py":
            assert "os.environ" not in text and "getenv" not in text, (
                f"{path} reads the environment; pace/env.py should"
            )
        named |= set(re.findall(r'getenv\("(PACE_[A-Z_]+)"\)', text))
    assert "PACE_ISA" in named
    assert named <= {variable.name for variable in env.VARIABLES}


def test_num_threads(monkeypatch):
    monkeypatch.delenv("PACE_NUM_THREADS", raising=False)
    assert env.num_threads() is None
    monkeypatch.setenv("PACE_NUM_THREADS", "3")
    assert env.num_threads() == 3
    for wrong in ("0", "-1", "two", "1.5", "²", "4097", "9" * 5000):
        monkeypatch.setenv("PACE_NUM_THREADS", wrong)
        with pytest.raises(ValueError, match="PACE_NUM_THREADS"):
            env.num_threads()


def test_pin_threads(monkeypatch):
    monkeypatch.delenv("PACE_PIN_THREADS", raising=False)
    assert env.pin_threads() is False
    for text, pinned in (("0", False), ("1", True), ("", False)):
        monkeypatch.setenv("PACE_PIN_THREADS", text)
        assert env.pin_threads() is pinned
    for wrong in ("2", "true", "yes", "-1"):
        monkeypatch.setenv("PACE_PIN_THREADS", wrong)
        with pytest.raises(ValueError, match="PACE_PIN_THREADS must be 0 or 1"):
            env.pin_threads()


def test_state_directory(monkeypatch):
    for home, state, expected in (
        ("/h", "", "/h/.local/state/pace"),
        ("/h", "/s", "/s/pace"),
        ("/h", "relative", "/h/.local/state/pace"),
        ("relative", "", None),
    ):
        monkeypatch.setenv("HOME", home)
        monkeypatch.setenv("XDG_STATE_HOME", state)
        assert env.state_directory() == (expected and Path(expected))


def test_a_name_outside_of_the_table_is_an_error():
    with pytest.raises(KeyError):
        env.value("PACE_TYPO")


@pytest.mark.parametrize("name, chosen", [("generic", "generic"), ("emulated_amx", "emulated_amx"), ("avx9", None)])
def test_isa_is_forced_or_refused(name, chosen, monkeypatch):
    monkeypatch.setenv("PACE_ISA", name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = "from pace import _C; print(_C.isa())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if chosen:
        assert result.stdout.strip() == chosen
    else:
        assert result.returncode != 0 and "unknown instruction set 'avx9'; available: " in result.stderr


def test_secrets_are_not_shown(monkeypatch):
    key = next(variable for variable in env.VARIABLES if variable.name == "PACE_API_KEY")
    monkeypatch.delenv("PACE_API_KEY", raising=False)
    assert key.shown is None
    monkeypatch.setenv("PACE_API_KEY", "open sesame")
    assert env.value("PACE_API_KEY") == "open sesame" not in key.shown
