"""Pictures in prompts and chats of Mistral 3, Pixtral and LLaVA: the answer is that of transformers to its own
processor's arrays and text."""

from __future__ import annotations

import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

import torch
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral import image_processing_pil_pixtral as pil

from tests.llm.models.towers.llava.making import (
    CASES,
    LLAVA_SETTINGS,
    PATCH,
    Case,
    save_llava,
    save_processor,
    whole_pixtral,
)
from tests.llm.models.towers.seeing import load
from tests.llm.processors.chatting import picture
from tests.plugins.tiers import sample
from tests.server.schemas.test_media import said, text

PICTURES = [picture(20, 33, 1), picture(60, 9, 2), picture(40, 40, 3)]


def make_reference(case: Case, tokenizer):
    """The whole processor of transformers."""
    if case.vision["model_type"] == "pixtral":
        size = {"longest_edge": 40}
        merge = case.fields.get("spatial_merge_size", 1)
        return whole_pixtral()(pil.PixtralImageProcessorPil(size=size), tokenizer, PATCH, merge)
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    settings = {name: value for name, value in LLAVA_SETTINGS.items() if name != "image_processor_type"}
    strategy = case.fields.get("vision_feature_select_strategy", "default")
    first = int("clip" in case.vision["model_type"])
    return LlavaProcessor(CLIPImageProcessorPil(**settings), tokenizer, PATCH, strategy, None, "<image>", first)


@pytest.mark.parametrize("name", sample(["mistral3", "llava", "pixtral", "ministral3", "siglip"], lambda name: False))
def test_answers_about_pictures(name, tmp_path) -> None:
    case = CASES[name]
    oracle = save_llava(tmp_path, case)
    save_processor(tmp_path, case)
    with load(tmp_path) as model:
        reference = make_reference(case, model.tokenizer)
        token = reference.image_token
        prompts = [(f"w3 w4 {token} w5", PICTURES[:1]), (f"{token} w8 w9 {token}", PICTURES[1:])]
        expected = []
        for prompt, images in prompts:
            inputs = reference(text=prompt, images=images, return_tensors="pt", add_special_tokens=True)
            inputs = {key: value for key, value in inputs.items() if key != "mm_token_type_ids"}
            arrays = model.processor(images=images)
            for key, array in arrays.items():
                assert torch.equal(torch.from_numpy(array), torch.as_tensor(inputs[key])), key
            with torch.no_grad():
                found = oracle.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
            expected.append(found[inputs["input_ids"].shape[1] :].tolist())
            given = model.generate(**inputs, max_new_tokens=24, ignore_eos=True)
            assert given.output_token_ids[0].equal(found)
        asked = [{"prompt": prompt, "images": images} for prompt, images in prompts]
        answers = model.generate([*asked, "w2 w3"], max_new_tokens=24, ignore_eos=True)
        assert answers.generated_token_ids[:2] == expected
        parts = [text("w3 w4 "), {"type": "image", "image": PICTURES[0]}, text(" w5")]
        chat = model.chat(said(parts), max_new_tokens=24, do_sample=False, ignore_eos=True, logprobs=0)
        prompt = f"<user> w3 w4 {token} w5 "
        by_text = model.generate({"prompt": prompt, "images": PICTURES[:1]}, max_new_tokens=24, ignore_eos=True)
        assert [entry.token for entry in chat.logprobs] == by_text.generated_token_ids[0]
        with pytest.raises(ValueError, match="2 placeholders .* for 1 image"):
            model.generate({"prompt": f"{token} typed {token}", "images": PICTURES[:1]}, max_new_tokens=1)
