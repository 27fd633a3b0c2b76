"""A conversation with a coding client in three turns: it reads a file, changes it, and reports. The model's answers are
scripted; the client and the server are real."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from pace.assets import TINY

FILE, BEFORE, AFTER = "notes.txt", "The fox is red.", "The fox is blue."
QUESTIONS = ("What is in notes.txt?", "Make the fox of notes.txt blue.", "Which colour has the fox now?")
ANSWERS = ("It says that the fox is red.", "Done: the fox of the file is blue.", "Blue, since the last change.")
NAME = "local"
"""Name of the model in requests."""
CONTEXT = 65536
PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SECONDS = 120
"""Time limit of a turn."""


def call(tool: str, **arguments: object) -> str:
    """A tool call in the format of the bundled model's template."""
    return f'<tool_call>{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def script(read: str, edit: str, edited: str) -> dict[str, str]:
    """The model's answers, the last turn first, because a prompt contains the earlier turns. `read` and `edit` are
    calls of the client's tools; `edited` is a part of the result of `edit`."""
    return {
        QUESTIONS[2]: ANSWERS[2],
        edited: ANSWERS[1],
        QUESTIONS[1]: edit,
        BEFORE: ANSWERS[0],
        QUESTIONS[0]: read,
        "": "Nothing was to be said.",
    }


CODEX = script(
    read=call("exec_command", cmd="ls") + call("exec_command", cmd=f"cat {FILE}"),
    edit=call(
        "exec_command",
        cmd=(
            f"apply_patch <<'END'\n*** Begin Patch\n*** Update File: {FILE}\n@@\n-{BEFORE}\n+{AFTER}\n*** End "
            f"Patch\nEND"
        ),
    ),
    edited="Success. Updated the following files",
)
CLAUDE_CODE = script(
    read=call("Bash", command="ls") + call("Read", file_path=FILE),
    edit=call("Edit", file_path=FILE, old_string="red", new_string="blue"),
    edited="has been updated",
)


def long_model(folder: Path) -> Path:
    """A model with room for the prompts of such clients, tens of thousands of tokens. It has the bundled model's
    tokenizer and template, and a few arbitrary weights."""
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    size = {"hidden_size": 32, "intermediate_size": 32, "head_dim": 32}
    number = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = AutoConfig.from_pretrained(TINY, **size, **number, max_position_embeddings=CONTEXT)
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@dataclass
class Turn:
    """Result of a turn."""

    code: int
    answer: str
    num_tokens: int
    """Prompt tokens in all requests of the turn."""
    num_cached: int
    """Prompt tokens that were in the server's cache."""
    output: str

    def __str__(self) -> str:
        return f"exit code {self.code}\n{self.output}"


class Client:
    """A client in a new project, a git repository with one file. It has a fresh home, and none of this process's
    variables. Its requests to other machines are blocked, and their hosts are recorded in `hosts`."""

    def __init__(self, home: Path, **variables: str) -> None:
        self.home, self.project = home / "home", home / "project"
        self.home.mkdir()
        self.project.mkdir()
        self.file = self.project / FILE
        self.file.write_text(BEFORE + "\n")
        subprocess.run(["git", "init", "--quiet"], cwd=self.project, check=True)
        self.hosts: list[str] = []
        self._variables = {"HOME": str(self.home), "PATH": os.environ["PATH"], **variables}

    def run(self, *command: str | Path) -> tuple[int, str]:
        """Runs a command and returns its exit code and its output, including stderr."""
        with _nowhere(self.hosts) as proxy:
            names = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
            away = dict.fromkeys(names, proxy) | dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
            done = subprocess.run(
                command, cwd=self.project, env=self._variables | away, stdin=subprocess.DEVNULL, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS,
            )  # fmt: skip
        return done.returncode, done.stdout


@contextmanager
def _nowhere(hosts: list[str]) -> Iterator[str]:
    """The URL of a proxy that records the requested hosts and refuses all requests."""

    class Refusal(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            hosts.append(self.path)
            self.send_error(403)

        do_CONNECT = do_GET = do_HEAD = do_POST = do_PUT = refuse

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def settings(begin: str) -> str:
    """The block of docs/integrations.md that begins with `begin`, with the server's address instead of the page's."""
    blocks = PAGE.read_text().split("```")[1::2]
    found = next(block.removeprefix("text\n") for block in blocks if block.startswith(f"text\n{begin}"))
    return found.replace("http://127.0.0.1:8000", os.environ["PACE_URL"])


def requests(log: Path) -> list[dict[str, str]]:
    """The lines of an access log."""
    lines = [line.split() for line in log.read_text().splitlines() if line.startswith("time=")]
    return [dict(field.split("=", 1) for field in line) for line in lines]


def objects(output: str) -> list[dict]:
    """The lines of an output that are JSON objects."""
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
