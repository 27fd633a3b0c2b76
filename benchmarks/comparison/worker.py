"""One runtime in a separate process, driven by JSON lines: `python -m benchmarks.comparison.worker RUNTIME`, and its
other end, `Worker`.

Separate processes are used because runtimes bring their own OpenMP, peak memory is measured by process, and memory is
freed when a process ends. Output of libraries goes to a log; only the worker writes to the pipe.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
MACHINE = "machine"
"""Name of the worker that runs no model, and measures the limits."""
LIMIT_SECONDS = 0.3
"""Time to measure each of the two limits, before and after every run."""
QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


class WorkerError(RuntimeError):
    """Error of the other process, with its message."""


class Worker:
    """The driver's end of the pipe."""

    def __init__(
        self,
        runtime: str,
        python: str = sys.executable,
        environment: dict[str, str] | None = None,
        log: Path | None = None,
        module: str = "benchmarks.comparison.worker",
    ) -> None:
        """`module` runs in the other process, and takes the runtime as its argument."""
        self.runtime = runtime
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(paths)} | (environment or {})
        command = [python, "-m", module, runtime]
        with open(log or os.devnull, "ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment, text=True
            )

    def ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        """Sends a request and returns its answer. Raises WorkerError if the other side raised or ended."""
        try:
            self.process.stdin.write(json.dumps({"do": operation, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:
            line = ""
        if not line:
            code = self.process.wait()
            raise WorkerError(
                f"its process ended with code {code}" + (": out of memory, most likely" if code == -9 else "")
            )
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    def cpu_seconds(self) -> float:
        """CPU seconds of all its threads and finished child programs since its start."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Ends the process if it still runs."""
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Server:
    """The worker's end: its methods are the operations."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.subject = None

    @property
    def kind(self):
        from benchmarks.comparison.runtimes import RUNTIMES

        return RUNTIMES[self.name]

    def describe(self) -> dict[str, Any]:
        began = time.perf_counter()
        self.kind.import_modules()
        import_s = time.perf_counter() - began
        refusals = {variant.name: self.kind.refusal(variant.name) for variant in self.kind.variants}
        return {"import_s": import_s, "versions": self.kind.versions(), "refusals": refusals}

    def convert(self, checkpoint: str, variant: str, target: str) -> dict[str, Any]:
        self.kind.import_modules()
        self.kind.convert(Path(checkpoint), variant, Path(target))
        return {}

    def load(self, source: str, variant: str, threads: int) -> dict[str, Any]:
        self.kind.import_modules()
        began = time.perf_counter()
        self.subject = self.kind(Path(source), variant, threads)
        seconds = None if self.kind.is_program else time.perf_counter() - began
        return {"load_s": seconds, "step_weight_bytes": self.subject.step_weight_bytes()}

    def tune(self, prompts: list[list[int]]) -> dict[str, Any]:
        self.subject.tune(prompts)
        return {}

    def run(self, prompts: list[list[int]], generated: int) -> dict[str, Any]:
        return asdict(self.subject.run(prompts, generated))

    def logits(self, prompt: list[int], path: str) -> dict[str, Any]:
        np.save(path, self.subject.logits(prompt).astype(np.float32))
        return {}

    def status(self) -> dict[str, Any]:
        return {"peak_mib": self.subject.peak_mib(), "settings": self.subject.settings()}

    def machine(self, threads: int | None) -> dict[str, Any]:
        from pace import _C

        _C.set_num_threads(threads or _C.cpu_info()["default_threads"])
        return {"isa": _C.isa(), "threads": _C.get_num_threads()}

    def limits(self) -> dict[str, Any]:
        from pace.bench import limits

        return asdict(limits.measure(LIMIT_SECONDS))


def serve(requests: TextIO, answers: TextIO, server: Any) -> None:
    """Answers one line with one line until the input ends."""
    for line in requests:
        request = json.loads(line)
        operation = request.pop("do")
        try:
            answer = getattr(server, operation)(**request)
        except BaseException as error:  # a panic or an exit in a library is an answer, too
            answer = {"error": f"{type(error).__name__}: {error}"}
            import traceback

            traceback.print_exc()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers, Server(sys.argv[1]))


if __name__ == "__main__":
    main()
