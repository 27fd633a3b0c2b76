"""Single operators on torch give the same numbers, reveal a wrong kernel, and appear in the report."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import asdict

import pytest
import torch

from pace.graph.recorded import OPERATOR_OF
from pace.llm import LLMModel, SamplingConfig
from pace.llm.operators import OPERATORS, OperatorConfig
from pace.llm.runners import make_runner
from pace.llm.runners.eager import EagerRunner
from pace.llm.runners.program import ProgramRunner
from pace.ops import native, reference
from tests.llm.models.variants import FAMILIES, PROMPT, save_tiny
from tests.support import Runner, load_model

pytest.importorskip("transformers")

VARIANTS = [
    ("llama", {}),
    ("qwen2", {"tie_word_embeddings": True}),
    ("qwen3", {}),
    ("gptj", {}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
]
"""Models with tied and untied heads, one product for gate and up, a plain MLP, head norms, and a head with a bias. Also
parallel blocks and OPT's projections."""
MISSING = {"opt": {"rotary"}}
"""Operators that an architecture lacks."""
TOLERANCE = 2e-5
"""Bound relative to the largest logit, as in docs/numerics.md, for fp32 sums in another order over a few layers."""


@pytest.fixture(params=VARIANTS, ids=lambda variant: variant[0])
def loaded(request, tmp_path):
    """Returns a model in fp32 and its architecture."""
    model_type, fields = request.param
    save_tiny(tmp_path, model_type, fields)
    return load_model(tmp_path, torch.float32, native), model_type


def logits_of(runnable):
    """Returns the logits of a prompt in two chunks, then of one token."""
    runner, ids = Runner(runnable, 1, PROMPT), torch.arange(3, 3 + PROMPT) % 97
    return torch.cat([runner.step({0: ids[part]})[0] for part in (slice(0, 30), slice(30, 44), slice(44, 45))])


def error(logits, expected):
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("operator", OPERATORS)
def test_each_operator_alone_on_torch(operator, loaded):
    model, model_type = loaded
    mixed = EagerRunner(model, OperatorConfig(**{operator: "torch"}))
    assert error(logits_of(mixed), logits_of(ProgramRunner(model))) <= TOLERANCE
    ran = {run.operator: run.implementation for run in mixed.operator_report().runs}
    assert ran == {
        name: "torch" if name == operator else "native" for name in OPERATORS if name not in MISSING.get(model_type, ())
    }


KINDS = ("llama", "gptj", "gemma2", "deepseek_v2", "qwen3_moe")
"""Families with plain, parallel, windowed, latent and routed layers. tests/llm/models/visit.py compares the logits."""


@pytest.mark.parametrize(
    "family", [name if name in KINDS else pytest.param(name, marks=pytest.mark.thorough) for name in FAMILIES]
)
def test_greedy_text_of_every_architecture_is_that_of_the_kernels(checkpoint, family):
    folder, prompt = checkpoint(family)[0], list(range(5, 25))
    greedy = SamplingConfig(max_new_tokens=32, ignore_eos=True)
    expected = LLMModel(folder, dtype="fp32", progress=False).generate(prompt, greedy).generated_token_ids
    for operator in OPERATORS:
        with LLMModel(folder, dtype="fp32", backend=f"{operator}=torch", progress=False) as model:
            assert model.generate(prompt, greedy).generated_token_ids == expected, operator


def test_weights_in_bf16_are_the_same_numbers_on_both_sides(tmp_path):
    """Only the kernels of `avx512_bf16` and `amx` round the inputs of products; torch does not."""
    save_tiny(tmp_path, "llama", {})
    model = load_model(tmp_path, torch.bfloat16, native)
    mixed = EagerRunner(model, OperatorConfig(embedding="torch", mlp="torch", lm_head="torch", projection="torch"))
    assert error(logits_of(mixed), logits_of(ProgramRunner(model))) <= 2e-2


WRONG = {
    "embedding": ("embedding", lambda weight: True),
    "norm": ("rms_norm", None),
    "projection": ("linear", lambda weight: weight.k == 32 and weight.n == 64),
    "rotary": ("rotary_", None),
    "attention": ("attention", None),
    "mlp": ("linear", lambda weight: weight.k == 56),
    "lm_head": ("linear", lambda weight: weight.n == 99),
}
"""Operator -> a native operation that is made wrong, and a condition on its weight (None: always)."""


