"""A headless Chromium with one page, driven over the DevTools protocol through a pipe: JSON between zero bytes."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run --disable-sync "
    "--disable-background-networking --disable-component-update --disable-default-apps --disable-extensions "
    "--hide-scrollbars --remote-debugging-pipe"
).split()

KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}
"""Key -> its code, and the text that it types."""

MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, ended on exit. Skips the test if no browser is installed."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    # The browser reads commands from descriptor 3 and answers on 4. Our descriptors are higher, to leave both free.
    commands_out, commands = os.pipe()
    replies, replies_in = os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands_out, replies_in)]
    command = shlex.join([program, *FLAGS, f"--user-data-dir={profile}", "about:blank"])
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command} 3<&{theirs[0]} 4>&{theirs[1]}"],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (commands_out, replies_in, *theirs):
        os.close(end)
    try:
        yield Browser(commands, replies)
    finally:
        os.close(commands)  # the browser ends when its command pipe is closed
        os.close(replies)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Browser:
    """One page. `dialogs` has the messages of alert() and similar dialogs, `errors` the uncaught exceptions."""

    def __init__(self, commands: int, replies: int) -> None:
        self.dialogs: list[str] = []
        self.errors: list[str] = []
        self.violations: list[str] = []
        """What the page's content security policy blocked."""
        self._commands, self._replies = commands, replies
        self._received = b""
        self._session: str | None = None
        self._last_id = 0
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def forget(self) -> None:
        """Resets the window size, the preferences and the records. What pages stored stays with their origins."""
        self.resize(1100, 800)
        self.prefer()
        for notes in (self.dialogs, self.errors, self.violations):
            notes.clear()

    def call(self, method: str, timeout: float = 20.0, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result. Events that arrive meanwhile are recorded."""
        message_id = self._send(method, params)
        deadline = time.monotonic() + timeout
        while (message := self._receive(deadline)).get("id") != message_id:
            self._note(message)
        if "error" in message:
            raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page. A promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(_described(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait(self, expression: str, timeout: float = 15.0) -> Any:
        """Waits until the expression is truthy, and returns it."""
        deadline = time.monotonic() + timeout
        while not (value := self.evaluate(expression)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{expression} did not come true in {timeout} s; errors: {self.errors}")
            time.sleep(0.02)
        return value

    def open(self, url: str) -> None:
        self.evaluate("window.isOld = true")
        self.call("Page.navigate", url=url)
        self.wait("!window.isOld && document.readyState == 'complete'")

    def press(self, key: str, *modifiers: str) -> None:
        """Presses one of KEYS."""
        code, text = KEYS[key]
        common = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": code,
            "modifiers": sum(MODIFIERS[name] for name in modifiers),
        }
        down = {"type": "keyDown", "text": text} if text else {"type": "rawKeyDown"}
        self.call("Input.dispatchKeyEvent", **common, **down)
        self.call("Input.dispatchKeyEvent", **common, type="keyUp")

    def type(self, text: str) -> None:
        """Types text into the element that has the focus."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, is_phone: bool = False) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    def prefer(self, **features: str) -> None:
        """Sets media features, with `_` for `-`: prefers_color_scheme="dark"."""
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=media)

    def screenshot(self) -> bytes:
        """The window's content as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _send(self, method: str, params: dict[str, Any]) -> int:
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        return self._last_id

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._replies], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            data = os.read(self._replies, 1 << 16)
            if not data:
                raise RuntimeError("the browser has ended")
            self._received += data
        message, self._received = self._received.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Page.javascriptDialogOpening":
                self.dialogs.append(params["message"])
                self._send("Page.handleJavaScriptDialog", {"accept": True})
            case "Runtime.exceptionThrown":
                self.errors.append(_described(params["exceptionDetails"]))
            case "Log.entryAdded" if "Content Security Policy" in params["entry"]["text"]:
                self.violations.append(params["entry"]["text"])


def _described(details: dict[str, Any]) -> str:
    return details.get("exception", {}).get("description") or details["text"]
