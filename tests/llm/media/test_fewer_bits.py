"""Towers in fewer bits: which matrices, how much of an image's rows is lost, and `pace eval` of texts with images."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from pace.cli import main
from pace.eval import evaluate, read_texts
from pace.llm import QuantizationConfig
from pace.llm.models.model_list import read_config
from pace.ops import native
from pace.quant import Int8, read_format
from tests.llm.media.talking import PLACEHOLDER, load, page, save_talking
from tests.llm.models.towers.seeing import MODELS
from tests.plugins.tiers import sample
from tests.support import backends

pytestmark = pytest.mark.skipif("native" not in backends(), reason="the native kernels are not built")
TEXT = "The page says: {} and that is all of it. The other one says: {} but nothing else."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talking")
    save_talking(folder, hidden_size=64, intermediate_size=96)
    for number in range(2):
        page(number).save(folder / f"page{number}.png")
    line = {"text": TEXT.format(PLACEHOLDER, PLACEHOLDER), "images": ["page0.png", "page1.png"]}
    (folder / "pages.jsonl").write_text(f"{json.dumps(line)}\n{json.dumps({'text': 'Once upon a time.'})}\n")
    return folder


def formats_of(config: QuantizationConfig | None, model_type: str = "qwen3_5") -> dict[str, set]:
    """Formats of the blocks of the tower, of its other matrices, and of the text model's layers."""
    text, vision = MODELS[model_type]
    model_class, parsed = read_config({"model_type": model_type, "text_config": text, "vision_config": vision}, True)
    model = model_class(parsed, torch.float32, native)
    model.quantize(config)

    def found(layers) -> set:
        plans = [matrix.plan.formats for layer in layers for matrix in layer.matrices()]
        return {format for formats in plans for format in (formats or {0: None}).values()}

    (tower,) = model.towers
    others = [child for child in tower.children() if child not in tower.blocks]
    return {"blocks": found(tower.blocks), "others": found(others), "text": found(model.layers)}


@pytest.mark.parametrize("model_type", sample(list(MODELS), lambda name: name == "qwen3_5"))
def test_which_matrices_have_fewer_bits(model_type) -> None:
    for config, blocks in (
        (None, None),
        (QuantizationConfig("int4"), Int8()),
        (QuantizationConfig("q6_k"), Int8()),
        (QuantizationConfig("q8_0"), read_format("q8_0")),
        (QuantizationConfig("int4", towers=None), None),
        (QuantizationConfig("int4", towers="q4_0"), read_format("q4_0")),
        (QuantizationConfig("float", towers={"format": "int8", "group": 32}), Int8(group=32)),
        (QuantizationConfig("float", overrides={"visual.blocks.*": "q8_0"}), read_format("q8_0")),
    ):
        found = formats_of(config, model_type)
        assert found["blocks"] == {blocks} and found["others"] == {None}, config
        is_float = config is None or config.format is None
        assert (found["text"] == {None}) == is_float
    assert QuantizationConfig(**QuantizationConfig("int4", towers="q8_0").to_dict()).towers == read_format("q8_0")


def test_towers_of_a_model_without_one_are_refused(folder) -> None:
    with pytest.raises(ValueError, match="towers='q8_0': this model has no tower.*leave towers out"):
        load(folder, media=False, quantization={"format": "float", "towers": "q8_0"})
    with pytest.raises(ValueError, match="towers: there is no format"):
        QuantizationConfig("int4", towers="q9")


def test_the_loss_is_shown(folder, capsys) -> None:
    """It is less with more bits, and none with floats."""
    losses = []
    words = ["eval", str(folder), "--text", str(folder / "pages.jsonl"), "--dtype", "float32", "--against", "fp32"]
    for format in ("float", "q8_0", "int8", "q4_0"):
        assert main([*words, "--towers", format, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        losses.append((found["tower"]["relative"], found["kl_divergence"]))
        assert found["tower"]["num_rows"] == 2 * 54 and 0 < found["num_tokens"] < 120
    assert losses[0] == (0.0, 0.0)
    # A product in 8 bits has an error of 0.008 (docs/quantization.md), and the blocks add some of them.
    assert all(0 < relative < 0.02 and 0 < divergence for relative, divergence in losses[1:3])
    assert losses[3] > tuple(3 * loss for loss in max(losses[1:3]))
    assert main([*words, "--towers", "q8_0"]) == 0
    assert "rows of media" in capsys.readouterr().out


def test_texts_with_images_are_predicted_after_them(folder) -> None:
    """In one piece or in several, the tokens are those of the text, without placeholders."""
    texts = read_texts(folder / "pages.jsonl")
    assert texts[0]["images"] == [folder / "page0.png", folder / "page1.png"] and texts[1] == "Once upon a time."
    with load(folder) as model:
        whole = evaluate(model, texts, progress=False)
        tokens = model.tokenizer(TEXT.format(PLACEHOLDER, PLACEHOLDER))["input_ids"]
        assert whole.num_tokens == len(tokens) - 1 - 2 + len(model.tokenizer(texts[1])["input_ids"]) - 1
        from pace import eval as evaluation

        rows = evaluation.read_rows(texts, model)
        pieces = list(evaluation._runs_of(rows[0], 3))
        assert [start for start, *_ in pieces[1:]] == [end for _, end, _ in pieces[:-1]]
        assert pieces[-1][1] == len(rows[0].tokens) - 1
        assert all(end - start <= 3 for start, end, media in pieces if not media)
        same = evaluate(model, texts, model, progress=False)
        assert same.kl_divergence == 0 and same.tower.relative == 0 and same.tower.min_cosine == pytest.approx(1)
        other = [{**texts[0], "images": texts[0]["images"][::-1]}, texts[1]]
        assert evaluate(model, other, progress=False).perplexity != whole.perplexity


@pytest.mark.parametrize("images", ["page0.png", [3]])
def test_lines_that_are_refused(tmp_path, images) -> None:
    path = tmp_path / "pages.jsonl"
    path.write_text(json.dumps({"text": PLACEHOLDER, "images": images}))
    with pytest.raises(ValueError, match='pages.jsonl, line 1: "images" must be a list of files'):
        read_texts(path)
