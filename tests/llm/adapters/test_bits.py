"""The bits of a row depend only on its text and its own adapters. Neighbours, chunks, threads and other adapters that
are loaded do not matter."""

from __future__ import annotations

import pytest
import torch

from pace import _C
from pace.llm.runners.eager import EagerRunner
from pace.llm.runners.program import ProgramRunner
from pace.ops import native
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import sample
from tests.support import Runner, isas_of_floats, load_model

pytest.importorskip("peft")
from tests.llm.adapters.random_adapters import random_adapter
from tests.llm.adapters.test_families import FAMILIES, with_adapters

pytestmark = pytest.mark.usefixtures("restore_isa_and_threads")

ROUTES = {0: [(0, 1.0)], 2: [(1, 0.5), (0, -1.0)], 3: [(2, 1.0)], 5: [(0, 1.0)]}
"""Adapters of each sequence; the others have none."""
LENGTH = 41


def texts():
    return list(torch.randint(2, 99, (6, LENGTH), generator=torch.Generator().manual_seed(5)))


def alone(runner, s, **more):
    routes = {0: ROUTES[s]} if s in ROUTES else None
    runner = Runner(runner, 1, LENGTH, **more)
    return torch.cat([runner.step({0: part}, routes=routes)[0] for part in texts()[s].split([17, 1, 1, 22])])


def together(runner):
    """All sequences in ragged steps; each has another chunk in each step."""
    runner, found, done = Runner(runner, 6, LENGTH), {s: [] for s in range(6)}, [0] * 6
    for number in range(60):
        wanted = {s: min((1, 3, 16, 17, 1, 5)[(s + number) % 6], LENGTH - done[s]) for s in range(6)}
        step = {s: texts()[s][done[s] : done[s] + count] for s, count in wanted.items() if count}
        if not step:
            return {s: torch.cat(rows) for s, rows in found.items()}
        routes = {s: route for s, route in ROUTES.items() if s in step}
        for s, logits in runner.step(step, routes=routes or None).items():
            found[s].append(logits)
            done[s] += len(logits)
    raise AssertionError("too few steps")


def adapters_of(base):
    q_and_v = [name for name, _ in base.named_modules() if name.endswith(("q_proj", "v_proj"))]
    cases = [(1, None, 4), (2, None, 17), (3, q_and_v or None, 8), (4, None, 2)]
    return [random_adapter(base, seed, targets, r=rank)[1] for seed, targets, rank in cases]


@pytest.mark.parametrize("case", sample(FAMILIES, lambda case: case in FAMILIES[:3]), ids=lambda case: case[0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rows_are_their_own(case, dtype, tmp_path):
    base = save_tiny(tmp_path, *case)
    model = load_model(tmp_path, dtype, native)
    plain = ProgramRunner(model)
    first, *others = adapters_of(base)
    compiled = with_adapters(model, first, *others)
    _C.set_num_threads(1)
    expected = {s: alone(compiled, s) for s in range(6)}
    for s in (1, 4):
        assert torch.equal(expected[s], alone(plain, s)), "base rows have the bits of a model without adapters"
    assert torch.equal(expected[0], alone(with_adapters(model, first), 0)), "alone is as among several"
    for threads in (1, 2, 5):
        _C.set_num_threads(threads)
        ours = together(compiled)
        assert all(torch.equal(ours[s], expected[s]) for s in range(6)), threads
    for runner in (with_adapters(model, first, *others, kind=EagerRunner), unfused(model, first, *others)):
        ours = together(runner)
        assert all(torch.equal(ours[s], expected[s]) for s in range(6)), type(runner)


def unfused(model, *adapters):
    return with_adapters(model, *adapters, kind=lambda model: ProgramRunner(model, optimise=False))


@pytest.mark.parametrize("isa", isas_of_floats())
def test_on_every_table(isa, tmp_path):
    _C.select_isa(isa)
    base = save_tiny(tmp_path, "qwen3", {})
    model = load_model(tmp_path, torch.bfloat16, native)
    compiled = with_adapters(model, *adapters_of(base))
    expected, ours = {s: alone(compiled, s) for s in range(6)}, together(compiled)
    assert all(torch.equal(ours[s], expected[s]) for s in range(6))
    assert torch.equal(expected[1], alone(ProgramRunner(model), 1))


def test_sums_have_the_order_of_a_key_whatever_the_slots_are(tmp_path):
    base = save_tiny(tmp_path, "qwen3", {})
    model = load_model(tmp_path, torch.float32, native)
    first, second, third, _ = adapters_of(base)
    found = []
    for loaded in ((first, second, third), (third, second, first), (second, first)):
        text = Runner(with_adapters(model, *loaded), 1, LENGTH)
        route = [(loaded.index(first), 0.5), (loaded.index(second), -1.0)]
        found.append(text.step({0: texts()[0]}, routes={0: route})[0])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


class InTwo(ProgramRunner):
    """Computes the rows of the final norm, then their logits."""

    def forward(self, batch):
        return self.logits(self.final_rows(batch), batch.routing[batch.logit_rows])


def test_rows_of_the_final_norm_and_their_head_have_adapters(tmp_path):
    base = save_tiny(tmp_path, "qwen3", {})
    model = load_model(tmp_path, torch.bfloat16, native)
    adapters = [random_adapter(base, 1)[1], random_adapter(base, 2, ["lm_head", "q_proj"])[1]]
    found = []
    for kind in (ProgramRunner, InTwo, EagerRunner):
        text = Runner(with_adapters(model, *adapters, kind=kind), 2, LENGTH)
        found.append(text.step({0: texts()[0], 1: texts()[1]}, routes={0: [(0, 1.0), (1, 0.5)], 1: []}))
    for other in found[1:]:
        assert all(torch.equal(other[s], found[0][s]) for s in (0, 1))


def test_loading_and_unloading_between_steps_keeps_the_program(tmp_path):
    base = save_tiny(tmp_path, "qwen3", {})
    model = load_model(tmp_path, torch.float32, native)
    first, second, third, _ = adapters_of(base)
    runner = with_adapters(model, first, max_adapters=2)
    expected = {weights.name: alone(with_adapters(model, weights), 0) for weights in (first, second, third)}
    assert torch.equal(alone(runner, 0), expected[first.name])
    programs = [id(program) for program in runner._programs]
    for weights in (second, third, second, first):
        digest = runner.adapters.load(weights)
        slot = runner.adapters.route(((digest, 1.0),))[0][0]
        text = Runner(runner, 1, LENGTH)
        parts = [text.step({0: part}, routes={0: [(slot, 1.0)]})[0] for part in texts()[0].split([17, 1, 1, 22])]
        assert torch.equal(torch.cat(parts), expected[weights.name]), weights.name
        runner.adapters.unload(digest)
        runner.adapters.free(())
    assert programs == [id(program) for program in runner._programs]
