from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def serving() -> Iterator:
    """A server of the bundled model that takes images and sound, and records them."""
    from tests.llm.fake_media import MediaGenerator
    from tests.server.serving import Serving

    generator = MediaGenerator()
    with Serving(generator) as running:
        yield running
    generator.driver.close()
