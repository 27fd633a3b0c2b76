"""Sound of Qwen3-ASR and Qwen3-Omni against the processors of transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pace.llm.processors.qwen_audio import Qwen3ASRAudioProcessor, Qwen3OmniAudioProcessor
from pace.llm.processors.registry import load_processors
from pace.media.media import MediaError
from tests.media.wavs import speech, wav

OMNI_SETTINGS = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 128, "chunk_length": 300}
ASR_SETTINGS = {"feature_extractor_type": "Qwen3ASRFeatureExtractor", "feature_size": 128}
LENGTHS = [201, 320, 1599, 7999, 8000, 8160, 15999, 16000, 16001, 16160, 31999, 32000, 50000, 137000]


def oracle(kind: str):
    """Returns the part of the checkpoint's processor that handles sound, with its arguments."""
    from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor
    from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor
    from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import Qwen3OmniMoeProcessor

    names, extractor = {
        "omni": (Qwen3OmniMoeProcessor, WhisperFeatureExtractor(feature_size=128)),
        "asr": (Qwen3ASRProcessor, Qwen3ASRFeatureExtractor()),
    }[kind]
    processor = names.__new__(names)
    processor.feature_extractor = extractor
    processor.audio_token = "<|audio_pad|>"

    def call(clips):
        options = {**names.audio_kwargs, "return_tensors": "pt"}
        inputs, replacements = processor._process_audio(clips, **options)
        return {name: value for name, value in inputs.items() if name != "num_audio_tokens"}, replacements

    return call


PROCESSORS = {"omni": (Qwen3OmniAudioProcessor, OMNI_SETTINGS), "asr": (Qwen3ASRAudioProcessor, ASR_SETTINGS)}


@pytest.mark.parametrize("kind", PROCESSORS)
def test_each_clip_has_the_bits_of_the_oracle(kind):
    made, settings = PROCESSORS[kind]
    processor, call = made.from_dict(settings), oracle(kind)
    for length in LENGTHS:
        samples = speech(length / 16000 + 1, seed=length)[:length]
        media = processor.prepare(samples)
        wanted, replacements = call([samples])
        found = processor.arrays([media])
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            assert found[name].dtype == value.numpy().dtype, name
            np.testing.assert_array_equal(found[name], value.numpy(), err_msg=f"{name} of {length} samples")
        assert replacements == [processor.token * media.num_tokens]
        assert processor.layout(samples).num_tokens == media.num_tokens


