from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.page.browser import Browser, chromium
from tests.server.page.chat import Chat
from tests.server.page.scripted_server import ScriptedServer, scripted_server


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """A server on a new port, and so with an origin for which nothing is stored yet."""
    with scripted_server() as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def chat(browser: Browser, server: ScriptedServer) -> Iterator[Chat]:
    """The page as a new visitor sees it. Checks afterwards that no error occurred in it."""
    browser.forget()
    chat = Chat(browser, server)
    chat.load()
    yield chat
    assert (browser.errors, browser.dialogs, browser.violations) == ([], [], [])
