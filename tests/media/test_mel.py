"""Log-mel spectrograms against transformers' feature extractors, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pace.media.mel import BLOCK, log_mel, mel_filters
from tests.media.wavs import speech

LENGTHS = [201, 319, 320, 321, 1600, 8000, 15999, 16000, 16001, 54321, 160000]
CLIPS = {
    "speech": lambda n: speech(n / 16000 + 1)[:n],
    "silence": lambda n: np.zeros(n, np.float32),
    "noise": lambda n: np.random.default_rng(n).uniform(-1, 1, n).astype(np.float32),
    "clicks": lambda n: (np.arange(n) % 997 == 0).astype(np.float32),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_bits_are_those_of_whisper(clip):
    from transformers import WhisperFeatureExtractor

    extractors = {mels: WhisperFeatureExtractor(feature_size=mels) for mels in (128, 80)}
    for length in LENGTHS:
        samples = CLIPS[clip](length)
        for mels, extractor in extractors.items():
            wanted = extractor(samples, sampling_rate=16000, padding=True, truncation=False, return_tensors="np")
            found = log_mel(samples, mels)
            assert found.dtype == np.float32 and found.shape == (mels, length // 160)
            np.testing.assert_array_equal(found, wanted["input_features"][0], err_msg=f"{length} samples, {mels} mels")


def test_long_clips_have_these_bits_too():
    """They are computed in blocks, the oracle's at once."""
    from transformers import WhisperFeatureExtractor

    extractor = WhisperFeatureExtractor(feature_size=128)
    for frames in (BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK + 17):
        samples = np.resize(speech(7, seed=frames), frames * 160 + 33)
        wanted = extractor(samples, sampling_rate=16000, padding=True, truncation=False, return_tensors="np")
        np.testing.assert_array_equal(log_mel(samples, 128), wanted["input_features"][0], err_msg=f"{frames} frames")


def test_bits_do_not_depend_on_the_threads():
    samples, threads = speech(20), torch.get_num_threads()
    try:
        found = []
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(log_mel(samples, 128))
    finally:
        torch.set_num_threads(threads)
    assert all(np.array_equal(found[0], other) for other in found[1:])


def test_filters_are_those_of_slaney():
    from transformers.audio_utils import mel_filter_bank

    for mels, n_fft in ((128, 400), (80, 400), (64, 512)):
        wanted = mel_filter_bank(1 + n_fft // 2, mels, 0.0, 8000.0, 16000, norm="slaney", mel_scale="slaney")
        np.testing.assert_array_equal(mel_filters(mels, n_fft).numpy(), wanted.astype(np.float32))
