from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def serving() -> Iterator:
    """One server for the tests of a module, which are to leave it as they found it."""
    from tests.server.serving import Serving

    with Serving() as running:
        yield running


@pytest.fixture(autouse=True)
def stays_well(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test of the module's server, a plain request has its exact text, and nothing is left in use."""
    yield
    if "serving" in request.fixturenames:
        serving = request.getfixturevalue("serving")
        serving.check_well()
        serving.check_idle()
