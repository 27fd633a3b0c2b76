"""A small random Qwen3-VL from its files to answers about images: the prompt, the processor and the tower together."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

import torch
from PIL import Image

from pace.llm import LLMModel
from pace.media.media import MediaSpan
from tests.llm.models.towers.seeing import IMAGE, MERGE
from tests.llm.processors.chatting import PLACEHOLDER, SETTINGS, TOKEN, picture, save_chatting
from tests.server.schemas.test_media import data_url, image_url, said, text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The checkpoint, and the model in transformers."""
    path = tmp_path_factory.mktemp("qwen3_vl")
    return path, save_chatting(path)


def load(folder, **options):
    options = {"dtype": "float32", "kv_cache_bytes": "16MiB", "progress": False, "weights_cache": False, **options}
    return LLMModel(str(folder[0]), **options)


@pytest.fixture(scope="module")
def model(folder):
    with load(folder) as model:
        yield model


def greedy(oracle, model, prompt: str, images: list[Image.Image], num_tokens: int = 16) -> list[int]:
    """What transformers generates after a text whose placeholders are expanded here."""
    arrays = model.processor(images=images)
    pieces = prompt.split(TOKEN)
    counts = [int(grid.prod()) // MERGE**2 for grid in arrays["image_grid_thw"]]
    expanded = pieces[0] + "".join(TOKEN * count + piece for count, piece in zip(counts, pieces[1:], strict=True))
    ids = torch.tensor([model.tokenizer(expanded)["input_ids"]])
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": (ids == IMAGE).int()}
    with torch.no_grad():
        found = oracle.generate(**given, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None)
    assert model.generate(**given, max_new_tokens=num_tokens, ignore_eos=True).output_token_ids.equal(found)
    return found[0, ids.shape[1] :].tolist()


def test_prompts_with_images(folder, model, tmp_path):
    """Pictures, paths and bytes, in one batch with text; greedy tokens are those of transformers."""
    images = [picture(20, 33, 1), picture(60, 9, 2), picture(40, 40, 3)]
    path = tmp_path / "a.png"
    images[1].save(path)
    images[2].save(tmp_path / "b.png")
    one = {"prompt": f"w3 w4 {PLACEHOLDER} w5", "images": [images[0]]}
    two = {"prompt": f"{PLACEHOLDER} w8 w9 {PLACEHOLDER}", "images": [path, (tmp_path / "b.png").read_bytes()]}
    out = model.generate([one, "w2 w3", two], max_new_tokens=16, ignore_eos=True)
    assert out.generated_token_ids[0] == greedy(folder[1], model, one["prompt"], images[:1])
    assert out.generated_token_ids[2] == greedy(folder[1], model, two["prompt"], images[1:])
    alone = model.generate(one, max_new_tokens=16, ignore_eos=True)
    assert alone.generated_token_ids[0] == out.generated_token_ids[0]


def test_chat(folder, model):
    image = picture(33, 50, 4)
    messages = said([text("w3 "), {"type": "image", "image": image}, text(" w7")])
    expected = greedy(
        folder[1], model, f"<|im_start|>user w3 {PLACEHOLDER} w7<|im_end|><|im_start|>assistant ", [image]
    )
    output = model.chat(messages, max_new_tokens=16, do_sample=False, ignore_eos=True, logprobs=0)
    assert [entry.token for entry in output.logprobs] == expected
    assert output.metrics.num_prompt_tokens == 9 + int(np.prod(model.processor(images=[image])["image_grid_thw"])) // 4


def test_http(folder):
    """The same picture as a data URI, lossless, has the same answer."""
    pytest.importorskip("starlette")
    import io

    from tests.server.serving import Serving

    file = io.BytesIO()
    image = picture(48, 40, 5)
    image.save(file, "PNG")
    with load(folder) as model, Serving(model.generator) as serving:
        parts = [text("w3 "), image_url(data_url(file.getvalue())), text(" w7")]
        fields = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        reply = serving.chat(said(parts), **fields)
        prompt = f"<|im_start|>user w3 {PLACEHOLDER} w7<|im_end|><|im_start|>assistant "
        assert reply.json["choices"][0]["token_ids"] == greedy(folder[1], model, prompt, [image])
        assert serving.chat(said(parts), **fields).json["choices"] == reply.json["choices"]


def test_options(folder, model, tmp_path):
    with load(folder, media=False) as bare:
        with pytest.raises(ValueError, match="this model takes no images"):
            bare.generate({"prompt": PLACEHOLDER, "images": [picture(20, 20)]})
        assert bare.generate("w1 <|image_pad|>", max_new_tokens=1)
    with load(folder, max_image_tokens=4) as small:
        spans = spans_of(small, picture(200, 200))
        assert [span.media.num_tokens for span in spans] == [4]
    assert [span.media.num_tokens for span in spans_of(model, picture(200, 200))] == [64]
    for scored, match in (({"prompt": TOKEN, "images": [picture(8, 8)]}, "only texts"), (TOKEN, "placeholder")):
        with pytest.raises(ValueError, match=match):
            model.score(scored)
    with pytest.raises(ValueError, match="this model takes no sound"):
        model.processor(audio=[b"x"])


def spans_of(model, image) -> tuple[MediaSpan, ...]:
    return model.generator.prepare_for_generate({"prompt": TOKEN, "images": [image]}).prompts[0].media


def test_a_checkpoint_without_settings_of_its_processor(folder, tmp_path, caplog):
    for path in folder[0].iterdir():
        if path.name != "preprocessor_config.json":
            (tmp_path / path.name).symlink_to(path)
    with load((tmp_path, None)) as model:
        assert "images and sound are only taken as arrays" in caplog.text
        with pytest.raises(ValueError, match="this model takes no images"):
            model.chat(said([{"type": "image", "image": picture(8, 8)}]))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(SETTINGS | {"do_center_crop": True}))
    with pytest.raises(NotImplementedError, match="do_center_crop"):
        load((tmp_path, None))
