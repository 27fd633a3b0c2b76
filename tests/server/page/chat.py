"""The chat page as its visitors use it."""

from __future__ import annotations

import json

from tests.server.page.browser import Browser
from tests.server.page.scripted_server import Answer, ScriptedServer


class Chat:
    """The page through its visible text and its buttons."""

    def __init__(self, browser: Browser, server: ScriptedServer) -> None:
        self.browser, self.server = browser, server

    def load(self) -> None:
        self.browser.open(self.server.url)
        self.browser.wait("document.querySelector('#model').value == 'scripted'")

    def begin(self, text: str, *answers: Answer) -> None:
        """Sends a question without waiting for the answer."""
        self.server.answers.extend(answers)
        self.browser.evaluate("document.querySelector('#question').focus()")
        self.browser.type(text)
        self.browser.press("Enter")

    def ask(self, text: str, *answers: Answer) -> str:
        self.begin(text, *answers)
        return self.answer()

    def answer(self) -> str:
        """The text of the last answer, after waiting for its end."""
        self.browser.wait("document.querySelector('.answer:last-child footer:not([hidden])') != null")
        return self.text(".answer:last-child .body")

    def text(self, selector: str) -> str:
        return self.browser.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def count(self, selector: str) -> int:
        return self.browser.evaluate(f"document.querySelectorAll({json.dumps(selector)}).length")

    def click(self, selector: str) -> None:
        self.browser.evaluate(f"document.querySelector({json.dumps(selector)}).click()")

    def fill(self, selector: str, text: str) -> None:
        self.browser.evaluate(f"document.querySelector({json.dumps(selector)}).select()")
        self.browser.type(text)

    def said(self, number: int = -1) -> list[tuple[str, str]]:
        """The messages of a request, as the server received them."""
        return [(message["role"], message["content"]) for message in self.server.requests[number]["messages"]]