@pytest.mark.parametrize("guilty", OPERATORS)
def test_a_wrong_kernel_is_found_by_running_one_operator_after_the_other_on_torch(guilty, tmp_path, monkeypatch):
    save_tiny(tmp_path, "llama", {})
    model = load_model(tmp_path, torch.float32, native)
    expected = logits_of(ProgramRunner(model))
    operation, has_size = WRONG[guilty]
    honest = getattr(native, operation)

    @functools.wraps(honest)
    def wrong(x, *arguments, **more):
        result = honest(x, *arguments, **more)
        if has_size is None or has_size(arguments[0]):
            (x if result is None else result).mul_(1.01)
        return result

    monkeypatch.setattr(native, operation, wrong)
    errors = {
        operator: error(logits_of(EagerRunner(model, OperatorConfig(**{operator: "torch"}))), expected)
        for operator in OPERATORS
    }
    assert [operator for operator in OPERATORS if errors[operator] <= TOLERANCE] == [guilty]
    assert min(errors[operator] for operator in OPERATORS if operator != guilty) > 10 * TOLERANCE


@pytest.mark.parametrize(
    "config",
    [OperatorConfig(norm="torch", mlp="torch"), None, OperatorConfig(**dict.fromkeys(OPERATORS, "torch"))],
    ids=str,
)
def test_the_report_counts_what_ran(config, loaded, monkeypatch):
    counted, inside = Counter(), []

    def count(implementation, module, operation):
        honest = getattr(module, operation)

        @functools.wraps(honest)
        def counting(*arguments, **more):
            counted[implementation, operation] += not inside  # some reference functions call others
            inside.append(operation)
            try:
                return honest(*arguments, **more)
            finally:
                inside.pop()

        monkeypatch.setattr(module, operation, counting)

    for operation in OPERATOR_OF:
        count("native", native, operation)
        count("torch", reference, operation)
    runnable = EagerRunner(loaded[0], config)
    assert runnable.operator_report().runs == []
    logits_of(runnable)
    reported = Counter({(run.operator, run.implementation): run.calls for run in runnable.operator_report().runs})
    for implementation in ("native", "torch"):
        for operator in ("embedding", "norm", "rotary", "attention"):
            assert reported[operator, implementation] == sum(
                counted[implementation, name] for name, owner in OPERATOR_OF.items() if owner == operator
            )
        products = sum(counted[implementation, name] for name, owner in OPERATOR_OF.items() if owner is None)
        assert sum(reported[name, implementation] for name in ("projection", "mlp", "lm_head")) == products
    assert all(run.seconds > 0 for run in runnable.operator_report().runs)


def test_a_program_reports_the_calls_that_it_saved(loaded):
    model, model_type = loaded
    compiled, eager = ProgramRunner(model), EagerRunner(model)
    assert compiled.operator_report().runs == []
    for runnable in (compiled, eager):
        logits_of(runnable)
    calls = [{run.operator: run.calls for run in runnable.operator_report().runs} for runnable in (compiled, eager)]
    if model_type == "gptj":  # each of the two readers of a parallel block computes its norm
        calls[1]["norm"] += 3 * model.config.num_hidden_layers
    assert calls[0] == calls[1]
    assert {run.implementation for run in compiled.operator_report().runs} == {"native"}
    assert all(run.seconds is None for run in compiled.operator_report().runs)
    compiled.program.set_profiling(True)
    logits_of(compiled)
    report = compiled.operator_report()
    assert report["mlp"].seconds > 0
    assert (
        sum(run.seconds or 0 for run in report.runs)
        <= sum(seconds for *_, seconds in compiled.program.timings()) + 1e-9
    )


def test_what_is_native_throughout_is_a_program(loaded):
    model = loaded[0]
    for backend in ("native", OperatorConfig(), OperatorConfig(mlp="native"), "mlp=native"):
        assert isinstance(make_runner(model, backend), ProgramRunner)
    for backend in ("native-eager", OperatorConfig(mlp="torch"), "mlp=torch"):
        assert isinstance(make_runner(model, backend), EagerRunner)
    assert torch.equal(logits_of(make_runner(model, "native-eager")), logits_of(make_runner(model, "native")))


def test_a_model_tells_what_ran(checkpoint):
    with LLMModel(checkpoint("llama")[0], dtype="fp32", backend="attention=torch", progress=False) as model:
        assert model.operator_report().runs == []
        model.generate([5, 6, 7], SamplingConfig(max_new_tokens=3, ignore_eos=True))
        report = model.operator_report()
    assert asdict(report["attention"]) | {"seconds": 0} == {
        "operator": "attention",
        "implementation": "torch",
        "calls": 3 * 2 * 2,
        "seconds": 0,
    }
    assert report["lm_head"].implementation == "native" and report["lm_head"].calls == 3
