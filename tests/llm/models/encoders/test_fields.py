"""Each field of an encoder's config, changed from its default: the rows are those of transformers, or the field is
refused by name."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pace.llm.models.encoders.encoder_list import ENCODER_LIST
from pace.ops import native
from tests.llm.models.encoders.oracle import load_encoder, oracle_rows, random_texts, rows_of
from tests.llm.models.encoders.variants import BASE, VARIANTS, Variant, save_encoder

transformers = pytest.importorskip("transformers")

ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "mish", "quick_gelu", "relu", "silu", "tanh")
ROPES = [
    {"rope_type": "default", "rope_theta": 77.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
    {"rope_type": "yarn", "rope_theta": 500.0, "factor": 3.0, "original_max_position_embeddings": 24},
    {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
]
KINDS = ("full_attention", "sliding_attention")
CHANGES: dict[str, list[Any]] = {
    "add_cross_attention": [True],
    "chunk_size_feed_forward": [3],
    "head_dim": [12],
    "hidden_size": [48],
    "is_causal": [True, False],
    "is_decoder": [True],
    "is_encoder_decoder": [True],
    "layer_types": [["full_attention"], ["sliding_attention"], ["sliding_attention", "full_attention"]],
    "max_position_embeddings": [90, 40],
    "num_attention_heads": [2, 8],
    "num_hidden_layers": [1, 3],
    "num_key_value_heads": [1, 2, 4],
    "num_labels": [1, 5],
    "output_hidden_states": [True],
    "pad_token_id": [None, -1, 0, 5, 90],
    "position_embedding_type": ["relative_key", "relative_key_query", "absolute", "alibi"],
    "problem_type": ["regression"],
    "pruned_heads": [{0: [1]}],
    "return_dict": [False],
    "rope_parameters": [*ROPES, *({kind: rope for kind in KINDS} for rope in ROPES)],
    "rope_theta": [90.0],
    "sliding_window": [1, 6, 7, 64],
    "tie_word_embeddings": [True, False],
    "torchscript": [True],
    "type_vocab_size": [0, 1, 4],
    "vocab_size": [131],
}
"""Values of fields with a meaning of their own. Other fields get values by the type of their default."""
LENGTHS = (1, 9, 38)


def changes(architecture: str) -> Iterator[tuple[str, Any]]:
    """Yields fields and other values of them: those of the family, and those of all models."""
    config = getattr(transformers, architecture).config_class()
    for name in sorted({field.name for field in dataclasses.fields(config)} | CHANGES.keys()):
        default = getattr(config, name, None)
        if name in CHANGES:
            values: list[Any] = CHANGES[name]
        elif isinstance(default, bool):
            values = [not default]
        elif isinstance(default, str) and ("act" in name or default in ("gelu", "silu")):
            values = list(ACTIVATIONS)
        elif isinstance(default, int):
            values = [0, 7, 64]  # smaller ones make sums that cancel
        elif isinstance(default, float):
            values = [0.0, 0.25, 2.0]
        elif isinstance(default, str):
            values = ["mean", "other"]
        else:
            continue
        yield from ((name, value) for value in values if value != default or type(value) is not type(default))


@pytest.mark.thorough
@pytest.mark.parametrize("architecture", ENCODER_LIST)
def test_a_changed_field_has_the_effect_that_it_has_in_transformers(architecture, tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    variant = next(one for name, one in VARIANTS.items() if one.architecture == architecture)
    num_compared, wrong = 0, []
    for number, (field, value) in enumerate(changes(architecture)):
        folder = tmp_path / str(number)
        fields = {**variant.fields, field: value}
        if field == "layer_types":
            fields[field] = (value * 99)[: {**BASE, **fields}["num_hidden_layers"]]
        try:
            save_encoder(folder, Variant(architecture, fields))
            oracle = getattr(transformers, architecture).from_pretrained(folder, attn_implementation="eager").eval()
        except Exception:
            continue  # transformers has no such model
        outcome = compare(folder, oracle, field)
        num_compared += outcome == ""
        if outcome:
            wrong.append(f"{field} = {value!r}: {outcome}")
    assert not wrong, "\n".join(wrong)
    assert num_compared > 20


def compare(folder: Path, oracle: Any, field: str) -> str:
    """Returns what is wrong with the rows of a checkpoint; "" if nothing is, or if it is refused by name."""
    try:
        encoder = load_encoder(folder, native)
    except (NotImplementedError, ValueError) as error:
        names = {"rope_parameters": "ro(pe|tary)"}.get(field, field)  # the wrong field inside may be named
        is_named = re.search(f"{names}|contradicts its other spelling", str(error))
        return "" if is_named or is_useless(oracle) else f"refused without its name: {error}"
    for text in random_texts(encoder, LENGTHS):
        try:
            theirs = oracle_rows(oracle, encoder, text)
        except Exception:
            continue  # transformers cannot compute it
        if not theirs.isfinite().all():
            continue
        ours = rows_of(encoder, text)
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=0.0, atol=4e-5 * theirs.abs().max()):
            return f"other rows for {len(text)} tokens, by {(ours - theirs).abs().max() / theirs.abs().max():.2g}"
    return ""


def is_useless(oracle: Any) -> bool:
    """True if transformers cannot compute a text."""
    try:
        oracle(torch.tensor([[5, 6]]))
    except Exception:
        return True
    return False
