"""Checks of one variant. Its checkpoint is made once and loaded once per dtype and backend. `check_all` runs all cheap
checks and reports each by name.

The kernels must agree bit for bit. The reference backend sums in the order that torch chooses, so it is compared with
a tolerance.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pace import _C
from pace.batch import LayerBlocks
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
from tests.llm.models.parts import FIRST_OF_EACH, representative, with_new_parts
from tests.llm.models.variants import IDS, PROMPT, ROUTED, VARIANTS, config_fields, load_oracle, save_tiny
from tests.plugins.tiers import quarter, quarter_of
from tests.support import Runner, TensorDict, backend, backends, isas_of_floats, load_model, prefill

# Rounding errors of about 2 layers x 8 sums of at most 64 terms in float32 add up like a random walk. Two
# implementations differ by about sqrt(1000) eps = 4e-6 of the largest logit. Measured: up to 3e-6.
TOLERANCE = 2e-5

START = 12
"""Number of prompt tokens before the generated ones."""

STEPS = [
    {1: slice(0, 20)},
    {3: slice(3, 36), 1: slice(20, PROMPT), 0: slice(0, 7), 2: slice(5, 6)},
    {0: slice(7, 8)},
    {0: slice(8, 9)},
    {0: slice(9, 13), 2: slice(6, 7)},
]
"""For each step, the part of the prompt that each sequence gets. Covers chunks, ragged batches, a few rows, and single
tokens (the same shape twice)."""


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape and torch.isfinite(theirs).all()
    return float((ours - theirs).abs().max() / theirs.abs().max())  # NaN in ours gives NaN, which fails any `<`


def agree(ops: str, a: Tensor, b: Tensor) -> bool:
    """True if a and b are equal: bit for bit on the kernels, up to rounding on the reference."""
    return torch.equal(a, b) if ops == "native" else relative_error(a, b) < TOLERANCE


@torch.no_grad()
def oracle(model: torch.nn.Module, ids: Tensor) -> Tensor:
    # transformers 5.24 has no cache for models in which no layer attends
    return model(ids[None], use_cache=False).logits[0].float()


class Visit:
    def __init__(self, name: str, folder: Path, in_full: bool):
        """`in_full` runs all checks of a representative variant on every variant. Otherwise most checks run on the
        variants with new parts, and on a quarter of the others that differs by commit."""
        self.index, self.name, self.folder = IDS.index(name), name, folder
        self.model_type, _, self.fields = VARIANTS[self.index]
        # BitNet's norm enlarges what is left of a row if most of its gates are zero, and with it the rounding before.
        self.routed = self.model_type in (*ROUTED, "bitnet") or "enable_moe_block" in self.fields
        self.in_full = in_full
        self.is_whole = in_full or name in with_new_parts() or quarter_of(name) == quarter()
        self.is_representative = in_full or self.is_whole and name in representative()
        self.is_first = self.is_whole and name in FIRST_OF_EACH
        self.theirs = save_tiny(folder, self.model_type, self.fields)
        self.config_json = json.loads((folder / "config.json").read_text())
        self.ids = torch.randint(2, 99, (PROMPT,), generator=torch.Generator().manual_seed(self.index))
        self.expected = oracle(self.theirs, self.ids)
        self.loaded: dict[tuple[str, torch.dtype], BaseModelForCausalLM] = {}
        _C.set_num_threads(1)

    def model(self, ops: str, dtype: torch.dtype) -> BaseModelForCausalLM:
        """Returns the model, which is loaded once. Sets its cache back to `dtype`, which an earlier check may have
        changed."""
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
                (self.check_drafts, (ops,), self.is_whole),
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
        assert self.expected.std() > 0.1  # the oracle's logits are not trivial
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
        # bf16 flips near ties of a router. In both models a few rows go to another expert, which spoils some of the
        # rows that attend to them. So the median row of the median prompt counts.
        others = torch.randint(2, 99, (4, PROMPT), generator=torch.Generator().manual_seed(0))
        prompts = [self.ids, *others] if self.routed else [self.ids]
        exact = [oracle(self.theirs, prompt) for prompt in prompts]
        return prompts, exact, self.errors([oracle(half, prompt) for prompt in prompts], exact)

    @functools.cached_property
    def half_error(self) -> float:
        """The relative error of transformers in bfloat16."""
        return relative_error(oracle(load_oracle(self.folder, torch.bfloat16), self.ids), self.expected)

    def errors(self, found: list[Tensor], exact: list[Tensor]) -> Tensor:
        """Returns the RMS error of the logits of each prompt: over all rows, or of the median row for a mixture."""
        squares = [(logits - right).square().mean(-1) for logits, right in zip(found, exact, strict=True)]
        return torch.stack([(row.median() if self.routed else row.mean()).sqrt() for row in squares])

    def check_ragged_batches(self, ops: str) -> None:
        """Logits depend neither on chunks nor on the other sequences of the batch."""
        model, ids = self.model(ops, torch.float32), self.ids
        whole = prefill(model, ids)
        assert agree(ops, prefill(model, ids, 19), whole)

        prompts = {0: ids[:7], 1: ids, 2: ids[5:6], 3: ids[3:36]}
        alone = {s: prefill(model, prompt) for s, prompt in prompts.items()}
        runner = Runner(model, len(prompts), PROMPT)
        lengths = {s: len(prompt) for s, prompt in prompts.items()}
        # prompt 1 is prefilled in two chunks, the second in one batch with the others, in another order
        first = runner.step({1: ids[:20]}, lengths)[1]
        rest = runner.step({3: prompts[3], 1: ids[20:], 0: prompts[0], 2: prompts[2]}, lengths)
        assert agree(ops, torch.cat([first, rest[1]]), alone[1])
        for s in (0, 2, 3):
            assert agree(ops, rest[s], alone[s]), f"prompt {s}"

    # -- tokens one by one

    @property
    def frequencies_change(self) -> bool:
        """True if the rotation depends on the length of a sequence."""
        return any(kind in json.dumps(self.config_json) for kind in ('"dynamic"', '"longrope"'))

    def check_tokens(self, ops: str) -> None:
        """A text has the same logits token by token as in one piece, and greedy tokens equal those of transformers.

        The reference backend generates only with `in_full`. Otherwise it just processes a few single tokens."""
        model = self.model(ops, torch.float32)
        if generates := ops == "native" or self.in_full:
            is_long = self.is_first or self.in_full or self.frequencies_change
            text, logits = self.generate(model, 64 if is_long else 28)  # with 28 the text ends in the third block
            if not self.frequencies_change:
                assert agree(ops, logits, prefill(model, text))
            self.check_greedy(text, logits)
        if self.frequencies_change or not generates:
            sizes = [1] * PROMPT if ops == "native" else [1, 1, 19, 1, PROMPT - 22]
            runner = Runner(model, 1, PROMPT)
            rows = [runner.step({0: part}, {0: PROMPT})[0] for part in self.ids.split(sizes)]
            assert agree(ops, torch.cat(rows), prefill(model, self.ids))

    def generate(self, model: BaseModelForCausalLM, count: int) -> tuple[Tensor, Tensor]:
        """Returns the first `START` tokens of the prompt and `count` greedy ones `[T]`, and the logits after each of
        them `[T, V]`."""
        runner, text, logits = Runner(model, 1, START + count), [*self.ids[:START]], []
        for position in range(START + count):
            logits.append(runner.step({0: text[position][None]}, {0: START})[0][-1])
            if position >= START - 1:
                text.append(logits[-1].argmax())
        return torch.stack(text[:-1]), torch.stack(logits)

    @torch.no_grad()
    def check_greedy(self, text: Tensor, logits: Tensor) -> None:
        """Compares logits and greedy tokens with transformers. Uses the cache of transformers if the frequencies depend
        on the length (dynamic, longrope), and crosses the lengths at which they change."""
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

    def check_drafts(self, ops: str) -> None:
        """A state has the same logits after drafts, however many of them were accepted. Sequence 0 reads one slot and
        writes another, sequence 1 writes in place."""
        model = self.model(ops, torch.float32)
        if not model.kv_spec.has_states:
            return
        text = prefill(model, self.ids)
        runner = Runner(ProgramRunner(model) if ops == "native" else model, 2, PROMPT + 3, max_drafts=3)
        runner.step({s: self.ids[:6] for s in (0, 1)})
        position = 6
        for accepted in (0, 0, 3, 1, 2, 3, 0, 1):
            certain, drafts = self.ids[position : position + 2], self.ids[position + 2 : position + 5].clone()
            drafts[accepted:] = (drafts[accepted:] + 1) % 99
            rows = runner.step({s: torch.cat([certain, drafts]) for s in (0, 1)}, drafts={0: 3, 1: 3})
            end = position + 2 + accepted
            for s in (0, 1):
                assert agree(ops, rows[s][: end - position], text[position:end]), (s, position, accepted)
                runner.accept(s, accepted, 3)
            position = end

    # -- programs

    def check_programs(self) -> None:
        """A program, fused or not, has the same bits of logits and cache as the model run op by op. Representative
        variants run each dtype with one thread and with two. Others run it with one of the two, in turn."""
        dtypes = [(torch.float32, None), (torch.bfloat16, None), (torch.bfloat16, torch.int8)]
        for number, (dtype, kv_dtype) in enumerate(dtypes):
            threads = (1, 2) if self.is_representative else (1 + (self.index + number) % 2,)
            assert_same_program(self.model("native", dtype), self.ids, kv_dtype, threads)

    # -- caches and costs

    def check_int8_cache(self) -> None:
        """The logits are close to those of a float cache.

        The average error of an int8 element is max / (127 sqrt 12), with the maximum of its head. That of a bfloat16
        element is about 2^-10 of it. The first is 2.3 times larger, times the maximum in typical elements. The largest
        of D normal numbers is about sqrt(2 ln 2 D) of them: 2.4 for a head of 8, 3.5 for one of 256.
        Measured on logits: 0.2 to 1.5 times this maximum, and 1.7 times for D = 256.

        For a mixture the lowest quartile of the rows' errors counts. In other rows a token may go to another expert,
        which later rows see."""
        model = self.model("native", torch.float32)
        if not model.kv_spec.position_bytes:
            return  # no layer attends

        def logits(kv_dtype: torch.dtype, chunk: int | None = None) -> Tensor:
            model.kv_dtype = kv_dtype
            return prefill(model, self.ids, chunk)

        int8, bfloat16, exact = logits(torch.int8), logits(torch.bfloat16), logits(torch.float32)

        def error(found: Tensor) -> float:
            rows = (found - exact).square().mean(-1)
            return float(rows.quantile(0.25) if self.routed else rows.mean()) ** 0.5

        widths = [getattr(layer, "key_dim", 0) or getattr(layer, "rank", 0) for layer in model.kv_spec.layers]
        largest = math.sqrt(2 * math.log(2 * max(widths)))
        assert 0 < error(int8) < (8 if self.routed else 2.1 * largest) * error(bfloat16)
        assert torch.equal(logits(torch.int8, chunk=7), int8)

    def check_costs(self) -> None:
        """The costs derived from the config equal the bytes of the loaded model."""
        for dtype in (torch.float32, torch.bfloat16):
            model = self.model("native", dtype)
            costs, position_bytes = Costs.of(model, dtype), model.kv_spec.position_bytes
            assert costs.weight_bytes == model.nbytes >= costs.decode_weight_bytes
            assert costs.kv_bytes_per_token == position_bytes
            model.kv_dtype = torch.int8
            narrow = Costs.of(model, dtype, torch.int8).kv_bytes_per_token
            assert narrow == model.kv_spec.position_bytes
            assert narrow < position_bytes or not position_bytes  # not if no layer attends

    # -- other weights

    def check_quantised(self) -> None:
        """Weights in int4 or int8 give the same logits as floats that were quantised and dequantised."""
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
        """Migrating scales does not change the float model. This check is the last because it changes the weights."""
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
        # Rounding of float32 sums of at most 56 products of unequal size: far below the effect of a forgotten scale.
        assert (after - before).abs().max() < 2e-5 * before.abs().max()

    # -- operators

    def check_operators(self) -> None:
        """Running any one operator on torch gives the same logits, for a prompt in two chunks and then one token."""
        model = self.model("native", torch.float32)
        expected = logits_of(ProgramRunner(model), self.ids)
        for operator in OPERATORS:
            mixed = EagerRunner(model, OperatorConfig(**{operator: "torch"}))
            assert relative_error(logits_of(mixed, self.ids), expected) < TOLERANCE, operator

    # -- kernels of every kind

    def check_instruction_sets(self) -> None:
        """Runs every instruction set in one dtype, which differs by family, or in all dtypes with `in_full`."""
        dtypes = [torch.float32, torch.bfloat16, torch.float16]
        for dtype in dtypes if self.in_full else [dtypes[FIRST_OF_EACH.index(self.name) % 3]]:
            # The weights are exact in bfloat16 and, within its range, in float16. What remains is the rounding of keys
            # and values, and on avx512_bf16 and amx that of the products' inputs, by half a unit of 2^-8.
            tolerance = TOLERANCE if dtype == torch.float32 else 0.03
            for isa in isas_of_floats():
                _C.select_isa(isa)
                logits = prefill(load_model(self.folder, dtype, backend("native")), self.ids)
                if dtype != torch.float32 and self.routed:
                    usual = (logits - self.expected).abs().amax(-1).median()
                    error = float(usual / self.expected.abs().max())
                else:
                    error = relative_error(logits, self.expected)
                if error >= tolerance and dtype != torch.float32:
                    tolerance = max(tolerance, 2 * self.half_error)  # a model that amplifies such roundings
                assert error < tolerance, (dtype, isa)

    def check_threads(self) -> None:
        """The logits do not depend on the number of threads."""
        model, results = self.model("native", torch.bfloat16), []
        for threads in (1, 2, 3):
            _C.set_num_threads(threads)
            results.append(prefill(model, self.ids))
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])

    # -- the config

    def check_spellings(self) -> None:
        """The config spellings of transformers 4 and 5 are read alike."""
        five = self.config_json
        if self.name == "olmo3-theta" or self.model_type.startswith(("gemma4", "laguna", "mellum")):
            return  # transformers 4 has a single theta for all layers, and not these families
        four = as_transformers_4(five)
        assert read_config(four) == read_config(five)

        given = config_fields(self.model_type, self.fields).keys()
        if "layer_types" in five and not {"layer_types", "sliding_window_pattern"} & given:
            del four["layer_types"]  # transformers 4 derived them from max_window_layers
            layers = range(five["num_hidden_layers"])
            old, new = read_config(four)[1], read_config(five)[1]
            assert [old.window(i) for i in layers] == [new.window(i) for i in layers]


def logits_of(runnable: ModelRunner, ids: Tensor) -> Tensor:
    """Returns the logits of `ids [45]`, fed as 30 tokens, then 14, then one."""
    runner = Runner(runnable, 1, PROMPT)
    return torch.cat([runner.step({0: part})[0] for part in ids.split([30, 14, 1])])


def assert_same_program(
    model: BaseModelForCausalLM,
    ids: Tensor,
    kv_dtype: torch.dtype | None = None,
    threads: Sequence[int | None] = (None,),
) -> None:
    """Checks that a recorded model, fused or not, has the same bits of logits and cache as the model run op by op. It
    is recorded once and runs with each number of `threads`; None leaves the number as it is."""
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
        assert all(map(same_bits, tensors_of(layer), tensors_of(other)))


def tensors_of(layer: LayerBlocks) -> list[Tensor]:
    """The memory of a layer's cache."""
    parts = vars(layer).values() if layer else ()
    return [part for part in parts if isinstance(part, Tensor)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True if shapes and bits are equal. Unlike in torch.equal, a NaN (in a position never written) equals itself."""
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
