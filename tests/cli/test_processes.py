"""`pace` in separate processes. `pace chat` at a terminal: keys, pastes, Ctrl-C and the terminal's settings afterwards.
With pipes: signals, readers that close the pipe, and tracebacks."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.processes import ENVIRONMENT, PipedProcess, TerminalProcess
from tests.support import finish
from tests.waiting import PATIENCE

LONG = ("chat", "--max-new-tokens", "900", "--ignore-eos")
"""A test acts before the answer ends, which takes 45 s if the chat is slow."""
STORY = "Tell me a story about a little fox."
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


@pytest.fixture
def start(tmp_path):
    """`start(*arguments, slow=False)`: starts a chat with a separate history file, and waits for its prompt."""

    def run(*arguments: str, slow: bool = False) -> TerminalProcess:
        chat = TerminalProcess(*arguments, environment={"XDG_STATE_HOME": str(tmp_path)}, slow=slow)
        chat.read_until("loading...", "/help for the commands", "> ")
        return chat

    return run


INTERRUPTS = """
import os, signal, sys

class Finder:
    def find_spec(name, path, target=None):
        if name == {name!r}:
            sys.meta_path.remove(Finder)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(100): pass
            except KeyboardInterrupt as error:
                {then}

sys.meta_path.insert(0, Finder)
sys.argv[1:] = ["generate", "x", "--max-new-tokens", "1"]
from pace.__main__ import run
run()
"""


@pytest.mark.parametrize("then", ["raise", "raise ImportError('numpy') from error"])
@pytest.mark.parametrize("name", ["pace.cli", "difflib", "pace.cli.generate", "torch"])
def test_ctrl_c_during_imports_is_silent(name, then):
    """Some libraries raise an ImportError if Ctrl-C interrupts their import."""
    program = INTERRUPTS.format(name=name, then=then)
    done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_stops_the_answer_and_ctrl_d_leaves(start):
    with start(*LONG, slow=True) as chat:
        chat.type(f"{STORY}\r")
        chat.read_until("fox.", "a")  # the echo of the question, and some of the answer
        chat.type(CTRL_C)
        assert "[stopped]" in chat.read_until("> ")
        chat.type("/help\r")
        assert "/reset" in chat.read_until("> ")
        chat.type(CTRL_C)
        chat.read_until("Ctrl-D leaves", "> ")
        chat.type(CTRL_D)
        assert chat.wait() == 0


@pytest.mark.parametrize("seconds", [0, 0.005, 0.02, 0.08, 0.2])
def test_ctrl_c_before_the_first_token(start, seconds):
    with start(*LONG) as chat:
        chat.type(f"{STORY}\r")
        chat.read_until("fox.")
        time.sleep(seconds)
        chat.type(CTRL_C)
        chat.read_until("> ")
        chat.type("What is the capital of Spain?\r")
        chat.read_until("Madrid")
        chat.type(CTRL_C)
        chat.read_until("> ")


def test_ctrl_c_twice(start):
    with start(*LONG, slow=True) as chat:
        for _ in range(3):
            chat.type(f"{STORY}\r")
            chat.read_until("fox.", "a")
            chat.type(CTRL_C + CTRL_C)
            chat.read_until("> ")
        chat.type("/stats\r")
        chat.read_until("tokens/s", "> ")
        chat.type(CTRL_D)
        assert chat.wait() == 0 and chat.shows_keys()


def test_notices_stand_on_lines_of_their_own(start):
    with start("chat", "--max-new-tokens", "3") as chat:
        chat.type("What is the capital of Spain?\r")
        answer = chat.read_until("Spain?", "> ").replace("\r", "")
        assert re.search(r"The capital of\n\(the answer is cut off after 3 tokens: .*\)\n", answer)


def test_answers_in_a_file_are_answers_alone(tmp_path):
    """If stdout is a file, the prompt is on stderr."""
    controller, terminal = pty.openpty()
    with open(tmp_path / "out", "w") as out:
        environment = {"XDG_STATE_HOME": str(tmp_path)}
        running = PipedProcess("chat", stdin=terminal, stdout=out.fileno(), environment=environment)
        seen = ""
        for line in (b"What is the capital of Spain?\n", b"/exit\n"):
            while not seen.endswith("> "):
                seen += running.stderr.read(1)
            os.write(controller, line)
            seen = ""
        finish(running)
    os.close(controller), os.close(terminal)
    assert running.returncode == 0 and (tmp_path / "out").read_text() == "The capital of Spain is Madrid.\n"


def test_ctrl_c_while_it_loads_ends_it(tmp_path):
    with TerminalProcess("chat", environment={"XDG_STATE_HOME": str(tmp_path)}, whole=True) as chat:
        chat.read_until("loading...")
        chat.type(CTRL_C)
        assert chat.wait() == 130 and "Traceback" not in chat.seen


def said(chat: TerminalProcess, file: Path) -> list[str]:
    """The user's messages so far, from `/save`."""
    chat.type(f"/save {file}\r")
    chat.read_until("messages in", "> ")
    return [message["content"] for message in json.loads(file.read_text()) if message["role"] == "user"]


