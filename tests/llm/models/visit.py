"""A visit of one variant: its checkpoint is made once and loaded once per dtype and backend, and all cheap properties
are looked at. `check_all` reports each by its name.

The reference backend sums in whatever order torch likes, so there equality is approximate; the kernels owe
`torch.equal`.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pace import _C
from pace.bench.costs import Costs
from pace.calibrate.migration import apply, migrations
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.model_list import read_config
from pace.llm.operators import OPERATORS, OperatorConfig
from pace.llm.runners.eager import EagerRunner
from pace.llm.runners.program import ProgramRunner
from pace.llm.runners.runner import ModelRunner
from pace.ops import reference
from pace.quant import Int4, Int8, QuantizationConfig
from tests.calibrate.places import num_places
from tests.llm.models.parts import FIRST_OF_EACH, representative
from tests.llm.models.variants import IDS, PROMPT, ROUTED, VARIANTS, load_oracle, save_tiny
from tests.plugins.tiers import quarter, quarter_of
from tests.support import Runner, TensorDict, backend, backends, isas_of_floats, load_model, prefill

# Two implementations in float32 of ~2 layers x 8 sums of <= 64 terms: rounding walks to about sqrt(1000) eps = 4e-6 of
# the largest logit; measured up to 3e-6.
TOLERANCE = 2e-5

START = 12
"""Tokens of the prompt after which others are generated."""

STEPS = [
    {1: slice(0, 20)},
    {3: slice(3, 36), 1: slice(20, PROMPT), 0: slice(0, 7), 2: slice(5, 6)},
    {0: slice(7, 8)},
    {0: slice(8, 9)},
    {0: slice(9, 13), 2: slice(6, 7)},
]
"""Sequences and the parts of the prompt they get: chunks, ragged batches, single tokens (twice the same shape), a few
rows."""


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and torch.isfinite(theirs).all()
    return float((ours - theirs).abs().max() / theirs.abs().max())  # NaN in ours gives NaN, which is below nothing


def agree(ops: str, a: Tensor, b: Tensor) -> bool:
    """Bit for bit on the kernels, to rounding on the reference."""
    return torch.equal(a, b) if ops == "native" else relative_error(a, b) < TOLERANCE


@torch.no_grad()
def oracle(model: torch.nn.Module, ids: Tensor) -> Tensor:
    return model(ids[None]).logits[0].float()


class Visit:
    def __init__(self, name: str, folder: Path, in_full: bool):
        """`in_full`: all variants are looked at as those with parts that none before has. Of the others, each commit
        sees a quarter whole."""
        self.index, self.name, self.folder = IDS.index(name), name, folder
        self.model_type, _, self.fields = VARIANTS[self.index]
        self.routed = self.model_type in ROUTED
        self.in_full = in_full
        self.is_first, self.is_representative = name in FIRST_OF_EACH, name in representative() or in_full
        self.is_whole = self.is_representative or quarter_of(name) == quarter()
        self.theirs = save_tiny(folder, self.model_type, self.fields)
        self.config_json = json.loads((folder / "config.json").read_text())
        self.ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(self.index))
        self.expected = oracle(self.theirs, self.ids)
        self.loaded: dict[tuple[str, torch.dtype], BaseModelForCausalLM] = {}
        _C.set_num_threads(1)

    def model(self, ops: str, dtype: torch.dtype) -> BaseModelForCausalLM:
        """Loaded once; its cache is in `dtype` again, whatever a check before has set."""
        if (ops, dtype) not in self.loaded:
            self.loaded[ops, dtype] = load_model(self.folder, dtype, backend(ops))
        self.loaded[ops, dtype].kv_dtype = dtype
        return self.loaded[ops, dtype]

    def check_all(self, subtests: pytest.Subtests) -> None:
        is_native = "native" in backends()
        checks: list[tuple[Callable[..., None], tuple[str, ...], bool]] = [(self.check_spellings, (), True)]
        for ops in backends():
            checks += [
                (self.check_float32, (ops,), True),
                (self.check_bfloat16, (ops,), self.is_whole),
                (self.check_ragged_batches, (ops,), self.is_whole or ops == "native"),
                (self.check_tokens, (ops,), self.is_whole),
            ]
        checks += [
            (self.check_quantised, (), self.is_representative),
            (self.check_programs, (), is_native and self.is_whole),
            (self.check_int8_cache, (), is_native and self.is_whole),
            (self.check_costs, (), is_native and self.is_whole),
            (self.check_operators, (), is_native and self.is_first),
            (self.check_threads, (), is_native and self.is_first),
            (self.check_instruction_sets, (), is_native and self.is_first),
            (self.check_migrations, (), self.is_whole),
        ]
        for check, arguments, is_wanted in checks:
            if is_wanted:
                with subtests.test(" ".join((check.__name__, *arguments))):
                    check(*arguments)

    # -- logits

    def check_float32(self, ops: str) -> None:
        logits = prefill(self.model(ops, torch.float32), self.ids)
        assert logits.dtype == torch.float32
        assert self.expected.std() > 0.1  # the oracle says something
        assert relative_error(logits, self.expected) < TOLERANCE

    def check_bfloat16(self, ops: str) -> None:
        """The error is at most that of transformers."""
        prompts, exact, usual = self.rounding
        found = self.errors([prefill(self.model(ops, torch.bfloat16), prompt) for prompt in prompts], exact)
        assert found.median() <= usual.median()

    @functools.cached_property
    def rounding(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Prompts, their logits in float32, and the errors of transformers in bfloat16."""
        half = load_oracle(self.folder, torch.bfloat16)
        # bf16 turns near ties of a router: a few rows go to another expert, here and there, in both, and spoil some of
        # the rows that see them. So it is the usual row of the usual prompt that counts.
        others = torch.randint(2, 99, (4, PROMPT), generator=torch.Generator().manual_seed(0))
        prompts = [self.ids, *others] if self.routed else [self.ids]
        exact = [oracle(self.theirs, prompt) for prompt in prompts]
        return prompts, exact, self.errors([oracle(half, prompt) for prompt in prompts], exact)

    def errors(self, found: list[Tensor], exact: list[Tensor]) -> Tensor:
        """Of the logits of each prompt: of all rows, or of the usual one where tokens go to experts."""
        squares = [(logits - right).square().mean(-1) for logits, right in zip(found, exact, strict=True)]
        return torch.stack([(row.median() if self.routed else row.mean()).sqrt() for row in squares])

    def check_ragged_batches(self, ops: str) -> None:
        """Neither chunks nor company change anything."""
        model, ids = self.model(ops, torch.float32), self.ids
        whole = prefill(model, ids)
        assert agree(ops, prefill(model, ids, 19), whole)

        prompts = {0: ids[:7], 1: ids, 2: ids[5:6], 3: ids[3:36]}
        alone = {s: prefill(model, prompt) for s, prompt in prompts.items()}
        runner = Runner(model, len(prompts), PROMPT)
        lengths = {s: len(prompt) for s, prompt in prompts.items()}
        # prompt 1 is prefilled in two chunks, the second in the company of the others, in another order
        first = runner.step({1: ids[:20]}, lengths)[1]
        rest = runner.step({3: prompts[3], 1: ids[20:], 0: prompts[0], 2: prompts[2]}, lengths)
        assert agree(ops, torch.cat([first, rest[1]]), alone[1])
        for s in (0, 2, 3):
            assert agree(ops, rest[s], alone[s]), f"prompt {s}"

    # -- tokens one by one

    @property
    def frequencies_change(self) -> bool:
        """Whether the rotation depends on the length of a sequence."""
        return any(kind in json.dumps(self.config_json) for kind in ('"dynamic"', '"longrope"'))

    def check_tokens(self, ops: str) -> None:
        """Token by token, a text has the logits that it has in one piece, and greedy tokens are those of transformers.
        The reference generates none: it has a few single tokens."""
        model = self.model(ops, torch.float32)
        if generates := ops == "native" or self.in_full:
            is_long = self.is_first or self.in_full or self.frequencies_change
            text, logits = self.generate(model, 64 if is_long else 28)  # 28 end in the third block
            if not self.frequencies_change:
                assert agree(ops, logits, prefill(model, text))
            self.check_greedy(text, logits)
        if self.frequencies_change or not generates:
            sizes = [1] * PROMPT if ops == "native" else [1, 1, 19, 1, PROMPT - 22]
            runner = Runner(model, 1, PROMPT)
            rows = [runner.step({0: part}, {0: PROMPT})[0] for part in self.ids.split(sizes)]
            assert agree(ops, torch.cat(rows), prefill(model, self.ids))

    def generate(self, model: BaseModelForCausalLM, count: int) -> tuple[Tensor, Tensor]:
        """The first tokens of the prompt and `count` greedy ones `[T]`, and the logits after each of them `[T, V]`."""
        runner, text, logits = Runner(model, 1, START + count), [*self.ids[:START]], []
        for position in range(START + count):
            logits.append(runner.step({0: text[position][None]}, {0: START})[0][-1])
            if position >= START - 1:
                text.append(logits[-1].argmax())
        return torch.stack(text[:-1]), torch.stack(logits)

    @torch.no_grad()
    def check_greedy(self, text: Tensor, logits: Tensor) -> None:
        """Across the lengths where dynamic and longrope change their frequencies, with the cache of transformers."""
        if self.frequencies_change:
            theirs = copy.deepcopy(self.theirs)  # dynamic rotations remember the longest sequence
            out = theirs(text[None, :START], use_cache=True)
            rows = [*out.logits[0]]
            for token in text[START:]:
                out = theirs(token.view(1, 1), past_key_values=out.past_key_values, use_cache=True)
                rows.append(out.logits[0, -1])
            expected = torch.stack(rows)
        else:
            expected = oracle(self.theirs, text)
        for position in range(START - 1, len(text)):
            if position + 1 < len(text):
                assert expected[position].argmax() == text[position + 1], f"token {position + 1}"
            assert relative_error(logits[position], expected[position]) < TOLERANCE, f"after token {position}"

    # -- programs

    def check_programs(self) -> None:
        """A program gives the bits of the same model run op by op, fused or not: logits and cache. Representative
        variants run each dtype with one thread and with two. Others run it with one of the two, in turn."""
        dtypes = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]
        for number, (dtype, kv_dtype) in enumerate(dtypes):
            threads = (1, 2) if self.is_representative else (1 + (self.index + number) % 2,)
            assert_same_program(self.model("native", dtype), self.ids, kv_dtype, threads)

    # -- caches and costs

    def check_int8_cache(self) -> None:
        """The logits are near those of a float cache.

        An element of int8 is off by max / (127 sqrt 12) of its head on average, one of bfloat16 by about 2^-10 of
        itself. That is 4 to 5 times as much where the largest of a head is twice an ordinary one. Measured on logits:
        1.5 to 3.6 times. Of a mixture the quarter of the rows that is least off counts: in the others a token chose
        another expert, and its neighbours see it."""
        model = self.model("native", torch.float32)

        def logits(kv_dtype: torch.dtype, chunk: int | None = None) -> Tensor:
            model.kv_dtype = kv_dtype
            return prefill(model, self.ids, chunk)

        int8, bfloat16, exact = logits(torch.int8), logits(torch.bfloat16), logits(torch.float32)

        def error(found: Tensor) -> float:
            rows = (found - exact).square().mean(-1)
            return float(rows.quantile(0.25) if self.routed else rows.mean()) ** 0.5

        assert 0 < error(int8) < (8 if self.routed else 5) * error(bfloat16)
        assert torch.equal(logits(torch.int8, chunk=7), int8)

    def check_costs(self) -> None:
        """The costs that follow from a config are the bytes of the loaded model."""
        for dtype in (torch.float32, torch.bfloat16):
            model = self.model("native", dtype)
            costs, position_bytes = Costs.of(model, dtype), model.kv_spec.position_bytes
            assert costs.weight_bytes == model.nbytes >= costs.decode_weight_bytes
            assert costs.kv_bytes_per_token == position_bytes
            model.kv_dtype = torch.int8
            narrow = Costs.of(model, dtype, torch.int8).kv_bytes_per_token
            assert narrow == model.kv_spec.position_bytes < position_bytes

    # -- other weights

    def check_quantised(self) -> None:
        """Weights in int4 or int8 have the logits of floats that have gone through the format."""
        state, plain = load_file(self.folder / "model.safetensors"), self.model("reference", torch.float32)
        model_class, config = read_config(self.config_json)
        formats = [QuantizationConfig("int4", group=16), QuantizationConfig("int8")]

        def load(quantization: QuantizationConfig, as_floats: bool) -> BaseModelForCausalLM:
            model = model_class(config, torch.float32, reference)
            model.quantize(quantization)
            for matrix in model.matrices() if as_floats else ():
                matrix.plan = dataclasses.replace(matrix.plan, layouts={})
            model.load_weights(TensorDict(state))
            return model

        for quantization in formats if self.in_full else [formats[self.index % 2]]:
            expected, found = prefill(load(quantization, True), self.ids), load(quantization, False)
            assert torch.equal(prefill(found, self.ids), expected), quantization
            assert not torch.equal(expected, prefill(plain, self.ids)), quantization
            for ours, float32 in zip(found.matrices(), plain.matrices(), strict=True):
                if ours.keeps_floats:
                    assert torch.equal(ours.weight.matrix, float32.weight.matrix), ours.parts
                else:
                    assert ours.weight.layout in (Int4(16).layout, Int8().layout), ours.parts

    def check_migrations(self) -> None:
        """Scales that migrate leave the float model what it is. The last check: it changes the model's weights."""
        model = self.model("reference", torch.float32)
        before = prefill(model, self.ids)
        generator, found = torch.Generator().manual_seed(1), 0
        for layer in model.layers:
            for place in migrations(layer):
                s = torch.exp(2 * torch.randn(place.readers[0].k, generator=generator).clamp(-2, 2))
                apply(place, place.channels(s))
                found += 1
        assert found == sum(num_places(self.name, layer) for layer in model.layers)
        after = prefill(model, self.ids)
        assert not torch.equal(after, before), "something was scaled"
        # Sums of 56 products at most, in float32 and with terms that differ in size: far below what a forgotten scale
        # would do.
        assert (after - before).abs().max() < 2e-5 * before.abs().max()

    # -- operators

    def check_operators(self) -> None:
        """Each operator alone on torch gives the same numbers, with a prompt in two chunks, then one token."""
        model = self.model("native", torch.float32)
        expected = logits_of(ProgramRunner(model), self.ids)
        for operator in OPERATORS:
            mixed = EagerRunner(model, OperatorConfig(**{operator: "torch"}))
            assert relative_error(logits_of(mixed, self.ids), expected) < TOLERANCE, operator

    # -- kernels of every kind

    def check_instruction_sets(self) -> None:
        """Every instruction set in one dtype, which differs from family to family; in all dtypes with `in_full`."""
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        for dtype in dtypes if self.in_full else [dtypes[FIRST_OF_EACH.index(self.name) % 3]]:
            # the weights fit in bfloat16 and, within their range, in float16; what is left is the rounding of keys and
            # values, and on avx512_bf16 and amx of the products' inputs, by half a unit of 2^-8
            tolerance = TOLERANCE if dtype == torch.float32 else 0.03
            for isa in isas_of_floats():
                _C.select_isa(isa)
                logits = prefill(load_model(self.folder, dtype, backend("native")), self.ids)
                if dtype != torch.float32 and self.routed:
                    usual = (logits - self.expected).abs().amax(-1).median()
                    assert usual / self.expected.abs().max() < tolerance, (dtype, isa)
                else:
                    assert relative_error(logits, self.expected) < tolerance, (dtype, isa)

    def check_threads(self) -> None:
        """The number of threads changes nothing."""
        model, results = self.model("native", torch.bfloat16), []
        for threads in (1, 2, 3):
            _C.set_num_threads(threads)
            results.append(prefill(model, self.ids))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])

    # -- the config

    def check_spellings(self) -> None:
        """Both spellings of the config are one."""
        five = self.config_json
        if self.name == "olmo3-theta":
            return  # transformers 4 has one theta for all layers
        four = as_transformers_4(five)
        assert read_config(four) == read_config(five)

        if "layer_types" in five and not {"layer_types", "sliding_window_pattern"} & self.fields.keys():
            del four["layer_types"]  # transformers 4 derived them from max_window_layers
            layers = range(five["num_hidden_layers"])
            old, new = read_config(four)[1], read_config(five)[1]
            assert [old.window(i) for i in layers] == [new.window(i) for i in layers]


