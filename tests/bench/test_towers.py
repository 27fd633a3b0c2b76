"""The planned costs of an image and of a clip are those of an encoding."""

from __future__ import annotations

import json

import pytest
import torch

from pace.bench.limits import Limits
from pace.bench.plan import PROCESS_BYTES, plan
from pace.bench.prediction import efficiency
from pace.bench.shapes import SHAPES
from pace.bench.towers import Encoding, blank
from pace.llm.engine.media import MEDIA_CACHE_BYTES
from pace.llm.models.model_list import read_config
from pace.llm.models.towers.gemma4_audio import Gemma4AudioConfig, Gemma4AudioTower
from pace.llm.models.towers.gemma4_unified import Gemma4UnifiedAudioConfig, Gemma4UnifiedAudioTower
from pace.llm.models.towers.tower import Tower
from pace.ops import native
from tests.llm.models.towers import omni
from tests.llm.models.towers.gemma.gemma4_models import save_gemma4
from tests.llm.models.towers.seeing import run_to_end
from tests.support import backends

pytest.importorskip("transformers")

LIMITS = Limits("avx2", 2, 10.0, 200.0)
TEXT = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6, "rope_theta": 5e6, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
}  # fmt: skip
VISION = {
    "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16, "out_hidden_size": 2048,
    "patch_size": 16, "deepstack_visual_indexes": [5, 11, 17], "num_position_embeddings": 2304,
}  # fmt: skip
QWEN3_VL_2B = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": TEXT,
    "vision_config": VISION, "image_token_id": 151655,
}  # fmt: skip


def tower_of(config: dict):
    model_class, parsed = read_config(config, media=True)
    return model_class(parsed, torch.bfloat16, native).towers[0]


@pytest.mark.parametrize("num_tokens", [300, 1024])
def test_operations_by_hand(num_tokens):
    size, inner, rows, merged = 1024, 4096, 4 * num_tokens, 4096
    block = 2 * rows * (4 * size * size + 2 * size * inner) + 4 * rows * rows * size
    merger = 2 * num_tokens * (merged * merged + merged * 2048)
    patches = 2 * rows * 3 * 2 * 16 * 16 * size
    encoding = Encoding(tower_of(QWEN3_VL_2B), num_tokens)
    assert encoding.flops == 24 * block + 4 * merger + patches
    reached = efficiency("avx2", torch.bfloat16)
    attention = 24 * 4 * rows * rows * size
    expected = (encoding.flops - attention) / reached.products + attention / reached.prefill_attention
    assert encoding.plan(torch.bfloat16, LIMITS).encode_seconds == pytest.approx(expected / 200e9)


def test_windows_need_less_attention():
    vision = {"depth": 4, "hidden_size": 128, "intermediate_size": 256, "num_heads": 4, "out_hidden_size": 2048}
    config = QWEN3_VL_2B | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    config["text_config"] = {name: value for name, value in TEXT.items() if name not in ("head_dim", "rope_scaling")}
    flops = [
        Encoding(tower_of(config | {"vision_config": vision | {"fullatt_block_indexes": full}}), 16 * 16).flops
        for full in ([0, 1, 2, 3], [1])
    ]
    whole, window, sides = 1024, 64, 16
    assert flops[0] - flops[1] == 3 * 4 * 128 * (whole**2 - sides * window**2)


@pytest.mark.skipif("native" not in backends(), reason="the native kernels are not built")
@pytest.mark.parametrize("kind", ["image", "audio"])
def test_memory_is_that_of_the_largest_program_at_least(kind, tmp_path):
    """An encoding of a loaded model needs no more memory than planned, and not much less."""
    from pace.llm import LLMModel

    omni.save_omni(tmp_path)
    with LLMModel(tmp_path, dtype="float32", progress=False, num_threads=1, kv_cache_bytes="16MiB") as model:
        runner = model._engine.model
        tower = model._model.tower(kind)
        planned = Encoding(tower, 60).plan(torch.float32, LIMITS)
        assert planned.weight_bytes == tower.nbytes and planned.kind == kind
        media = blank(tower, 60)
        rows = run_to_end(runner.encode(media))
        assert rows.shape == (planned.num_tokens, tower.width) and rows.nbytes == planned.row_bytes
        used = max(program.buffer_bytes for program in runner._slices.values()) + media.features.nbytes + rows.nbytes
        assert used < planned.encode_bytes < 2.5 * used


def test_a_plan_leaves_room_for_an_image():
    text_only = plan(QWEN3_VL_2B | {"vision_config": None}, LIMITS, 64 << 30)
    plans = plan(QWEN3_VL_2B, LIMITS, 64 << 30)
    for with_tower, without in zip(plans, text_only, strict=True):
        [tower] = with_tower.towers
        assert (tower.kind, tower.num_tokens, without.towers) == ("image", 1280, ())
        assert with_tower.weight_bytes - tower.weight_bytes == without.weight_bytes
        assert with_tower.decode_tokens_per_second == without.decode_tokens_per_second
        assert with_tower.prefill_tokens_per_second == without.prefill_tokens_per_second
        assert tower.row_bytes == 1280 * 4 * 2048 * 4 and tower.encode_seconds > 1
    bfloat16 = plans[0]
    less = PROCESS_BYTES + MEDIA_CACHE_BYTES + bfloat16.towers[0].encode_bytes + bfloat16.weight_bytes
    [tight] = [
        one for one in plan(QWEN3_VL_2B, LIMITS, less + 100 * bfloat16.kv_bytes_per_token) if one.dtype == "bfloat16"
    ]
    assert tight.max_context == 100
    [small] = {one.towers[0].encode_bytes for one in plan(QWEN3_VL_2B, LIMITS, 64 << 30, image_tokens=64)}
    assert small < bfloat16.towers[0].encode_bytes / 10


