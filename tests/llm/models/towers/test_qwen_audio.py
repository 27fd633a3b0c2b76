"""The audio towers against transformers, on random weights and clips of many lengths."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pace.llm.models.towers import qwen_audio
from pace.llm.models.towers.qwen_audio import Convolution, QwenAudioConfig, QwenAudioTower, sinusoids
from pace.llm.processors.qwen_audio import num_tokens
from pace.llm.runners import EagerRunner, ProgramRunner
from pace.media.media import Media
from pace.ops import reference
from tests.llm.models.towers.checks import load_layers
from tests.llm.models.towers.hearing import AUDIO, MELS, features, save_hearing
from tests.llm.models.towers.seeing import run_to_end
from tests.support import backends

pytest.importorskip("transformers")

FRAMES = [1, 2, 7, 8, 9, 50, 97, 99, 100, 101, 104, 150, 200, 201, 299, 300, 355, 400, 401, 777]
MASK = "input_features_mask"


def clip(frames: int) -> Media:
    values = features([frames], frames)["input_features"][0, :, :frames].contiguous().numpy()
    return Media("audio", values, None, num_tokens(frames), str(frames).encode())


def is_near(found: Tensor, wanted: Tensor) -> bool:
    return found.shape == wanted.shape and (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


VARIANTS = [
    {},
    {"num_mel_bins": 13, "downsample_hidden_size": 5, "n_window_infer": 100, "encoder_attention_heads": 2},
    {"n_window_infer": 800, "activation_function": "relu", "encoder_layers": 1},
]


@torch.no_grad()
@pytest.mark.parametrize("fields", VARIANTS, ids=range(len(VARIANTS)))
def test_rows_of_qwen3_asr(fields, tmp_path):
    """They also have the same bits op by op and as programs, next to other clips and after them."""
    oracle = save_hearing(tmp_path, fields).model
    mels = fields.get("num_mel_bins", MELS)
    clips = [Media("audio", clip(frames).features[:mels], None, num_tokens(frames), b"") for frames in FRAMES]
    for ops in backends():
        model = load_layers(tmp_path, ops)
        runner = EagerRunner(model)
        rows = [run_to_end(runner.encode(one)) for one in clips]
        for frames, found in zip(FRAMES, rows, strict=True):
            given = features([frames], frames)
            wanted = oracle.get_audio_features(given["input_features"][:, :mels], given[MASK]).pooler_output
            assert is_near(found, wanted), (ops, frames)
        assert rows[-1].std() > 0.1
        if ops == "native":
            runner = ProgramRunner(model)
            for one, found in [*zip(clips, rows)][::-1]:
                assert torch.equal(run_to_end(runner.encode(one)), found), one.num_tokens


@functools.cache
def omni() -> tuple[Any, QwenAudioTower]:
    """The encoder of Qwen3-Omni in transformers, and the tower with its weights."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

    torch.manual_seed(7)
    oracle = Qwen3OmniMoeAudioEncoder(Qwen3OmniMoeAudioEncoderConfig(**AUDIO)).eval()
    for weight in oracle.parameters():
        torch.nn.init.normal_(weight, std=0.3 if weight.ndim == 1 else weight[0].numel() ** -0.5)
    tower = QwenAudioTower(QwenAudioConfig.read(AUDIO), 3)
    tower.allocate(reference, torch.float32)
    targets = tower.targets()
    assert set(targets) == {f"audio_tower.{name}" for name in oracle.state_dict()}
    for name, value in oracle.state_dict().items():
        for target in targets[f"audio_tower.{name}"]:
            assert target.shape == tuple(value.shape)
            target.offer(value if value.ndim < 3 else value.flatten(1), 0)
    return oracle, tower


def run(piece, batch, angles):
    """Runs a slice op by op."""
    return piece.compute(reference, batch, angles)


@torch.no_grad()
def test_rows_of_qwen3_omni():
    """A clip below a second is not filled up to a whole chunk, and so has other rows."""
    oracle, tower = omni()
    for frames in FRAMES:
        media = clip(frames)
        wanted = oracle(torch.from_numpy(media.features), feature_lens=torch.tensor([frames])).last_hidden_state
        assert is_near(run_to_end(tower.encode(media, run)), wanted), frames


