"""Every architecture and variant with experts against transformers, and against itself, as test_oracle.py has those
without."""

from __future__ import annotations

import pytest

from tests.llm.models.variants import IDS, ROUTED, VARIANTS
from tests.llm.models.visit import Visit

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", [name for name, variant in zip(IDS, VARIANTS) if variant[0] in ROUTED])
def test_variant(name, tmp_path, subtests, pytestconfig, restore_isa_and_threads):
    Visit(name, tmp_path, in_full=pytestconfig.getoption("tier") == "all").check_all(subtests)
