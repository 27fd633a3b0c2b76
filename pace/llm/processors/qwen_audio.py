"""Sound of Qwen3-ASR and Qwen3-Omni: `Qwen3ASRFeatureExtractor` and `WhisperFeatureExtractor` of transformers.

A clip is a log-mel spectrogram of 100 frames a second. A second makes 13 tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from pace.llm.models.model_config import count
from pace.llm.processors.settings import check_same, read_settings
from pace.media.media import Layout, Media, MediaError, digest_of
from pace.media.mel import SAMPLING_RATE, log_mel
from pace.media.sound import SoundSource, open_sound
from pace.naming import counted

CHUNK = 100
"""Frames that the tower reads together: a second."""
CHUNK_TOKENS = 13
HOP, N_FFT = 160, 400
"""Samples between frames, and samples of a frame."""
ONLY = {
    "sampling_rate": (SAMPLING_RATE,),
    "hop_length": (HOP,),
    "n_fft": (N_FFT,),
    "dither": (0.0, 0),
    "padding_value": (0.0, 0),
}
"""Fields that are only implemented for these values."""
WITHOUT_EFFECT = frozenset(
    """processor_class auto_map image_processor_type video_processor_type chunk_length n_samples nb_max_frames
    padding_side return_attention_mask
    patch_size merge_size temporal_patch_size min_pixels max_pixels size resample rescale_factor image_mean image_std
    do_convert_rgb do_resize do_rescale do_normalize do_center_crop do_pad""".split()
)
"""Fields that change nothing for a clip that is neither cut nor padded. The last two lines are about images: Qwen3-Omni
has one file for both."""


@dataclass(frozen=True, kw_only=True)
class Qwen3OmniAudioProcessor:
    """Processor with the settings of one checkpoint, under their names in preprocessor_config.json."""

    kind: ClassVar[str] = "audio"
    token: ClassVar[str] = "<|audio_pad|>"
    marker: ClassVar[str] = token
    least_tokens: ClassVar[int] = 1
    placeholder: ClassVar[str] = "<|audio_start|><|audio_pad|><|audio_end|>"
    mask: ClassVar[str] = "feature_attention_mask"
    """Name of the array that says which frames are there."""
    transcribes: ClassVar[bool] = False
    """True for a model that answers every clip with its words."""
    multiple: ClassVar[int] = 1
    """The frames of `arrays` are a multiple of this."""
    only: ClassVar[Mapping[str, tuple]] = ONLY | {"feature_extractor_type": ("WhisperFeatureExtractor",)}

    feature_size: int = count(80, 512)
    """Bands of the spectrogram."""
    min_length: ClassVar[int] = 0
    """Samples up to which a shorter clip is filled with silence."""

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], file: str = "preprocessor_config.json") -> Qwen3OmniAudioProcessor:
        """Reads the settings of `raw`. Raises ValueError or NotImplementedError that names `file` and the field."""
        return cls(**read_settings(cls, raw, file, cls.only, WITHOUT_EFFECT))

    def check_tower(self, audio_config: Any) -> None:
        """Raises ValueError if the bands are not those of the tower that config.json describes."""
        bands = audio_config.get("num_mel_bins", 128) if isinstance(audio_config, dict) else self.feature_size
        check_same("audio_config.num_mel_bins", bands, self.feature_size)

    def layout(self, source: SoundSource, max_tokens: int | None = None) -> Layout:
        """The placeholders of a clip, from only its header. Raises as `prepare`."""
        num_tokens = self._tokens(open_sound(source, SAMPLING_RATE).num_samples(SAMPLING_RATE), max_tokens)
        return Layout(self.token * num_tokens, (num_tokens,))

    def prepare(self, source: SoundSource, max_tokens: int | None = None) -> Media:
        """Decodes a clip and returns its features. An array without a sampling rate has 16 kHz. Raises MediaError for a
        clip that is broken, too short, or of more than `max_tokens` tokens. Else it raises as `open_sound`."""
        sound = open_sound(source, SAMPLING_RATE)
        num_tokens = self._tokens(sound.num_samples(SAMPLING_RATE), max_tokens)
        samples = sound.samples(SAMPLING_RATE)
        digest = digest_of(f"{self!r} {len(samples)} ", samples)
        samples = np.pad(samples, (0, max(0, self.min_length - len(samples))))
        return Media("audio", log_mel(samples, self.feature_size), None, num_tokens, digest)

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """Returns `input_features` float32 `[B, mels, frames]`, and int32 `[B, frames]` with 1 for frames that are
        there. Shorter clips are followed by zeros, so that each has the values that it has alone."""
        width = max(one.features.shape[1] for one in media)
        width += -width % self.multiple
        features = np.zeros((len(media), self.feature_size, width), np.float32)
        mask = np.zeros((len(media), width), np.int32)
        for row, one in enumerate(media):
            features[row, :, : one.features.shape[1]] = one.features
            mask[row, : one.features.shape[1]] = 1
        return {"input_features": features, self.mask: mask}

    def _tokens(self, num_samples: int, max_tokens: int | None) -> int:
        num_samples = max(num_samples, self.min_length)
        if num_samples <= N_FFT // 2:  # a frame is centred, and reflected at the ends
            least = N_FFT // 2 + 1
            raise MediaError(f"the sound has {counted(num_samples, 'sample')} at 16 kHz; at least {least} are needed")
        tokens = num_tokens(num_samples // HOP)
        if max_tokens is not None and tokens > max_tokens:
            raise MediaError(f"the sound needs {counted(tokens, 'token')}; at most {max_tokens} are allowed")
        return tokens


@dataclass(frozen=True, kw_only=True)
class Qwen3ASRAudioProcessor(Qwen3OmniAudioProcessor):
    """Fills clips up to half a second with silence, and features up to whole chunks with zeros."""

    mask: ClassVar[str] = "input_features_mask"
    transcribes: ClassVar[bool] = True
    multiple: ClassVar[int] = CHUNK
    only: ClassVar[Mapping[str, tuple]] = ONLY | {
        "feature_extractor_type": ("Qwen3ASRFeatureExtractor",),
        "n_window": (CHUNK // 2,),
    }

    feature_size: int = count(128, 512)
    min_length: int = count(8000, 30 * SAMPLING_RATE, 0)


def num_tokens(frames: int) -> int:
    """Tokens of a clip, and rows that the tower returns: the frames of each chunk are halved three times, rounded
    up."""
    chunks, rest = divmod(frames, CHUNK)
    return CHUNK_TOKENS * chunks + -(-rest // 8)
