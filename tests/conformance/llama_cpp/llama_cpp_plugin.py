"""A pytest plugin that replaces what llama.cpp's server tests assume about llama.cpp's model and its start.

- Nothing is downloaded in advance.
- The server counts as started when it is ready, because its port answers earlier.
- Texts need not match those of llama.cpp's small model, but must not be empty.
"""

from __future__ import annotations

import time

import requests
import utils

_start = utils.ServerProcess.start


def start(self: utils.ServerProcess, timeout_seconds: int = 240) -> None:
    _start(self, timeout_seconds)
    while requests.get(self.make_url("/ready")).status_code != 200:
        time.sleep(0.02)


utils.ServerProcess.start = start
utils.ServerPreset.load_all = staticmethod(lambda: None)
utils.match_regex = lambda regex, text: bool(text)
