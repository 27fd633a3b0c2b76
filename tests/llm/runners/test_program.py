"""A recorded model, fused or not, has the same bits of logits and cache as the model run op by op.
tests/llm/models/visit.py checks this for every architecture."""

from __future__ import annotations

import sys
import threading

import pytest
import torch

from pace import _C
from pace.batch import ForwardBatch, Spans
from pace.llm.runners.program import ProgramRunner
from pace.ops import native
from tests.llm.models.variants import PROMPT, save_tiny
from tests.llm.models.visit import assert_same_cache, assert_same_program
from tests.support import Runner, exit_code_in_fork, isas_of_floats, load_model

pytestmark = pytest.mark.usefixtures("restore_isa_and_threads")

pytest.importorskip("transformers")


@pytest.mark.parametrize("isa", isas_of_floats())
@pytest.mark.parametrize(
    "model_type, fields",
    [("qwen3", {}), ("gptj", {}), ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 20})],
)
def test_the_same_bits_on_every_table(isa, model_type, fields, tmp_path):
    _C.select_isa(isa)
    save_tiny(tmp_path, model_type, fields)
    for dtype, kv_dtype in ((torch.bfloat16, None), (torch.float32, torch.int8)):
        assert_same_program(load_model(tmp_path, dtype, native), torch.arange(2, 2 + PROMPT), kv_dtype)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("threads", [1, 2, 5, 16])
def test_long_spans_short_spans_and_partitions_of_both(tmp_path, threads, kv_dtype):
    """Heads are prepared before attention if a span has many rows, or if its rows are split over threads.

    With few rows the tasks of attention prepare them. A task covers a whole span or a partition of 1024 positions, and
    a span may cross two partitions."""
    save_tiny(tmp_path, "qwen3", {"max_position_embeddings": 4096})
    model = load_model(tmp_path, torch.bfloat16, native)
    model.kv_dtype = kv_dtype
    ids = torch.randint(2, 99, (2400,), generator=torch.Generator().manual_seed(0))
    _C.set_num_threads(threads)
    eager, compiled = (Runner(m, 3, len(ids)) for m in (model, ProgramRunner(model)))
    steps = [{0: 2046, 1: 5}, {0: 1, 2: 300}, {0: 5, 1: 1}, {0: 1}, {0: 20}, {0: 1, 1: 1, 2: 1}]
    done = {s: 0 for s in range(3)}
    for counts in steps:
        step = {s: ids[done[s] : done[s] + count] for s, count in counts.items()}
        done |= {s: done[s] + count for s, count in counts.items()}
        ours, expected = compiled.step(step), eager.step(step)
        assert all(torch.equal(ours[s], expected[s]) for s in step), counts
    assert_same_cache(compiled.kv, eager.kv)


def up_to_the_last(positions):
    return positions[-1].expand(len(positions))


