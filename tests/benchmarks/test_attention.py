"""Results that benchmarks/attention.py computes from runs."""

from __future__ import annotations

from benchmarks.attention import Row, medians, table


def test_each_number_is_a_median_of_its_own():
    rows = [Row(1.0, 0.5, 30.0, 0.9), Row(3.0, 0.1, 20.0, 0.7), Row(2.0, 0.3, 10.0, 0.8)]
    assert medians(rows) == Row(2.0, 0.3, 20.0, 0.8)


def test_a_row_of_the_table():
    text = table({("tiny", "int8", 4096): Row(1.5, 0.0312, 12.345, 0.876)}, 2)
    assert "with 2 threads" in text
    assert text.splitlines()[-1] == "| tiny | int8 | 4,096 | 1.50 | 3.1% | 12.3 | 0.88 |"
