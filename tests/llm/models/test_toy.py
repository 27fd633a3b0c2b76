"""A model whose layers have different caches: its backends agree, and its cache has the right contents."""

from __future__ import annotations

import pytest
import torch

from pace import _C
from pace.batch import KVSpec, Positions
from pace.bench.costs import Costs
from pace.llm.clients.session import Session
from pace.llm.configs import SamplingConfig
from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.runners.eager import EagerRunner
from pace.llm.runners.program import ProgramRunner
from pace.ops import native, reference
from tests.llm.generators import check_idle
from tests.llm.models.toy import CONFIG, load_toy
from tests.support import Runner, isas_of_floats, prefill

pytestmark = pytest.mark.usefixtures("restore_isa_and_threads")

IDS = torch.randint(0, CONFIG.vocab_size, (70,), generator=torch.Generator().manual_seed(0))
CACHES = [torch.float32, torch.bfloat16, torch.int8]


def make(runner=ProgramRunner, kv_dtype=torch.float32, dtype=torch.float32):
    model = load_toy(dtype, native)
    model.kv_dtype = kv_dtype
    return runner(model)


def test_the_spec_is_what_the_layers_say() -> None:
    spec = make().kv_spec
    assert spec == KVSpec(
        (Positions(2, 12, 12, 7), None, Positions(3, 20, 33), Positions(1, 40, 9, 16), Positions(4, 16, 16)),
        torch.float32,
    )
    assert spec.position_bytes == 4 * (2 * (12 + 16) + 3 * (20 + 48) + (40 + 16) + 4 * 32)


@pytest.mark.parametrize("kv_dtype", CACHES)
@pytest.mark.parametrize("isa", isas_of_floats())
def test_program_and_op_by_op_are_the_same_bits_and_torch_agrees(isa, kv_dtype) -> None:
    _C.select_isa(isa)
    program, eager = make(ProgramRunner, kv_dtype), make(EagerRunner, kv_dtype)
    logits = prefill(program, IDS)
    assert logits.std() > 0.1 and torch.equal(logits, prefill(eager, IDS))
    torch_model = load_toy(torch.float32, reference)
    torch_model.kv_dtype = kv_dtype
    expected = prefill(torch_model, IDS)
    # With float caches the two differ by rounding sums of some hundred terms, through five layers. A narrow cache may
    # round a number between two of its values to either. The difference is half a unit of 2^-8 of the largest.
    tolerance = 2e-5 if kv_dtype == torch.float32 else 2e-2
    assert (logits - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("kv_dtype", CACHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_decode_is_the_full_forward(dtype, kv_dtype) -> None:
    model = make(ProgramRunner, kv_dtype, dtype)
    whole = prefill(model, IDS)
    for chunk in (1, 19):
        assert torch.equal(prefill(model, IDS, chunk), whole)
    runner = Runner(model, 3, len(IDS))
    runner.step({1: IDS[:40]})
    step = runner.step({2: IDS[:3], 1: IDS[40:], 0: IDS[:33]})
    assert torch.equal(step[1], whole[40:]) and torch.equal(step[0], whole[:33]) and torch.equal(step[2], whole[:3])


@pytest.mark.parametrize("kv_dtype", CACHES)
def test_reused_prefixes_and_forks_are_the_bits_of_fresh_texts(kv_dtype) -> None:
    model = make(ProgramRunner, kv_dtype)
    whole = prefill(model, IDS)
    engine = Engine.create(model, native, 64 * model.kv_spec.block_bytes, cache_options={"prefix_cache_bytes": None})
    generator = Generator(engine)
    ids, reused = IDS.tolist(), 0
    for length in (50, 70, 33):
        with Session(generator.driver) as session:
            rows = session.append(ids[:length], 5)
            assert torch.equal(rows, whole[length - 5 : length])
            reused += session._sequence.stats.num_reused
            with session.fork() as twin:
                assert torch.equal(twin.append([7, 8], "all"), prefill(model, torch.tensor([*ids[:length], 7, 8]))[-2:])
            assert torch.equal(session.append([9], "all"), prefill(model, torch.tensor([*ids[:length], 9]))[-1:])
    assert reused > 0
    out = generator.generate(ids[:20], SamplingConfig(max_new_tokens=30, ignore_eos=True))
    assert out.metrics.num_reused_tokens == 16
    check_idle(generator)


def test_the_layers_are_what_makes_the_logits() -> None:
    """Each option of the toy matters: without it the logits change."""
    expected = prefill(make(EagerRunner), IDS)

    def changed(change) -> bool:
        model = load_toy(torch.float32, native)
        change(model.layers)
        return not torch.equal(prefill(EagerRunner(model), IDS), expected)

    def of_mixer(index, name, value):
        return lambda layers: setattr(layers[index].mixer, name, value)

    def of_block(index, name, value):
        return lambda layers: setattr(layers[index], name, value)

    assert not changed(lambda layers: None)
    assert changed(of_mixer(0, "cache", Positions(2, 12, 12)))
    assert changed(of_mixer(2, "scale", 0.31)) and changed(of_mixer(2, "softcap", None))
    assert changed(of_mixer(3, "cache", Positions(1, 40, 9, 15)))
    assert changed(of_block(2, "branch_scale", 1.0)) and changed(of_block(3, "parallel", False))
    assert changed(of_block(4, "mixer_post_norm", None)) and changed(of_block(4, "mlp_post_norm", None))


def test_costs_count_each_layer_for_itself() -> None:
    costs = Costs.of(load_toy(torch.float32, native), torch.float32, torch.bfloat16)
    assert [layer.window for layer in costs.attention] == [7, None, 16, None]
    position = [2 * 2 * (12 + 16), 2 * 3 * (20 + 48), 2 * (40 + 16), 2 * 4 * 32]
    assert costs.kv_bytes_per_token == sum(position)
    assert costs.kv_bytes(10) == 7 * position[0] + 10 * sum(position[1:])
    pairs = [2 * 4 * 24, 2 * 6 * 53, 2 * 2 * 49, 2 * 4 * 32]
    assert costs.decode_attention_flops(10) == 7 * pairs[0] + 10 * sum(pairs[1:])
    assert costs.prefill_attention_flops(8) == (36 - 1) * pairs[0] + 36 * sum(pairs[1:])