def before_and_after(positions):
    return torch.where(positions % 2 == 1, positions[-1], positions // 2)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_one_program_serves_steps_with_and_without_newest_positions(tmp_path, threads, kv_dtype):
    save_tiny(tmp_path, "qwen3", {"max_position_embeddings": 4096})
    model = load_model(tmp_path, torch.bfloat16, native)
    model.kv_dtype = kv_dtype
    ids = torch.randint(2, 99, (2200,), generator=torch.Generator().manual_seed(0))
    _C.set_num_threads(threads)
    steps = [
        ({0: 40, 1: 5}, up_to_the_last),
        ({0: 1, 1: 1}, None),
        ({1: 17, 2: 4}, before_and_after),
        ({0: 2009}, None),
        ({0: 1, 1: 1}, before_and_after),  # position 2050 sees up to 1025, two partitions without its own
        ({0: 9, 1: 100}, up_to_the_last),
        ({0: 1, 1: 1, 2: 1}, None),
    ]

    def outputs(runner):
        kv, done, logits = Runner(runner, 3, len(ids)), {s: 0 for s in range(3)}, []
        for counts, newest in steps:
            step = {s: ids[done[s] : done[s] + count] for s, count in counts.items()}
            done |= {s: done[s] + count for s, count in counts.items()}
            logits.append(kv.step(step, newest=newest))
        return kv.kv, logits

    expected_kv, expected = outputs(model)
    for optimise in (True, False):
        kv, found = outputs(ProgramRunner(model, optimise=optimise))
        for (counts, newest), ours, theirs in zip(steps, found, expected):
            assert all(torch.equal(ours[s], theirs[s]) for s in counts), (optimise, counts, newest)
        assert_same_cache(kv, expected_kv)


@pytest.fixture
def models(tmp_path):
    save_tiny(tmp_path, "qwen2", {})
    model = load_model(tmp_path, torch.bfloat16, native)
    return model, ProgramRunner(model)


def batch_of(model, tokens, logit_rows, slots=None, newest=None):
    count = len(tokens)
    blocks = -(-max(count, 1) // 16)
    spans = Spans(
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([count], dtype=torch.int32),
        torch.arange(blocks, dtype=torch.int32)[None],
        newest,
    )
    positions = torch.arange(count)
    slots = positions if slots is None else slots
    return ForwardBatch(
        tokens,
        positions,
        positions + 1,
        spans,
        slots,
        torch.tensor(logit_rows, dtype=torch.int64),
        model.kv_spec.allocate(blocks),
    )


def test_only_the_wanted_rows_get_logits(models):
    model, compiled = models
    tokens = torch.arange(2, 40)
    for rows in ([], [0], [37], [3, 4, 30], list(range(38))):
        batch = batch_of(model, tokens, rows)
        ours, expected = compiled.forward(batch), model.forward(batch)
        assert ours.shape == (len(rows), model.vocab_size) and torch.equal(ours, expected)


def test_threads_may_change_between_steps(models):
    model, compiled = models
    results = []
    for threads in (1, 3, 2, 1):
        _C.set_num_threads(threads)
        results += [compiled.forward(batch_of(model, torch.arange(2, 2 + n), [0, n - 1])) for n in (5, 30)]
    for result in results[2:]:
        assert any(torch.equal(result, first) for first in results[:2])


def test_a_refused_step_harms_nothing(models):
    model, compiled = models
    good = batch_of(model, torch.arange(2, 7), [4])
    expected = compiled.forward(good)
    with pytest.raises(ValueError, match="ids must be in 0..98; got 99 at index 2"):
        compiled.forward(batch_of(model, torch.tensor([2, 3, 99, 5, 6]), [4]))
    with pytest.raises(ValueError, match="slot 160 of token 4 is outside of the cache of 1 blocks"):
        compiled.forward(batch_of(model, torch.arange(2, 7), [4], torch.tensor([0, 1, 2, 3, 160])))
    with pytest.raises(ValueError, match="row 5 is wanted of 5"):
        compiled.forward(batch_of(model, torch.arange(2, 7), [5]))
    bad = batch_of(model, torch.arange(2, 7), [4], newest=torch.tensor([4, 4, 5, 4, 4], dtype=torch.int32))
    for layer in bad.kv:
        layer.k.fill_(7)
    with pytest.raises(ValueError, match="the newest position of token 2 is 5; it must be between 0 and 4"):
        compiled.forward(bad)
    assert all((layer.k == 7).all() for layer in bad.kv)  # nothing was stored
    assert torch.equal(compiled.forward(good), expected)


def test_threads_with_a_cache_each_do_not_mix_them_up(models):
    model, compiled = models
    wrong = []

    def run(count):
        batch = batch_of(model, torch.arange(2, 2 + count), [count - 1])
        expected = model.forward(batch)
        for _ in range(1000):
            for layer in batch.kv:
                layer.k.fill_(torch.nan)
            if not torch.equal(compiled.forward(batch), expected):
                wrong.append(count)

    threads = [threading.Thread(target=run, args=(count,)) for count in (5, 6, 7)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_children_forked_in_the_middle_of_a_step_can_run_it(models):
    model, compiled = models
    batch = batch_of(model, torch.arange(2, 40), [37])
    expected, stop = compiled.forward(batch), threading.Event()

    def run_on():
        own = batch_of(model, torch.arange(2, 40), [37])
        while not stop.is_set():
            compiled.forward(own)

    runner = threading.Thread(target=run_on)
    runner.start()
    try:
        for _ in range(10):
            assert exit_code_in_fork(lambda: torch.equal(compiled.forward(batch), expected)) == 0
    finally:
        stop.set()
        runner.join()


def test_a_layer_of_a_decode_step_has_five_barriers(models):
    model, compiled = models
    compiled.forward(batch_of(model, torch.tensor([5]), [0]))
    per_layer = ["qkv with its norm", "heads, cache and attention", "output", "gate and up with their norm", "down"]
    assert compiled.program.num_barriers == len(per_layer) * model.config.num_hidden_layers + len(
        ["embedding", "row", "head"]
    )


def test_without_fusions_every_operation_has_a_barrier(models):
    model, _ = models
    plain = ProgramRunner(model, optimise=False)
    plain.forward(batch_of(model, torch.tensor([5]), [0]))
    per_layer = ["norm", "qkv", "turn q", "turn k", "store", "attention", "output", "norm", "gate and up", "down"]
    outside = ["embedding", "row", "norm", "head"]
    assert plain.program.num_barriers == len(per_layer) * model.config.num_hidden_layers + len(outside)
    assert not any(getattr(i, "norm", None) or getattr(i, "preparation", None) for i in plain.program.instructions)


def test_timings_name_every_instruction_and_add_up(models):
    model, compiled = models
    compiled.program.set_profiling(True)
    for _ in range(3):
        compiled.forward(batch_of(model, torch.arange(2, 20), [17]))
    timings = compiled.program.timings()
    assert len(timings) == len(compiled.program.instructions)
    assert (
        all(runs == 3 and seconds >= 0 for _, runs, seconds in timings) and sum(seconds for *_, seconds in timings) > 0
    )
    compiled.program.set_profiling(False)
    compiled.forward(batch_of(model, torch.arange(2, 20), [17]))
    assert {runs for _, runs, _ in compiled.program.timings()} == {0}