def test_the_command_prints_towers(tmp_path, capsys, monkeypatch):
    from pace.bench import plan as plans
    from pace.cli import main

    monkeypatch.setattr(plans, "machine_limits", lambda threads: LIMITS)
    omni.save_omni(tmp_path)
    assert main(["plan", str(tmp_path), "--json", "--no-sample", "--max-image-tokens", "40"]) == 0
    for one in json.loads(capsys.readouterr().out)["plans"]:
        assert [(tower["kind"], tower["num_tokens"]) for tower in one["towers"]] == [("image", 40), ("audio", 780)]
        assert all(tower["encode_bytes"] > tower["row_bytes"] > 0 for tower in one["towers"])
    assert main(["plan", str(tmp_path), "--no-sample", "--max-image-tokens", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "\nan image of 1,000 tokens is encoded in 0.0 s (bfloat16), " in shown
    assert "\na clip of 60 s, 780 tokens and 13 for each second, is encoded in " in shown


@pytest.mark.skipif("native" not in backends(), reason="the native kernels are not built")
def test_a_measured_encoding(tmp_path, capsys, monkeypatch):
    from pace.bench import limits
    from pace.cli import main

    monkeypatch.setattr(limits, "measure", lambda seconds=0.0: LIMITS)
    omni.save_omni(tmp_path)
    words = ["bench", str(tmp_path), "--prompt", "8", "--generate", "2", "--repeats", "1"]
    assert main([*words, "--image-tokens", "40", "--json"]) == 0
    image, clip = json.loads(capsys.readouterr().out)["towers"]
    for found, kind, num_tokens in ((image, "image", 40), (clip, "audio", 780)):
        assert (found["kind"], found["tokens"]) == (kind, num_tokens)
        assert found["encode_s"] > 0 and found["encode_mfu"] > 0 and found["weight_bytes"] > 0
        assert found["predicted_ratio"] == pytest.approx(found["predicted_s"] / found["encode_s"], rel=1e-3)
    assert main([*words, "--image-tokens", "40"]) == 0
    shown = capsys.readouterr().out
    assert "\nimage " in shown and "\nclip " in shown and " 40 tokens; measured is " in shown
    assert main([*words, "--json"]) == 0 and json.loads(capsys.readouterr().out)["towers"] == []
    from pace.assets import TINY

    assert main(["bench", str(TINY), "--image-tokens", "40"]) == 1
    assert "has no tower for images or sound; leave --image-tokens out" in capsys.readouterr().err


def test_every_tower_makes_blank_media():
    """For the shapes of `pace bench --list`, plans are made of them."""
    towers = [Tower]
    for tower in towers:
        towers += tower.__subclasses__()
    assert not [tower for tower in towers if not tower.__subclasses__() and tower.blank is Tower.blank]
    found = {}
    for name, raw in SHAPES.items():
        if "vision_config" in raw:
            encoding = Encoding(tower_of(raw), 256)
            found[name] = encoding.num_tokens
            assert encoding.row_bytes == 4 * encoding.tower.width * encoding.num_tokens and encoding.flops > 1e9, name
    assert {"qwen3-vl-2b": 256, "qwen3.5-4b-vl": 256}.items() <= found.items()


def test_sound_of_gemma_4():
    encoding = Encoding(Gemma4UnifiedAudioTower(Gemma4UnifiedAudioConfig(), 64, 5))
    assert encoding.num_tokens == 60 * 25 and encoding.row_bytes == 4 * 64 * 60 * 25
    rows, size, distances = 30 * 25, 1024, 13
    encoding = Encoding(Gemma4AudioTower(Gemma4AudioConfig(num_hidden_layers=2), 64, 5))
    assert encoding.num_tokens == rows and encoding.row_bytes == 4 * 64 * rows
    convolutions = 1500 * 64 * 9 * 128 + 750 * 32 * 9 * 128 * 32
    layer = rows * size * size * (2 * 2 * 4 + 4 + 2 + 1) + distances * size * size
    around = rows * (size * size + size * 1536 + 1536 * 64)
    assert encoding.flops == 2 * (convolutions + 2 * layer + around)


@pytest.mark.thorough
@pytest.mark.skipif("native" not in backends(), reason="the native kernels are not built")
def test_an_encoding_of_sound_of_gemma_4(tmp_path):
    """It has the planned rows, also after the plan was made of the loaded tower."""
    from pace.llm import LLMModel

    save_gemma4(tmp_path, "e2b")
    with LLMModel(tmp_path, dtype="float32", progress=False, num_threads=1, kv_cache_bytes="16MiB") as model:
        tower = model._model.tower("audio")
        media = blank(tower, 1)
        before = run_to_end(model._engine.model.encode(media))
        planned = Encoding(tower).plan(torch.float32, LIMITS)
        assert planned.weight_bytes == tower.nbytes and planned.clip_seconds == 30
        rows = run_to_end(model._engine.model.encode(media))
        assert rows.shape == (planned.num_tokens, tower.width) and rows.nbytes == planned.row_bytes
        assert torch.equal(rows, before)
