"""Every architecture and variant against transformers, and against itself: cached, ragged, chunked.

The reference backend sums in whatever order torch likes, so there equality is approximate; the kernels owe
`torch.equal`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import pytest
import torch

from pace.llm.models.model_list import read_config
from tests.llm.models.variants import (
    BASE,
    IDS,
    IN_TRANSFORMERS,
    PROMPT,
    ROUTED,
    VARIANTS,
    VISION,
    load_oracle,
    save_tiny,
)
from tests.support import Runner, backend, backends, isas_of_floats, load_model, prefill

pytest.importorskip("transformers")

# Two implementations in float32 of ~2 layers x 8 sums of <= 64 terms: rounding walks to about sqrt(1000) eps = 4e-6 of
# the largest logit; measured up to 3e-6.
TOLERANCE = 2e-5

START = 12
"""Tokens of the prompt after which 64 are generated."""


def relative_error(ours, theirs):
    assert ours.shape == theirs.shape and torch.isfinite(theirs).all()
    return float((ours - theirs).abs().max() / theirs.abs().max())  # NaN in ours gives NaN, which is below nothing


FIRST_OF_EACH = [IDS.index(next(name for name in IDS if name.startswith(f"{model_type}-"))) for model_type in BASE]
DECODED = [(ops, i) for ops in backends() for i in (range(len(VARIANTS)) if ops == "native" else FIRST_OF_EACH)]
"""What is decoded token by token: all variants on the kernels, the first of each family on their definition."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """`tiny(variant) -> (folder, transformers' model in float32, prompt ids)`, made once per session."""

    @functools.cache
    def make(index):
        folder = tmp_path_factory.mktemp(IDS[index])
        model_type, _, fields = VARIANTS[index]
        model = save_tiny(folder, model_type, fields)
        return folder, model, torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(index))

    return make


@pytest.fixture(scope="session")
def greedy(tiny):
    """`greedy(variant) -> (tokens [64], their logits [65, V])` of transformers, with its own cache, after the first
    `START` tokens of the prompt. Once for all backends."""

    @functools.cache
    @torch.no_grad()
    def find(index):
        _, theirs, ids = tiny(index)
        theirs = copy.deepcopy(theirs)  # dynamic rotations remember the longest sequence
        out = theirs(ids[None, :START], use_cache=True)
        tokens, logits = [], [out.logits[0, -1]]
        for _ in range(64):
            tokens.append(logits[-1].argmax())
            out = theirs(tokens[-1].view(1, 1), past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits[0, -1])
        return torch.stack(tokens), torch.stack(logits)

    return find


@pytest.fixture(scope="session")
def rounding(tiny):
    """`rounding(variant) -> (prompts, their logits in float32, the errors of transformers in bfloat16)`, once for all
    backends."""

    @functools.cache
    def find(index):
        folder, theirs, ids = tiny(index)
        half = load_oracle(folder, torch.bfloat16)
        # bf16 turns near ties of a router: a few rows go to another expert, here and there, in both, and spoil some of
        # the rows that see them. So it is the usual row of the usual prompt that counts.
        others = torch.randint(2, 99, (4, PROMPT), generator=torch.Generator().manual_seed(0))
        prompts = [ids, *others] if VARIANTS[index][0] in ROUTED else [ids]
        exact = [oracle(theirs, prompt) for prompt in prompts]
        return prompts, exact, errors(index, [oracle(half, prompt) for prompt in prompts], exact)

    return find


def errors(index, found, exact):
    """Of the logits of each prompt: of all rows, or of the usual one where tokens go to experts."""
    squares = [(logits - right).square().mean(-1) for logits, right in zip(found, exact, strict=True)]
    return torch.stack([(row.median() if VARIANTS[index][0] in ROUTED else row.mean()).sqrt() for row in squares])


def oracle(model, ids):
    with torch.no_grad():
        return model(ids[None]).logits[0].float()


@pytest.fixture(params=backends())
def ops(request):
    return backend(request.param)


def agree(ops, a, b):
    """Bit for bit on the kernels, to rounding on the reference."""
    if ops.__name__.endswith("native"):
        return torch.equal(a, b)
    return relative_error(a, b) < TOLERANCE


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=IDS)
def test_float32_logits(tiny, ops, variant):
    folder, theirs, ids = tiny(variant)
    ours = load_model(folder, torch.float32, ops)
    expected = oracle(theirs, ids)
    logits = prefill(ours, ids)
    assert logits.dtype == torch.float32
    assert expected.std() > 0.1  # the oracle says something
    assert relative_error(logits, expected) < TOLERANCE


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=IDS)
def test_chunks_and_ragged_batches_change_nothing(tiny, ops, variant):
    folder, _, ids = tiny(variant)
    model = load_model(folder, torch.float32, ops)
    whole = prefill(model, ids)
    for chunk in (1, 19):
        assert agree(ops, prefill(model, ids, chunk), whole)

    prompts = {0: ids[:7], 1: ids, 2: ids[5:6], 3: ids[3:36]}
    alone = {s: prefill(model, prompt) for s, prompt in prompts.items()}
    runner = Runner(model, len(prompts), PROMPT)
    lengths = {s: len(prompt) for s, prompt in prompts.items()}
    # prompt 1 is prefilled in two chunks, the second in the company of the others, in another order
    first = runner.step({1: ids[:20]}, lengths)[1]
    rest = runner.step({3: prompts[3], 1: ids[20:], 0: prompts[0], 2: prompts[2]}, lengths)
    assert agree(ops, torch.cat([first, rest[1]]), alone[1])
    for s in (0, 2, 3):
        assert agree(ops, rest[s], alone[s])


@pytest.mark.parametrize(("ops", "variant"), DECODED, indirect=["ops"], ids=[f"{ops}-{IDS[i]}" for ops, i in DECODED])
def test_64_greedy_tokens_and_their_logits_are_those_of_transformers(tiny, greedy, ops, variant):
    """Token by token after a short prompt: also across the lengths where dynamic and longrope change their
    frequencies."""
    folder, _, ids = tiny(variant)
    tokens, expected = greedy(variant)
    ours = load_model(folder, torch.float32, ops)
    runner = Runner(ours, 1, START + 64)
    logits = runner.step({0: ids[:START]}, {0: START})[0][-1]
    for index, token in enumerate(tokens):
        assert logits.argmax() == token, START + index
        logits = runner.step({0: token[None]}, {0: START})[0][-1]
        assert relative_error(logits, expected[index + 1]) < TOLERANCE, START + index


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=IDS)
def test_bfloat16_error_is_at_most_that_of_transformers(tiny, rounding, ops, variant):
    ours = load_model(tiny(variant)[0], torch.bfloat16, ops)
    prompts, exact, usual = rounding(variant)
    found = errors(variant, [prefill(ours, prompt) for prompt in prompts], exact)
    assert found.median() <= usual.median()


def as_transformers_4(five):
    four = {name: value for name, value in five.items() if name not in ("rope_parameters", "dtype")}
    if "text_config" in four:
        four["text_config"] = as_transformers_4(five["text_config"])
    four["torch_dtype"] = five["dtype"]
    rope = dict(five.get("rope_parameters") or {})
    if "full_attention" in rope:
        if "gemma3" in five["model_type"]:
            four["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    if rope:
        four["rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            four["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        rope["type"] = rope.pop("rope_type")
        four["rope_scaling"] = None if rope["type"] == "default" else rope
    return four


@pytest.mark.parametrize("model_type", IN_TRANSFORMERS)
def test_fields_that_are_left_out_have_the_defaults_of_transformers(model_type):
    from transformers import AutoConfig

    needed = {"num_experts_per_tok": 2} if model_type == "deepseek_v2" else {}  # whose default does not run
    whole = AutoConfig.for_model(model_type, **needed).to_dict()
    least = {"model_type": model_type, **needed} | ({"text_config": {}} if model_type in VISION else {})
    ours, theirs = read_config(least)[1], read_config(whole)[1]
    if hasattr(ours, "layer_types"):  # may say the same in other fields
        layers = range(ours.num_hidden_layers)
        assert [ours.window(layer) for layer in layers] == [theirs.window(layer) for layer in layers]
        windows = {name: getattr(theirs, name) for name in ("layer_types", "sliding_window") if hasattr(theirs, name)}
        ours = dataclasses.replace(ours, **windows)
    assert ours == theirs


@pytest.mark.parametrize("variant", range(len(VARIANTS)), ids=IDS)
def test_both_spellings_of_the_config_are_one(tiny, variant):
    folder, _, _ = tiny(variant)
    five = json.loads((folder / "config.json").read_text())
    if IDS[variant] == "olmo3-theta":
        pytest.skip("transformers 4 has one theta for all layers")
    four = as_transformers_4(five)
    assert read_config(four) == read_config(five)

    if "layer_types" in five and not {"layer_types", "sliding_window_pattern"} & VARIANTS[variant][2].keys():
        del four["layer_types"]  # transformers 4 derived them from max_window_layers
        layers = range(five["num_hidden_layers"])
        old, new = read_config(four)[1], read_config(five)[1]
        assert [old.window(i) for i in layers] == [new.window(i) for i in layers]


# ------------------------------------------------------------------------------------------------ kernels of every kind


@pytest.mark.skipif("native" not in backends(), reason="the kernels are not built")
class TestKernelsOfEveryKind:
    @pytest.fixture(autouse=True)
    def restore(self):
        from pace import _C

        isa, threads = _C.isa(), _C.get_num_threads()
        yield
        _C.select_isa(isa)
        _C.set_num_threads(threads)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("variant", FIRST_OF_EACH, ids=BASE)
    def test_every_instruction_set(self, tiny, variant, dtype):
        from pace import _C

        folder, theirs, ids = tiny(variant)
        expected = oracle(theirs, ids)
        # the weights fit in bfloat16 and, within their range, in float16; what is left is the rounding of keys and
        # values, and on avx512_bf16 and amx of the products' inputs, by half a unit of 2^-8
        tolerance = TOLERANCE if dtype == torch.float32 else 0.03
        for isa in isas_of_floats():
            _C.select_isa(isa)
            native = backend("native")
            logits = prefill(load_model(folder, dtype, native), ids)
            if dtype != torch.float32 and VARIANTS[variant][0] in ROUTED:
                usual = (logits - expected).abs().amax(-1).median()
                assert usual / expected.abs().max() < tolerance, isa
            else:
                assert relative_error(logits, expected) < tolerance, isa

    @pytest.mark.parametrize("variant", FIRST_OF_EACH, ids=BASE)
    def test_the_number_of_threads_changes_nothing(self, tiny, variant):
        from pace import _C

        folder, _, ids = tiny(variant)
        native = backend("native")
        model = load_model(folder, torch.bfloat16, native)
        results = []
        for threads in (1, 2, 3):
            _C.set_num_threads(threads)
            results.append(prefill(model, ids))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
