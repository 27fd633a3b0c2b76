"""Compares every encoder and variant with transformers, each text alone. Compares it with itself in any packing, with
any number of threads, as a program and op by op."""

from __future__ import annotations

import pytest
import torch

from pace import _C
from pace.llm.encoding.steps import MAX_TEXTS, MAX_TOKENS, TextSteps
from pace.llm.models.encoders.encoder_list import ENCODER_LIST, read_encoder_config
from pace.llm.runners.encoder import EncoderRunner
from pace.ops import native, reference
from pace.ops.pooling import POOLINGS
from tests.llm.models.encoders.oracle import (
    load_encoder,
    oracle_logits,
    oracle_rows,
    random_texts,
    rows_of,
    unit,
)
from tests.llm.models.encoders.variants import BASE, VARIANTS, save_encoder
from tests.plugins.tiers import sample

pytest.importorskip("transformers")

BOUND = 2e-6
"""Largest difference of an element of a unit vector. Its 32 elements are about 0.2. Each passed some ten sums of at
most 56 products, whose errors are a few eps of 6e-8, and norms that keep their size."""


def is_always_run(name: str) -> bool:
    """True for the first variant of a family, False for further ones."""
    return "-" not in name or name in ("embedding-gemma", "xlm-roberta")


@pytest.mark.parametrize("name", sample(list(VARIANTS), is_always_run))
def test_vectors_and_logits_are_those_of_transformers(name, tmp_path):
    oracle = save_encoder(tmp_path, VARIANTS[name])
    for ops in (native, reference):
        encoder = load_encoder(tmp_path, ops)
        runner, steps = EncoderRunner(encoder, "native-eager"), TextSteps(encoder, MAX_TOKENS, MAX_TEXTS)
        for text in random_texts(encoder):
            ours, theirs = rows_of(encoder, text), oracle_rows(oracle, encoder, text)
            assert (ours - theirs).abs().max() <= 20 * BOUND * theirs.abs().max(), len(text)
            assert (unit(ours) - unit(theirs)).abs().max() <= BOUND, len(text)
            if encoder.num_labels:
                logits, expected = runner.logits(steps.batch([text]))[0], oracle_logits(oracle, encoder, text)
                assert (logits - expected).abs().max() <= 20 * BOUND * max(1.0, expected.abs().max()), len(text)


@pytest.mark.parametrize("name", sample(list(VARIANTS), is_always_run))
def test_rows_have_the_same_bits_in_any_packing(name, tmp_path, restore_isa_and_threads):
    save_encoder(tmp_path, VARIANTS[name])
    encoder = load_encoder(tmp_path, native)
    texts, steps = random_texts(encoder), TextSteps(encoder, MAX_TOKENS, MAX_TEXTS)
    runners = [EncoderRunner(encoder, *how) for how in (("native",), ("native", False), ("native-eager",))]
    kinds = [lambda runner, batch: runner.pooled(batch, POOLINGS)]
    if encoder.num_labels:
        kinds.append(lambda runner, batch: runner.logits(batch))
    for run in kinds:
        alone = torch.cat([run(runners[0], steps.batch([text])) for text in texts])
        for threads in (1, 2, 5):
            _C.set_num_threads(threads)
            for runner in runners:
                assert torch.equal(run(runner, steps.batch(texts)), alone)
                assert torch.equal(run(runner, steps.batch(texts[::-1])).flip(0), alone)
                assert torch.equal(run(runner, steps.batch(texts[2:5])), alone[2:5])


@pytest.mark.parametrize("name", [name for name in VARIANTS if "-" not in name or name == "xlm-roberta"])
def test_fields_that_are_left_out_have_the_defaults_of_transformers(name):
    import transformers

    kind = getattr(transformers, VARIANTS[name].architecture)
    without_effect = ("bos_token_id", "eos_token_id", "tie_word_embeddings")
    whole = {field: value for field, value in kind.config_class().to_dict().items() if field not in without_effect}
    least = {"architectures": [VARIANTS[name].architecture]}
    assert read_encoder_config(least)[1] == read_encoder_config(whole | least)[1]


def test_every_encoder_has_a_variant():
    assert {variant.architecture for variant in VARIANTS.values()} >= ENCODER_LIST.keys() and BASE