def test_a_paste_is_one_text(start, tmp_path):
    with start("chat") as chat:
        assert "\x1b[?2004h" in chat.seen, "the terminal is asked to mark pastes"
        chat.paste("What is\n  7\n+ 8?")
        chat.type("\r")
        chat.read_until("8?", "> ")
        assert said(chat, tmp_path / "talk.json") == ["What is\n  7\n+ 8?"]


@pytest.mark.parametrize("text", ["// adds\nint add(int a, int b);", '"""\nAdds.\n"""\ndef add(a, b):'])
def test_a_paste_is_whole_whatever_it_begins_with(start, tmp_path, text):
    with start("chat", "--max-new-tokens", "3") as chat:
        chat.paste(text)
        chat.type("\r")
        chat.read_until("cut off", "> ")
        assert said(chat, tmp_path / "talk.json") == [text]


def test_a_text_between_quotes(start, tmp_path):
    with start("chat") as chat:
        chat.type('"""What is\r')
        chat.read_until("... ")
        chat.type('7 + 8?"""\r')
        chat.read_until("= 15", "> ")
        assert said(chat, tmp_path / "talk.json") == ["What is\n7 + 8?"]
        chat.type('"""What\r')
        chat.read_until("... ")
        chat.type(CTRL_D)
        chat.read_until('without the closing """', "> ")
        chat.type(CTRL_D)
        assert chat.wait() == 0


def test_ctrl_c_forgets_keys_of_an_answer(start):
    with start(*LONG, slow=True) as chat:
        chat.type(f"{STORY}\r")
        chat.read_until("fox.", "a")
        chat.type("zzz\rqqq")
        chat.read_until("a", "e", "a")
        chat.type(CTRL_C)
        answer = chat.read_until("[stopped]", "> ")
        assert "zzz" not in answer and "qqq" not in answer and "^C" not in answer
        chat.type("/set top_k 3\r")
        assert "zzz" not in chat.read_until("top_k 3,", "> ")


ANSWERED = ("chat", "--max-new-tokens", "300", "--ignore-eos")


def test_lines_typed_during_an_answer_are_asked_next(start, tmp_path):
    """The lines are asked in their order, and an unfinished line waits for its end."""
    with start(*ANSWERED, slow=True) as chat:
        chat.type(f"{STORY}\r")
        chat.read_until("fox.", "a")
        chat.type("What is 7 + 9\x7f8?\r\r/set top_k 3\rAnd 5 \x1b[D+")
        chat.hurry()
        answer = chat.read_until("cut off after 300 tokens", "> What is 7 + 8?\r\n")
        assert answer.count("What is") == 1, "keys are not shown while an answer is written"
        chat.read_until("= 15", "cut off", "> /set top_k 3", "(set: max_new_tokens 300, top_k 3", "> ", "And 5 +")
        chat.type(" 6?\r")
        chat.read_until("cut off", "> ")
        assert said(chat, tmp_path / "talk.json") == [STORY, "What is 7 + 8?", "And 5 + 6?"]
        chat.type("\x1b[A\x1b[A\r")  # the lines can be recalled like others
        chat.read_until("And 5 + 6?")


def test_a_paste_during_an_answer_is_one_text(start, tmp_path):
    with start(*ANSWERED, slow=True) as chat:
        chat.type(f"{STORY}\r")
        chat.read_until("fox.", "\x1b[?2004h", "a")
        chat.paste("What is\n7 + 8?")
        chat.hurry()
        chat.read_until("cut off", "> ", "7 + 8?")
        chat.type("\r")
        chat.read_until("cut off", "> ")
        assert said(chat, tmp_path / "talk.json") == [STORY, "What is\n7 + 8?"]


def test_ctrl_d_during_an_answer_leaves_behind_it(start):
    with start(*ANSWERED, slow=True) as chat:
        chat.type(f"{STORY}\r")
        chat.read_until("fox.", "a")
        chat.type(CTRL_D)
        chat.hurry()
        assert chat.wait() == 0 and "cut off after 300 tokens" in chat.seen and chat.shows_keys()


