"""Prompts with images and sound for Qwen3-Omni: positions and greedy text are those of transformers."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from pace.llm.inputs import read_prompts
from pace.llm.models.model_list import read_config
from pace.ops import reference
from tests.llm.models.towers.checks import check_every_way_to_run
from tests.llm.models.towers.omni import CLIP, add_speaking_parts, inputs_of, make_config, save_omni
from tests.llm.models.towers.prompts import together
from tests.llm.models.towers.seeing import load, oracle_tokens, run

pytest.importorskip("transformers")

ROWS = [
    [],
    [150],
    [(4, 6)],
    [(2, 2), 20],
    [250, (8, 4), 100],
    [(4, 4), (2, 10), 333],
    [20, 101, (2, 4)],
]
"""Media of each prompt: the patches of images, and the frames of clips."""


class EachAlone(torch.nn.Module):
    """An audio tower of transformers that encodes each clip alone: in a batch, it pads a clip below a second to the
    longest."""

    def __init__(self, tower: torch.nn.Module):
        super().__init__()
        self.tower = tower

    def forward(self, input_features: Tensor, feature_lens: Tensor, **fields):
        pieces = input_features.split(feature_lens.tolist(), 1)
        outputs = [self.tower(piece, torch.tensor([piece.shape[1]]), **fields) for piece in pieces]
        outputs[0].last_hidden_state = torch.cat([output.last_hidden_state for output in outputs])
        return outputs[0]


@pytest.fixture(scope="module")
def omni(tmp_path_factory):
    folder = tmp_path_factory.mktemp("omni")
    thinker = save_omni(folder)
    add_speaking_parts(folder)
    return thinker, folder


def test_positions_of_random_mixtures() -> None:
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    config = make_config()
    with torch.device("meta"):
        oracle = Qwen3OmniMoeThinkerForConditionalGeneration(config.thinker_config)
    model_class, ours = read_config(config.to_dict() | {"model_type": "qwen3_omni_moe"}, media=True)
    model, chance = model_class(ours, torch.float32, reference), random.Random(0)
    for seed in range(16):
        media = [
            chance.choice([chance.randint(1, 420), (2 * chance.randint(1, 5), 2 * chance.randint(1, 5))])
            for _ in range(chance.randint(0, 4))
        ]
        inputs = inputs_of(media, seed)
        clips = inputs.get("feature_attention_mask")
        expected, delta = oracle.get_rope_index(
            inputs["input_ids"],
            inputs.get("image_grid_thw"),
            attention_mask=inputs["attention_mask"],
            audio_seqlens=None if clips is None else clips.sum(-1),
        )
        prompts = read_prompts(inputs, None, model.vocab_size, model.towers)
        (row,) = prompts.rows
        (spans,) = prompts.media or [()]
        assert len(spans) == len(media)
        found = model.angle_positions(spans, 0, len(row) + 3)
        after = len(row) + np.arange(3) + int(delta)
        assert np.array_equal(found, np.concatenate([expected[:, 0].numpy(), np.tile(after, (3, 1))], 1)), media
        start, end = sorted(chance.sample(range(len(row) + 4), 2))
        assert np.array_equal(model.angle_positions(spans, start, end), found[:, start:end])


def test_greedy_text_is_that_of_transformers(omni) -> None:
    """Alone, in a batch that is padded on the left, and with prompts cut into chunks: the same bits."""
    thinker, folder = omni
    tower = thinker.model.audio_tower
    with load(folder, prefix_cache_bytes=0) as model:
        alone = []
        for index, media in enumerate(ROWS):
            inputs = inputs_of(media, index)
            alone += run(model, inputs)
            frames = [medium for medium in media if isinstance(medium, int)]
            thinker.model.audio_tower = EachAlone(tower) if len(frames) > 1 and min(frames) < 100 else tower
            assert alone[-1][0] == oracle_tokens(thinker, inputs), media
        thinker.model.audio_tower = tower
        assert len({tuple(tokens) for tokens, _ in alone}) == len(ROWS)
        batch = together([inputs_of(media, index) for index, media in enumerate(ROWS)])
        assert run(model, batch) == alone
        for index in (1, 4):  # a step whose only rows are those of sound, and one with both kinds
            assert run(model, together([inputs_of(ROWS[index], index), inputs_of([], 0)]))[0] == alone[index]
        model._engine.scheduler.max_tokens_per_step = 7
        assert run(model, together([inputs_of(ROWS[index], index) for index in (4, 5)])) == alone[4:6]


VARIANTS = [
    {"norm_topk_prob": False, "attention_bias": True, "mlp_only_layers": [], "decoder_sparse_step": 2},
    {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default", "mrope_section": [4, 1, 1]}},
]


@pytest.mark.parametrize("text", VARIANTS, ids=["biases", "sections"])
def test_a_thinker_that_was_saved_alone(text, tmp_path) -> None:
    thinker = save_omni(tmp_path, text, alone=True)
    with load(tmp_path) as model:
        for index in (2, 4):
            inputs = inputs_of(ROWS[index], index)
            assert run(model, inputs)[0][0] == oracle_tokens(thinker, inputs), ROWS[index]


def test_every_way_to_run_it_gives_the_same_text(omni) -> None:
    batch = together([inputs_of(media, index) for index, media in enumerate(ROWS)])
    check_every_way_to_run(omni[1], batch, ways=())


def test_text_alone_needs_no_tower(omni) -> None:
    thinker, folder = omni
    inputs = inputs_of([], 1)
    with load(folder, media=False) as model:
        assert run(model, inputs)[0][0] == oracle_tokens(thinker, inputs)
        assert not model._engine.model.towers
        for media, kind, name in (([150], "sound", "input_features"), ([(2, 2)], "images", "pixel_values")):
            with pytest.raises(ValueError, match=f"takes no {kind}: it was loaded without a tower.*leave out {name}"):
                model.generate(**inputs_of(media), max_new_tokens=1)


def test_what_is_refused(omni) -> None:
    with load(omni[1]) as model:
        inputs = inputs_of([150], 0)
        with pytest.raises(ValueError, match=f"20 tokens of id {CLIP}, but 2 clips must have 2"):
            model.generate(**inputs | {name: inputs_of([1, 1])[name] for name in inputs if "feature" in name})
        video = {"pixel_values_videos": torch.zeros(4, 96), "video_grid_thw": torch.tensor([[1, 2, 2]])}
        for given in (lambda: model.generate(**inputs, **video), lambda: model.generate(inputs | video)):
            with pytest.raises(ValueError, match="pixel_values_videos: video is not supported as input"):
                given()
        for name, value in (("return_audio", True), ("speaker", "Ethan"), ("use_audio_in_video", True)):
            with pytest.raises(TypeError, match=f"{name}'; .* so leave it out"):
                model.generate(**inputs, **{name: value})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"thinker_config": None}, "thinker_config must be an object"),
        ({"vision_config": None}, "vision_config is missing"),
        ({"audio_config": None}, "audio_config must be an object"),
        ({"audio_token_index": 5}, "audio_token_index is not implemented; write audio_token_id"),
        ({"image_token_index": 5}, "image_token_index is not implemented; write image_token_id"),
        ({"audio_token_id": "5"}, "audio_token_id must be a token's id"),
        ({"image_token_id": -1}, "image_token_id must be a token's id"),
        ({"mrope_interleaved": False}, "mrope_interleaved = False is not implemented"),
        ({"interleaved": False}, "interleaved = False is not implemented"),
        ({"sliding_window": 5}, "sliding_window = 5 is not implemented"),
        ({"output_dim": 24}, "audio_config.output_dim must be the text's hidden_size"),
    ],
)
def test_configs_that_are_refused(changes, problem) -> None:
    raw = json.loads(json.dumps(make_config().to_dict())) | {"model_type": "qwen3_omni_moe"}
    ((name, value),) = changes.items()
    thinker = raw["thinker_config"]
    places = {
        "thinker_config": raw,
        "mrope_interleaved": thinker["text_config"]["rope_parameters"],
        "interleaved": thinker["text_config"]["rope_parameters"],
        "output_dim": thinker["audio_config"],
        "sliding_window": thinker["text_config"],
    }
    read_config(raw, media=True)
    places.get(name, thinker)[name] = value
    with pytest.raises((ValueError, NotImplementedError), match=problem) as error:
        read_config(raw, media=True)
    if name not in ("thinker_config", "sliding_window"):
        assert "media=False loads only the text model" in str(error.value)
        read_config(raw)


PUBLISHED = {
    "text_config": {
        "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 768, "max_position_embeddings": 65536, "mlp_only_layers": [],
        "model_type": "qwen3_omni_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
        "rope_scaling": {
            "interleaved": True, "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
            "type": "default",
        },
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 0, "sliding_window": None,
        "use_qk_norm": True, "use_sliding_window": False, "vocab_size": 152064,
    },
    "vision_config": {
        "apply_vit_abs_pos_embed": True, "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh", "image_size": 768, "in_channels": 3, "intermediate_size": 4304,
        "num_heads": 16, "num_position_embeddings": 2304, "out_hidden_size": 2048, "patch_size": 16,
        "spatial_merge_size": 2, "spatial_patch_size": 16, "temporal_patch_size": 2, "tokens_per_second": 2,
    },
    "audio_config": {
        "activation_function": "gelu", "conv_chunksize": 500, "d_model": 1280, "downsample_hidden_size": 480,
        "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layers": 32, "max_source_positions": 1500,
        "n_window": 50, "n_window_infer": 800, "num_hidden_layers": 32, "num_mel_bins": 128, "output_dim": 2048,
    },
    "audio_token_id": 151675, "image_token_id": 151655, "video_token_id": 151656, "audio_start_token_id": 151669,
    "audio_end_token_id": 151670, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "user_token_id": 872, "position_id_per_seconds": 13, "seconds_per_chunk": 2, "initializer_range": 0.02,
    "model_type": "qwen3_omni_moe_thinker",
}  # fmt: skip
"""A `thinker_config` in the spelling of transformers 4."""


@pytest.mark.parametrize("alone", [False, True])
def test_the_published_config_is_read_without_a_warning(alone, caplog) -> None:
    whole = {
        "architectures": ["Qwen3OmniMoeForConditionalGeneration"], "model_type": "qwen3_omni_moe",
        "enable_audio_output": True, "talker_config": {"text_config": {"hidden_size": 1024}}, "code2wav_config": {},
        "thinker_config": PUBLISHED, "quantization_config": None,
    }  # fmt: skip
    _, config = read_config(PUBLISHED if alone else whole, media=True)
    assert not caplog.records
    assert (config.vision.out_hidden_size, config.audio.output_dim, config.hidden_size) == (2048, 2048, 2048)
    assert (config.image_token_id, config.audio_token_id) == (151655, 151675)
    assert config.rope.sections == (24, 20, 20) and config.rope.alternates and config.rope.theta == 1e6
    assert config.router.normalise and config.head_dim == 128
