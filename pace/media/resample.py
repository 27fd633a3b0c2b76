"""Sampling rates: an exact polyphase filter from any rate to any other.

Output sample n is at time `t = n * rate / target` in input samples. It is `sum over k of x[k] h(k - t)`, where
`h(u) = c sinc(c u) kaiser(u / T)` for `|u| <= T`: a low-pass filter below the Nyquist frequency of the lower rate.
Outputs whose times differ by whole numbers share their weights, so that blocks of outputs are a matrix product."""

from __future__ import annotations

import math

import numpy as np

ATTENUATION = 100.0
"""Attenuation of the stop band in dB. Samples of 16 bits have a range of 98 dB."""
CROSSINGS = 128
"""Zero crossings of the sinc on each side. With them, the filter falls within 5 % of the Nyquist frequency."""
BETA = 0.1102 * (ATTENUATION - 8.7)
TRANSITION = (ATTENUATION - 7.95) / (2.285 * 2 * CROSSINGS * math.pi)
"""Width of the transition as a part of the lower Nyquist frequency, at which it ends. BETA and this are Kaiser's
formulas."""
BLOCK = 256
"""Outputs computed by one matrix: the product's work is at most twice the filter's when rates fall."""
PIECE = 1 << 20
"""Elements of the input that are copied at once."""


def num_weights(rate: int, target: int) -> int:
    """Number of weights that `resample` computes for a long clip. Usual rates need up to 500,000, and rates that have
    little in common up to 50 million. A million takes 0.3 s."""
    divisor = math.gcd(rate, target)
    return target // divisor * 2 * math.ceil(CROSSINGS * max(1.0, rate / target))


def resample(samples: np.ndarray, rate: int, target: int) -> np.ndarray:
    """Returns float32 `[ceil(N * target / rate)]` for float32 `samples [N]`, computed in float64. Beyond its ends, the
    input is zero. Takes memory of `samples` in float32 twice and 32 MiB."""
    if rate == target:
        return samples
    divisor = math.gcd(rate, target)
    up, down = target // divisor, rate // divisor
    count = -(-len(samples) * up // down)
    reach = math.ceil(CROSSINGS * max(1.0, down / up))
    cycle = up * max(1, BLOCK // up)
    step = cycle // up * down
    """Inputs between outputs whose distance is `cycle`."""
    num_cycles = -(-count // cycle)
    padded = np.zeros(num_cycles * step + 2 * reach + 2, np.float32)
    padded[reach : reach + len(samples)] = samples
    result = np.empty((num_cycles, cycle), np.float32)
    for first in range(0, min(cycle, count), BLOCK):
        last = min(first + BLOCK, cycle)
        weights = _weights(first, last, up, down, reach)
        begin = first * down // up
        rows = np.lib.stride_tricks.sliding_window_view(padded[begin:], len(weights))[::step][:num_cycles]
        few = max(1, PIECE // len(weights))
        for row in range(0, num_cycles, few):
            result[row : row + few, first:last] = rows[row : row + few].astype(np.float64) @ weights
    return result.reshape(-1)[:count]


def _weights(first: int, last: int, up: int, down: int, reach: int) -> np.ndarray:
    """Returns float64 `[K, last - first]`: the weights of outputs `first .. last` for the K inputs that they read. The
    first of them is `reach` before the time of output `first`, rounded down."""
    numbers = np.arange(first, last)
    whole, part = numbers * down // up, numbers * down % up / up
    offsets = np.arange(-reach, reach + 2)
    distance = offsets[:, None] - part
    cutoff = (1 - TRANSITION / 2) * min(1.0, up / down)
    inside = np.clip(1 - (distance / (CROSSINGS * max(1.0, down / up))) ** 2, 0, None)
    window = np.where(inside > 0, np.i0(BETA * np.sqrt(inside)) / np.i0(BETA), 0.0)
    weights = np.zeros((whole[-1] - whole[0] + len(offsets), len(numbers)))
    weights[(offsets + reach)[:, None] + (whole - whole[0]), np.arange(len(numbers))] = (
        cutoff * np.sinc(cutoff * distance) * window
    )
    return weights
