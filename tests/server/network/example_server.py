"""`python -m tests.server.network.example_server '{"port": 0}' '{"load_until": "/tmp/file"}'`: a server whose service
loads no model, run in a separate process to test start-up and shutdown."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from pathlib import Path

from pace.server.limits import Limits
from pace.server.network.run import CannotListen, run
from pace.server.network.threads import in_thread
from pace.server.options import ServeOptions
from tests.waiting import PATIENCE, wait_until


class ExampleService:
    """Loads, and answers at /work, when the given files exist."""

    def __init__(self, load_until: str = "/", fails: bool = False, work_until: str = "/", hangs: bool = False):
        self.status = "loading"
        self.is_loading = False
        self.max_body_bytes = Limits().body_bytes
        self.load_until, self.fails, self.work_until, self.hangs = Path(load_until), fails, Path(work_until), hangs
        self.at_work: set[asyncio.Task] = set()

    async def load(self) -> None:
        await in_thread(lambda: wait_until(self.load_until.exists, math.inf))
        if self.fails:
            self.status = "failed"
            raise FileNotFoundError("there is no such model")
        self.status = "ready"

    async def work(self) -> str:
        while not self.work_until.exists():
            await asyncio.sleep(0.002)
        return "done"

    async def drain(self, seconds: float) -> None:
        self.status = "draining"
        if self.at_work:
            _, late = await asyncio.wait(self.at_work, timeout=seconds)
            for task in late:
                task.cancel()

    def close(self) -> None:
        print("closed", file=sys.stderr, flush=True)

    async def __call__(self, scope, receive, send) -> None:
        status, text = 200, self.status
        if scope["path"] == "/work" and self.status == "ready":
            print("at work", file=sys.stderr, flush=True)
            if self.hangs:
                time.sleep(10 * PATIENCE)
            task = asyncio.ensure_future(self.work())
            self.at_work.add(task)
            try:
                text = await task
            except asyncio.CancelledError:
                status, text = 500, "cut short"
            self.at_work.discard(task)
        elif self.status != "ready":
            status = 503
        headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(text))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})


def main(options: str, service: str = "{}") -> int:
    fields = json.loads(options)
    limits = Limits(**fields.pop("limits", {}))
    example = ExampleService(**json.loads(service))
    try:
        return run(ServeOptions("example", limits=limits, **fields), lambda: (example, example))
    except (CannotListen, FileNotFoundError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2 if isinstance(error, CannotListen) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
