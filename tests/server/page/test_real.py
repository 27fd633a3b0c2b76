"""The page of a real server: an answer of the bundled model is streamed."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")

from tests.server.page.browser import chromium
from tests.server.serving import ANSWER, QUESTION, Serving


def test_a_question_is_answered_and_can_be_seen(tmp_path):
    with chromium(tmp_path / "profile") as browser, Serving() as serving:
        browser.open(serving.url + "/")
        browser.wait("document.querySelector('#model').value == 'tiny'")
        browser.evaluate("document.querySelector('#question').focus()")
        browser.evaluate("document.querySelector('[name=temperature]').value = '0'")
        empty = browser.screenshot()
        browser.type(QUESTION[0]["content"])
        browser.press("Enter")
        browser.wait(f"document.querySelector('.answer .body')?.innerText == {ANSWER!r}")
        browser.wait("document.querySelector('.answer footer:not([hidden])') != null")
        picture = browser.screenshot()
        assert len(picture) > 10_000 and picture != empty
        (tmp_path / "page.png").write_bytes(picture)