def test_slices_are_small(monkeypatch):
    """Convolutions run over few chunks at a time, which does not change their rows."""
    _, tower = omni()
    whole = run_to_end(tower.encode(clip(555), run))
    assert len(list(tower.encode(clip(555), run))) == 2 * 3 + 1 + 3
    monkeypatch.setattr(qwen_audio, "TOGETHER", 1)
    assert len(list(tower.encode(clip(555), run))) == 6 * 3 + 1 + 3
    assert is_near(run_to_end(tower.encode(clip(555), run)), whole)


def test_arrays_of_a_processor_are_read():
    _, tower = omni()
    mask = tower.input_names[1]
    arrays = features([1, 133, 200])
    arrays = {"input_features": arrays["input_features"].numpy(), mask: arrays[MASK].numpy()}
    for convert in (lambda value: value, torch.from_numpy):
        media = tower.read_inputs({name: convert(value) for name, value in arrays.items()})
        assert [one.num_tokens for one in media] == [1, 18, 26]
        assert len({one.digest for one in media}) == 3
        for frames, one, values in zip((1, 133, 200), media, arrays["input_features"], strict=True):
            np.testing.assert_array_equal(one.features, values[:, :frames])
            offsets, positions = tower.angle_offsets(one)
            assert positions == one.num_tokens
            np.testing.assert_array_equal(offsets, [range(one.num_tokens)] * 3)
    for broken, problem in (
        ({mask: None}, f"{mask} is missing"),
        ({mask: arrays[mask][:2]}, rf"{mask} must be \[clips, frames\]"),
        ({mask: 1 - arrays[mask]}, "clip 0 must be ones, and then zeros"),
        ({mask: 0 * arrays[mask]}, "clip 0 must be ones, and then zeros"),
        ({"input_features": arrays["input_features"][:, 1:]}, r"floats \[clips, 20, frames\]; got .*19, 200"),
        ({"input_features": arrays[mask]}, "must be floats"),
    ):
        with pytest.raises(ValueError, match=problem):
            tower.read_inputs(arrays | broken)


def test_tokens_and_positions():
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
        SinusoidsPositionEmbedding,
        _get_feat_extract_output_lengths,
    )

    frames = torch.arange(1, 3000)
    assert [num_tokens(n) for n in frames.tolist()] == _get_feat_extract_output_lengths(frames).tolist()
    for size in (4, 32, 1280):
        assert torch.equal(sinusoids(13, size), SinusoidsPositionEmbedding(13, size).positional_embedding)


def test_convolutions_of_odd_sizes():
    weight, bias = torch.randn(5, 3, 3, 3), torch.randn(5)
    layer = Convolution("conv", 5, 3)
    layer.allocate(reference, torch.float32)
    for name, value in (("conv.weight", weight.flatten(1)), ("conv.bias", bias)):
        layer.targets()[name][0].offer(value, 0)
    for size in ((1, 1), (1, 4), (5, 2), (7, 9), (8, 8)):
        x = torch.randn(2, 3, *size)
        expected = torch.nn.functional.gelu(torch.nn.functional.conv2d(x, weight, bias, stride=2, padding=1))
        found = layer.run(x.permute(0, 2, 3, 1), run).permute(0, 3, 1, 2)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "error", "problem"),
    [
        ({"n_window": 100}, NotImplementedError, "audio_config.n_window: 100 is not implemented"),
        ({"n_window_infer": 150}, ValueError, "n_window_infer must be a multiple of 100"),
        ({"d_model": 30}, ValueError, "d_model must be even, and a multiple of encoder_attention_heads"),
        ({"d_model": 0}, ValueError, "audio_config.d_model must be an integer"),
        ({"activation_function": "tanh"}, NotImplementedError, "audio_config.activation_function"),
    ],
)
def test_configs_that_are_refused(fields, error, problem):
    with pytest.raises(error, match=problem):
        QwenAudioConfig.read(AUDIO | fields)
    with pytest.raises(ValueError, match="audio_config must be an object"):
        QwenAudioConfig.read(None)