def test_history_is_there_in_the_next_run(start, tmp_path):
    with start("chat") as chat:
        chat.type("What is the capital of Spain?\r")
        chat.read_until("Madrid", "> ")
        chat.paste("What is\n7 + 8?")
        chat.type("\r")
        chat.read_until("15", "> ")
    assert (tmp_path / "pace" / "chat_history").stat().st_mode & 0o777 == 0o600
    with start("chat") as chat:
        chat.type(UP + UP + "\r")
        chat.read_until("Spain?", "Madrid", "> ")
        chat.type(UP + UP + "\r")  # the first is the one that was just recalled
        chat.read_until("15", "> ")


def test_no_history(start, tmp_path):
    with start("chat", "--no-history") as chat:
        chat.type("What is the capital of Spain?\r")
        chat.read_until("Madrid", "> ")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("is_answering", [True, False])
def test_a_process_that_is_ended_leaves_the_terminal_as_it_was(start, is_answering):
    with start(*LONG, slow=True) as chat:
        if is_answering:
            chat.type(f"{STORY}\r")
            chat.read_until("fox.", "a")
        assert not chat.shows_keys()  # hidden, or shown by readline
        os.kill(chat.pid, signal.SIGTERM)
        assert chat.wait() == 128 + signal.SIGTERM and chat.shows_keys()


@pytest.mark.parametrize("ending", ["closed", "ended"])
def test_a_conversation_is_kept_when_the_terminal_is_closed_or_the_process_ended(start, tmp_path, ending):
    kept = tmp_path / "kept"
    with start("chat", "--session", str(kept)) as chat:
        chat.type("What is the capital of Spain?\r")
        chat.read_until("Madrid", "> ")
        if ending == "closed":
            os.close(chat.terminal)
            chat._forked.join(PATIENCE)
            chat.code = chat._forked.exitcode
            chat.terminal = os.open(os.devnull, os.O_RDONLY)
        else:
            os.kill(chat.pid, signal.SIGTERM)
            assert chat.wait() == 128 + signal.SIGTERM
    assert chat.code and b"Madrid" in kept.read_bytes() and not list(tmp_path.glob(".kept*"))


# -- with pipes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("--debug", "generate"), ("generate", "--debug")], ids=" ".join)
def test_debug_shows_where(order):
    running = PipedProcess(*order, "x", "--model", "/no/such/directory")
    out, err = finish(running)
    assert running.returncode == 1 and out == "" and "Traceback" in err and "/no/such/directory" in err


def test_a_reader_that_goes_away_is_no_error():
    running = PipedProcess("generate", "Once upon a time", "--max-new-tokens", "900", "--ignore-eos", slow=True)
    running.stdout.read(10)
    running.stdout.close()
    assert finish(running) == ("", "") and running.returncode == 141


def test_ctrl_c_prints_what_there_is():
    """It prints nothing more, and exits with 130."""
    running = PipedProcess(
        "generate", "Once upon a time", "--max-new-tokens", "1000", "--ignore-eos", "--num-threads", "1", slow=True
    )
    first = running.stdout.read(10)  # it has begun to write
    running.send_signal(signal.SIGINT)
    rest, err = finish(running)
    assert running.returncode == 130 and err == ""
    assert len(first) == 10 and rest.endswith("\n")


def test_ctrl_c_in_json_tells_what_there_is():
    running = PipedProcess(
        "generate", "Once upon a time", "--max-new-tokens", "1000", "--ignore-eos", "--json", "--debug", slow=True
    )
    for line in running.stderr:  # the log reports that the model is loaded
        if "pace:" in line:
            break
    running.send_signal(signal.SIGINT)
    out, _ = finish(running)
    assert running.returncode == 130
    assert out == "" or json.loads(out)["finish_reasons"] in ([], ["cancelled"])


# -- the end of the process

ENDING = """
import atexit, sys, threading, time
import pace.cli
from pace.__main__ import run
atexit.register(print, "handler")
def work():
    time.sleep(0.2)
    print("thread")
def main():
    threading.Thread(target=work).start()
    sys.stderr.write("log")
    print("text", end=" ")
    return 3
pace.cli.main = main
run()
print("not reached")
"""


def test_the_process_ends_as_python_does():
    """Buffers are flushed, threads are joined, and exit handlers run; only modules are not torn down."""
    ended = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=PATIENCE)
    assert (ended.returncode, ended.stdout, ended.stderr) == (3, "text thread\nhandler\n", "log")


def test_a_reader_that_went_away_is_known_by_the_exit_code():
    reader, writer = os.pipe()
    os.close(reader)
    code = "import pace.cli\nfrom pace.__main__ import run\npace.cli.main = lambda: print('text') or 0\nrun()"
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    assert subprocess.run([sys.executable, "-c", code], stdout=writer, env=buffered, timeout=PATIENCE).returncode == 141
    os.close(writer)
