"""The polyphase filter against its definition in float64, and what it does to tones."""

from __future__ import annotations

import numpy as np
import pytest

from pace.media.resample import ATTENUATION, BETA, CROSSINGS, TRANSITION, num_weights, resample
from pace.media.sound import MAX_WEIGHTS
from tests.media.wavs import speech
from tests.plugins.tiers import sample

RATES = [4000, 8000, 11025, 12000, 15990, 22050, 44056, 24000, 32000, 44100, 48000, 88200, 96000, 192000]
USUAL = (8000, 22050, 44100, 48000, 15990)


def by_definition(samples: np.ndarray, rate: int, target: int, outputs: np.ndarray) -> np.ndarray:
    """Returns float64 values of some outputs: the sum over all inputs."""
    ratio = min(1.0, target / rate)
    cutoff = ratio * (1 - TRANSITION / 2)
    u = np.arange(len(samples)) - outputs[:, None] * rate / target
    inside = np.clip(1 - (u * ratio / CROSSINGS) ** 2, 0, None)
    window = np.where(inside > 0, np.i0(BETA * np.sqrt(inside)) / np.i0(BETA), 0)
    return (samples.astype(np.float64) * cutoff * np.sinc(cutoff * u) * window).sum(1)


@pytest.mark.parametrize("rate", sample(RATES, lambda rate: rate in USUAL))
def test_values_are_those_of_the_definition(rate):
    for length in (1, 7, 3001):
        samples = speech(1, rate)[:length]
        found = resample(samples, rate, 16000)
        assert found.dtype == np.float32 and found.shape == (-(-length * 16000 // rate),)
        outputs = np.unique(np.linspace(0, len(found) - 1, 60).astype(int))
        wanted = by_definition(samples, rate, 16000, outputs)
        # The sums are in float64, so that the only rounding is the last one; times differ by 1e-12 of an input.
        np.testing.assert_allclose(found[outputs], wanted, rtol=2**-23, atol=1e-8)


def test_weights_are_counted():
    for rate in RATES:
        assert num_weights(rate, 16000) <= MAX_WEIGHTS, rate
    assert num_weights(48000, 16000) == 2 * 128 * 3 and num_weights(8000, 16000) == 2 * 2 * 128
    assert num_weights(44101, 16000) > MAX_WEIGHTS


def test_a_long_clip_goes_through_in_pieces(monkeypatch):
    from pace.media import resample as module

    samples = speech(3, 44100)
    whole = resample(samples, 44100, 16000)
    monkeypatch.setattr(module, "PIECE", 5000)
    np.testing.assert_array_equal(resample(samples, 44100, 16000), whole)


def test_the_same_rate_is_left_alone():
    samples = speech(0.1)
    assert resample(samples, 16000, 16000) is samples


def tone(frequency: float, rate: int) -> np.ndarray:
    return np.sin(2 * np.pi * frequency * np.arange(rate) / rate).astype(np.float32)


@pytest.mark.parametrize("rate", [8000, 44100, 48000])
def test_tones_below_the_band_edge_keep_their_form(rate):
    """The pass band reaches to 95 % of the lower Nyquist frequency."""
    edge = (1 - TRANSITION) * min(rate, 16000) / 2
    assert edge > 0.949 * min(rate, 16000) / 2
    for frequency in (0.0, 50.0, 1234.5, edge):
        wanted = np.sin(2 * np.pi * frequency * np.arange(16000) / 16000)
        found = resample(tone(frequency, rate), rate, 16000)
        middle = slice(2000, 14000)
        error = np.abs(found - wanted)[middle].max()
        assert error < 10 ** (-(ATTENUATION - 6) / 20), (frequency, error)


@pytest.mark.parametrize("rate", [44100, 48000])
def test_tones_above_the_band_are_gone(rate):
    for frequency in (8000.0, 8500.0, 12000.0, rate / 2 - 100):
        found = resample(tone(frequency, rate), rate, 16000)
        assert np.abs(found[2000:14000]).max() < 10 ** (-(ATTENUATION - 6) / 20), frequency
