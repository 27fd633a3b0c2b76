"""Sound of Gemma 4: `Gemma4AudioFeatureExtractor` (E2B and E4B) and `Gemma4UnifiedAudioFeatureExtractor` (12B) of
transformers. A token is 40 ms of sound."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from pace.llm.models.model_config import count, number
from pace.llm.processors.settings import check_same, read_settings
from pace.media.media import Layout, Media, MediaError, digest_of
from pace.media.mel import SAMPLING_RATE, log_mel_of_magnitudes
from pace.media.sound import SoundSource, open_sound
from pace.naming import counted

FRAME, HOP, FFT = 320, 160, 512
"""Samples of a frame, between frames, and of a transform."""
MULTIPLE = 128
"""transformers fills a clip with silence up to a multiple of this many samples."""
MAX_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Gemma4Sound:
    """Processor of sound with the settings of one checkpoint."""

    kind: ClassVar[str] = "audio"
    token: ClassVar[str] = "<|audio|>"
    marker: ClassVar[str] = token
    least_tokens: ClassVar[int] = 1
    placeholder: ClassVar[str] = token
    only: ClassVar[Mapping[str, tuple]]
    without_effect: ClassVar[frozenset[str]]

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], file: str = "preprocessor_config.json") -> Self:
        """Reads the settings of `raw`. Raises ValueError or NotImplementedError that names `file` and the field."""
        return cls(**read_settings(cls, raw, file, cls.only, cls.without_effect))

    @abstractmethod
    def check_tower(self, audio_config: Any) -> None:
        """Raises ValueError if frames are not those of the tower that config.json describes."""

    @abstractmethod
    def frames(self, samples: np.ndarray) -> np.ndarray:
        """Frames float32 `[N, K]` of samples."""

    @abstractmethod
    def num_tokens(self, num_samples: int) -> int:
        """Tokens of this number of samples. Raises MediaError if they are too few or too many."""

    def prepare(self, source: SoundSource, max_tokens: int | None = None) -> Media:
        """Decodes a clip and returns its frames. Raises MediaError for a clip that is broken, too short or too long, or
        has more than `max_tokens` tokens. Else it raises as `open_sound`."""
        sound = open_sound(source, SAMPLING_RATE)
        num_tokens = self._tokens(sound.num_samples(SAMPLING_RATE), max_tokens)
        samples = sound.samples(SAMPLING_RATE)
        digest = digest_of(f"{self!r} {len(samples)} ", samples)
        return Media("audio", self.frames(samples), None, num_tokens, digest)

    def layout(self, source: SoundSource, max_tokens: int | None = None) -> Layout:
        """The text of a clip, from only its header. Raises as `prepare`."""
        num_tokens = self._tokens(open_sound(source, SAMPLING_RATE).num_samples(SAMPLING_RATE), max_tokens)
        return Layout(f"<|audio>{self.token * num_tokens}<audio|>", (num_tokens,))

    def arrays(self, media: Sequence[Media]) -> dict[str, np.ndarray]:
        """`input_features` float32 `[clips, N, K]`, and bool `[clips, N]` that is true for frames of the clip."""
        longest = max(len(one.features) for one in media)
        features = np.zeros((len(media), longest, media[0].features.shape[1]), np.float32)
        mask = np.zeros((len(media), longest), bool)
        for row, one in enumerate(media):
            features[row, : len(one.features)] = one.features
            mask[row, : len(one.features)] = True
        return {"input_features": features, "input_features_mask": mask}

    def _tokens(self, num_samples: int, max_tokens: int | None) -> int:
        tokens = self.num_tokens(num_samples)
        if max_tokens is not None and tokens > max_tokens:
            raise MediaError(f"the sound needs {counted(tokens, 'token')}; at most {max_tokens} are allowed")
        return tokens


@dataclass(frozen=True, kw_only=True)
class Gemma4AudioProcessor(Gemma4Sound):
    """The processor of E2B and E4B. A clip becomes a log-mel spectrogram of 100 frames a second."""

    only: ClassVar[Mapping[str, tuple]] = {
        "feature_extractor_type": ("Gemma4AudioFeatureExtractor",),
        "sampling_rate": (SAMPLING_RATE,),
        "padding_value": (0.0, 0),
        "frame_length": (FRAME,),
        "frame_length_ms": (20.0, 20),
        "hop_length": (HOP,),
        "hop_length_ms": (10.0, 10),
        "fft_length": (FFT,),
        "fft_overdrive": (False,),
        "min_frequency": (0.0, 0),
        "max_frequency": (8000.0, 8000),
        "preemphasis": (0.0, 0),
        "dither": (0.0, 0),
        "input_scale_factor": (1.0, 1),
        "per_bin_mean": (),
        "per_bin_stddev": (),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"processor_class", "auto_map", "padding_side", "return_attention_mask", "preemphasis_htk_flavor"}
    )

    feature_size: int = count(128, 512)
    """Bands of the spectrogram."""
    mel_floor: float = number(1e-3, 1e-30, 1.0)

    def check_tower(self, audio_config: Any) -> None:
        channels = audio_config.get("subsampling_conv_channels") if isinstance(audio_config, dict) else None
        wanted = channels[0] // 4 if isinstance(channels, list) and channels and type(channels[0]) is int else 32
        if -(-self.feature_size // 4) != wanted:
            raise ValueError(
                f"config.json: audio_config.subsampling_conv_channels needs {4 * wanted} bands, but the processor's "
                f"settings have {self.feature_size}"
            )

    def num_tokens(self, num_samples: int) -> int:
        if num_samples <= HOP:
            raise MediaError(f"the sound has {counted(num_samples, 'sample')} at 16 kHz; at least {HOP + 1} are needed")
        if num_samples > MAX_SECONDS * SAMPLING_RATE:
            raise MediaError(f"the sound has {num_samples / SAMPLING_RATE:.1f} s; at most {MAX_SECONDS} s are taken")
        return -(-_num_frames(num_samples) // 4)

    def frames(self, samples: np.ndarray) -> np.ndarray:
        filled = np.pad(samples, (HOP, -len(samples) % MULTIPLE))
        found = log_mel_of_magnitudes(filled, self.feature_size, FRAME, HOP, FFT, self.mel_floor)
        return np.ascontiguousarray(found[: _num_frames(len(samples))])


@dataclass(frozen=True, kw_only=True)
class Gemma4UnifiedAudioProcessor(Gemma4Sound):
    """The processor of the 12B. A clip is cut into frames of samples, each a token."""

    only: ClassVar[Mapping[str, tuple]] = {
        "feature_extractor_type": ("Gemma4UnifiedAudioFeatureExtractor",),
        "sampling_rate": (SAMPLING_RATE,),
        "padding_value": (0.0, 0),
    }
    without_effect: ClassVar[frozenset[str]] = frozenset(
        {"processor_class", "auto_map", "feature_size", "padding_side", "return_attention_mask"}
    )

    audio_samples_per_token: int = count(640)

    def check_tower(self, audio_config: Any) -> None:
        size = audio_config.get("audio_embed_dim", 640) if isinstance(audio_config, dict) else 640
        check_same("audio_config.audio_embed_dim", size, self.audio_samples_per_token)

    def frames(self, samples: np.ndarray) -> np.ndarray:
        filled = np.pad(samples, (0, -len(samples) % self.audio_samples_per_token))
        return filled.reshape(-1, self.audio_samples_per_token)

    def num_tokens(self, num_samples: int) -> int:
        return -(-num_samples // self.audio_samples_per_token)


def _num_frames(num_samples: int) -> int:
    """Frames that only have samples of the clip, apart from silence before it."""
    return (num_samples - HOP - 1) // HOP + 1