@pytest.mark.parametrize("kind", PROCESSORS)
def test_several_clips_keep_their_own_values(kind):
    """The oracle pads samples, so that the last frames of a shorter clip are others. Masks and shapes agree."""
    made, settings = PROCESSORS[kind]
    processor, call = made.from_dict(settings), oracle(kind)
    clips = [speech(seconds) for seconds in (0.7, 2.3, 1.0)]
    media = [processor.prepare(clip) for clip in clips]
    found, (wanted, replacements) = processor.arrays(media), call(clips)
    assert [len(text) // len(processor.token) for text in replacements] == [one.num_tokens for one in media]
    np.testing.assert_array_equal(found[processor.mask], wanted[processor.mask].numpy())
    assert found["input_features"].shape == wanted["input_features"].shape
    for row, one in enumerate(media):
        frames = one.features.shape[1]
        np.testing.assert_array_equal(found["input_features"][row, :, :frames], one.features)
        if frames > 3 and kind == "omni":
            same = (
                found["input_features"][row, :, : frames - 2] == wanted["input_features"][row, :, : frames - 2].numpy()
            )
            assert same.mean() > 0.999


def test_files_and_arrays_of_one_clip_are_one_medium():
    processor = Qwen3OmniAudioProcessor.from_dict(OMNI_SETTINGS)
    samples = speech(0.5)
    media = processor.prepare(samples)
    same = processor.prepare(wav(samples.astype("<f4"), 3, bits=32))
    np.testing.assert_array_equal(media.features, same.features)
    assert media.digest == same.digest and len(media.digest) == 32
    others = [samples[:-1], samples * np.float32(0.5), (samples, 8000)]
    digests = {media.digest, *(processor.prepare(source).digest for source in others)}
    digests |= {Qwen3OmniAudioProcessor.from_dict(OMNI_SETTINGS | {"feature_size": 80}).prepare(samples).digest}
    digests |= {Qwen3ASRAudioProcessor.from_dict(ASR_SETTINGS).prepare(samples).digest}
    assert len(digests) == 6


def test_tokens_are_limited_and_counted_from_the_header():
    processor = Qwen3ASRAudioProcessor.from_dict(ASR_SETTINGS)
    clip = wav(speech(3, 8000).astype("<f4"), 3, rate=8000, bits=32)
    assert processor.layout(clip).num_tokens == processor.prepare(clip, max_tokens=39).num_tokens == 39
    for call in (processor.prepare, processor.layout):
        with pytest.raises(MediaError, match="needs 39 tokens; at most 38"):
            call(clip, max_tokens=38)
    claims_more = bytearray(clip)
    claims_more[-1:] = b""
    with pytest.raises(MediaError):
        processor.layout(bytes(claims_more))


def test_short_clips():
    with pytest.raises(MediaError, match="200 samples at 16 kHz; at least 201"):
        Qwen3OmniAudioProcessor.from_dict(OMNI_SETTINGS).prepare(np.zeros(200))
    assert Qwen3ASRAudioProcessor.from_dict(ASR_SETTINGS).prepare(np.zeros(1)).num_tokens == 7


@pytest.mark.parametrize("kind", PROCESSORS)
def test_the_oracles_own_files_are_read(kind, tmp_path):
    from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

    extractor = {"omni": WhisperFeatureExtractor(feature_size=128), "asr": Qwen3ASRFeatureExtractor()}[kind]
    extractor.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert PROCESSORS[kind][0].from_dict(settings).feature_size == 128


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("sampling_rate", 8000, NotImplementedError),
        ("hop_length", 128, NotImplementedError),
        ("hop_length", True, NotImplementedError),
        ("n_fft", 512, NotImplementedError),
        ("dither", 1e-4, NotImplementedError),
        ("padding_value", 1, NotImplementedError),
        ("n_window", 100, NotImplementedError),
        ("feature_extractor_type", "ClapFeatureExtractor", NotImplementedError),
        ("do_normalise_volume", True, NotImplementedError),
        ("feature_size", 0, ValueError),
        ("feature_size", "128", ValueError),
        ("min_length", -1, ValueError),
    ],
)
def test_settings_that_change_the_features_are_refused(name, value, error):
    with pytest.raises(error, match=f"preprocessor_config.json: .*{name}"):
        Qwen3ASRAudioProcessor.from_dict(ASR_SETTINGS | {name: value})


def test_checkpoints_find_their_processor(tmp_path):
    from transformers import Qwen3ASRFeatureExtractor, WhisperFeatureExtractor

    extractor = Qwen3ASRFeatureExtractor().to_dict()
    (tmp_path / "processor_config.json").write_text(json.dumps({"feature_extractor": extractor, "processor_class": ""}))
    config = {"architectures": ["Qwen3ASRForConditionalGeneration"], "audio_config": {"num_mel_bins": 128}}
    processors = load_processors(tmp_path, config)
    assert processors.of_kind == {"audio": Qwen3ASRAudioProcessor()}
    clips = [(speech(1, 8000), 8000), speech(0.2)]
    assert processors(audio=clips)["input_features"].shape == (2, 128, 100)
    with pytest.raises(ValueError, match="num_mel_bins = 80 contradicts the processor's settings, which have 128"):
        load_processors(tmp_path, config | {"audio_config": {"num_mel_bins": 80}})

    shared = WhisperFeatureExtractor(feature_size=128).to_dict() | {"image_processor_type": "Qwen2VLImageProcessor"}
    shared |= {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "min_pixels": 3136, "max_pixels": 12845056}
    shared |= {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    omni = tmp_path / "omni"
    omni.mkdir()
    (omni / "preprocessor_config.json").write_text(json.dumps(shared))
    for config in (
        {"architectures": ["Qwen3OmniMoeForConditionalGeneration"], "thinker_config": {"audio_config": {}}},
        {"architectures": ["Qwen3OmniMoeThinkerForConditionalGeneration"], "audio_config": {}},
    ):
        processors = load_processors(omni, config)
        assert processors.audio == Qwen3OmniAudioProcessor(feature_size=128) and processors.image is not None
        with pytest.raises(ValueError, match="num_mel_bins = 64"):
            load_processors(omni, json.loads(json.dumps(config).replace("{}", '{"num_mel_bins": 64}')))
