"""Compares every architecture and variant with experts with transformers and with itself. test_oracle.py tests those
without experts."""

from __future__ import annotations

import pytest

from tests.llm.models.variants import IDS, ROUTED, VARIANTS
from tests.llm.models.visit import Visit

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", [name for name, variant in zip(IDS, VARIANTS) if variant[0] in ROUTED])
def test_variant(name, tmp_path, subtests, pytestconfig, restore_isa_and_threads):
    Visit(name, tmp_path, in_full=pytestconfig.getoption("tier") == "all").check_all(subtests)
