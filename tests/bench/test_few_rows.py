"""Predictions for codes that take longer to decode than to read."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pace.bench.limits import Limits
from pace.bench.prediction import AVX2_CODES, AVX2_VNNI_CODES, VNNI_CODES, predict
from pace.ops.weight_layout import GRIDS
from tests.bench.test_costs import REACHED, costs_of


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen2.5-0.5b"])
def test_codes_that_take_longer_to_decode_than_to_read(name):
    """Few rows take as long as one, however fast the memory is."""
    costs = costs_of(name)
    slow, fast = replace(REACHED, one_row=0.05), Limits("avx2", 2, 1e9, 100.0)
    one, four = (predict(costs, slow, fast, 4, 0, batch).step_seconds for batch in (1, 4))
    assert one == four == pytest.approx((costs.layer_flops_per_token + costs.head_flops) / 5e9)
    of_prompt = predict(costs, slow, fast, 4, 0).prefill_seconds - costs.prefill_attention_flops(4) / 50e9
    assert of_prompt == pytest.approx(one)
    many = [predict(costs, reached, fast, 1000, 0, 64) for reached in (slow, REACHED)]
    assert many[0].step_seconds == many[1].step_seconds
    assert many[0].prefill_seconds == pytest.approx(many[1].prefill_seconds, rel=0.01)


def test_points_of_grids_have_shares_of_their_own():
    for table in (AVX2_CODES, AVX2_VNNI_CODES, VNNI_CODES):
        assert all(0.1 < table[code].one_row < 0.5 < table[code].products for code in GRIDS)
        assert table["int4"].one_row == math.inf