def logits_of(runnable: ModelRunner, ids: Tensor) -> Tensor:
    """Of `ids [45]`: 30 tokens, 14 after them, then one."""
    runner = Runner(runnable, 1, PROMPT)
    return torch.cat([runner.step({0: part})[0] for part in ids.split([30, 14, 1])])


def assert_same_program(
    model: BaseModelForCausalLM,
    ids: Tensor,
    kv_dtype: torch.dtype | None = None,
    threads: Sequence[int | None] = (None,),
) -> None:
    """A recorded model, fused or not, gives the bits of the same model run op by op: logits and cache. It is recorded
    once, and runs with each number of `threads`, None for the present one."""
    model.kv_dtype = kv_dtype or model.dtype
    programs = ProgramRunner(model), ProgramRunner(model, optimise=False)
    eager, expected = Runner(model, 4, PROMPT), []
    for count in threads:
        if count is not None:
            _C.set_num_threads(count)
        if not expected:
            expected = [eager.step(step) for step in steps_of(ids)]
            assert all(row.isfinite().all() for rows in expected for row in rows.values())
        for program in programs:
            runner = Runner(program, 4, PROMPT)
            for step, rows in zip(steps_of(ids), expected, strict=True):
                found = runner.step(step)
                for s in step:
                    assert torch.equal(found[s], rows[s]), (program is programs[0], count, s, len(step[s]))
            assert_same_cache(runner.kv, eager.kv)


def steps_of(ids: Tensor) -> list[dict[int, Tensor]]:
    return [{s: ids[part] for s, part in chunks.items()} for chunks in STEPS]


def assert_same_cache(ours, expected) -> None:
    for layer, other in zip(ours, expected, strict=True):
        assert all(map(same_bits, layer.tensors, other.tensors))


def same_bits(a: Tensor, b: Tensor) -> bool:
    """torch.equal, where the NaN of a cache position never written equals itself."""
    integer = {4: torch.int32, 2: torch.int16, 1: torch.int8}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.view(integer), b.view(integer))


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
