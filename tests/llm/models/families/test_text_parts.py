"""The text part of a checkpoint that also takes images: its config, its tensor names, and the tensors left out."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.ops import reference
from tests.support import TensorDict, prefill

SIZES = {
    "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2
}  # fmt: skip
IDS = torch.arange(12)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeeingConfig(LlamaConfig):
    beside_text = frozenset({"vision_config", "image_token_id"})


class Seeing(LlamaForCausalLM):
    Config = SeeingConfig
    text_prefixes = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.text.": "model."}
    other_parts = ("vision_tower.", "model.vision_tower.")


def flat(**more):
    return SeeingConfig.from_dict({**SIZES, **more})


def test_text_config_counts_and_some_fields_of_the_whole():
    whole = {
        "architectures": ["SeeingForConditionalGeneration"],
        "text_config": {**SIZES, "model_type": "seeing_text", "eos_token_id": 3, "tie_word_embeddings": False},
        "vision_config": {"hidden_size": 7},
        "image_token_id": 39,
        "tie_word_embeddings": True,
        "eos_token_id": [1, 2],
        "bos_token_id": None,
    }
    assert SeeingConfig.from_dict(whole) == flat(eos_token_id=[1, 2], tie_word_embeddings=True)
    assert "text_config" in whole  # it is not modified


def test_a_flat_config_may_have_what_is_beside_text():
    assert flat(vision_config={"hidden_size": 7}, image_token_id=39) == flat()


def test_what_stands_beside_text_config_without_effect_is_named(caplog):
    with caplog.at_level(logging.WARNING, "pace"):
        assert SeeingConfig.from_dict({"text_config": SIZES, "hidden_size": 32}) == flat()
    assert "hidden_size" in caplog.text


@pytest.mark.parametrize("value", [5, [], "x"])
def test_text_config_of_another_type(value):
    with pytest.raises(ValueError, match="text_config must be an object"):
        SeeingConfig.from_dict({**SIZES, "text_config": value})


def test_a_family_without_such_checkpoints_refuses_them():
    for name in ("text_config", "vision_config"):
        with pytest.raises(NotImplementedError, match=name):
            LlamaConfig.from_dict({**SIZES, name: {"hidden_size": 7}})


# -------------------------------------------------------------------------------------------------------------- tensors


def make(state, **more):
    model = Seeing(flat(**more), torch.float32, reference)
    model.load_weights(TensorDict(state))
    return model


def weights(**more):
    """Returns random weights with the names of a text-only checkpoint."""
    model = Seeing(flat(**more), torch.float32, reference)
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(targets[0].shape, generator=random) for name, targets in model.targets().items()}


NAMES = {
    "as text alone": lambda name: name,
    "bare": lambda name: name.removeprefix("model."),
    "published": lambda name: f"language_model.{name}",
    "within the model": lambda name: name.replace("model.", "model.text.", 1),
}
VISION = {"vision_tower.patches.weight": torch.ones(3, 5), "model.vision_tower.norm.bias": torch.ones(3)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("names", NAMES)
def test_names(names, tied, caplog):
    state = weights(tie_word_embeddings=tied)
    plain = prefill(make(state, tie_word_embeddings=tied), IDS)
    state = {NAMES[names](name): tensor for name, tensor in state.items()}
    with caplog.at_level(logging.INFO, "pace"):
        seeing = make(state | VISION, tie_word_embeddings=tied)
    assert torch.equal(prefill(seeing, IDS), plain)
    assert "left out 2 tensors of vision_tower: this model reads text only" in caplog.text


def test_other_tensors_are_unexpected_still():
    with pytest.raises(ValueError, match=r"unexpected \(1\): model\.audio_tower\.x"):
        make(weights() | {"model.audio_tower.x": torch.ones(3)})
    with pytest.raises(ValueError, match=r"unexpected \(2\)"):  # a model that leaves none out
        model = LlamaForCausalLM(LlamaConfig.from_dict(SIZES), torch.float32, reference)
        model.load_weights(TensorDict(weights() | VISION))
