from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def serving() -> Iterator:
    """One server for the tests of a module, which must leave its state unchanged."""
    from tests.server.serving import Serving

    with Serving() as running:
        yield running


@pytest.fixture(autouse=True)
def stays_well(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks after each test of the module's server that a plain request gives its exact text and nothing is in use."""
    yield
    if "serving" in request.fixturenames:
        serving = request.getfixturevalue("serving")
        serving.check_well()
        serving.check_idle()
