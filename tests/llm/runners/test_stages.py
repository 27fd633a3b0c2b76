"""Layers that share keys and values run only for tokens whose logits are wanted, with the bits of all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pace import _C
from pace.batch import ForwardBatch
from pace.llm.runners.program import ProgramRunner
from pace.ops import native
from tests.llm.models.variants import save_tiny
from tests.llm.models.visit import assert_same_cache
from tests.support import Runner, load_model

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("restore_isa_and_threads")

POSITIONS = 400
STEPS = [{0: 50, 1: 3}, {0: 1, 2: 300}, {1: 40, 0: 20}, {0: 1, 1: 1, 2: 1}, {2: 9}]


def last(batch: ForwardBatch) -> Tensor:
    return batch.spans.query_start[1:].long() - 1


def of_one_span(batch: ForwardBatch) -> Tensor:
    """The last two rows of the last span."""
    return last(batch)[-1:] + torch.arange(-1 if len(batch.tokens) > 1 else 0, 1)


def here_and_there(batch: ForwardBatch) -> Tensor:
    return torch.arange(0, len(batch.tokens), 3)


def none(batch: ForwardBatch) -> Tensor:
    return torch.empty(0, dtype=torch.int64)


class Wanting:
    """A runner that is asked for some rows of logits. Other rows are NaN."""

    def __init__(self, runner: ProgramRunner, wanted: Callable[[ForwardBatch], Tensor]):
        self.runner, self.wanted, self.kv_spec = runner, wanted, runner.kv_spec

    def forward(self, batch: ForwardBatch) -> Tensor:
        rows = self.wanted(batch)
        logits = torch.full((len(batch.tokens), self.runner.vocab_size), torch.nan)
        logits[rows] = self.runner.forward(replace(batch, logit_rows=rows))
        return logits


@pytest.mark.parametrize("threads", [1, 3])
def test_wanted_rows_have_the_bits_of_all_rows(tmp_path, threads):
    save_tiny(tmp_path, "gemma4_text", {"max_position_embeddings": POSITIONS, "sliding_window": 19})
    _C.set_num_threads(threads)
    ids = torch.randint(2, 99, (POSITIONS,), generator=torch.Generator().manual_seed(0))
    for dtype, kv_dtype in ((torch.bfloat16, torch.int8), (torch.float32, torch.float32)):
        model = load_model(tmp_path, dtype, native)
        model.kv_dtype = kv_dtype
        compiled, eager = ProgramRunner(model), Runner(model, 3, POSITIONS)
        runners = [
            Runner(Wanting(compiled, wanted), 3, POSITIONS) for wanted in (last, of_one_span, here_and_there, none)
        ]
        done = [0] * 3
        for counts in STEPS:
            step = {s: ids[done[s] : done[s] + count] for s, count in counts.items()}
            done = [begin + counts.get(s, 0) for s, begin in enumerate(done)]
            expected = torch.cat(list(eager.step(step).values()))
            found = [torch.cat(list(runner.step(step).values())) for runner in runners]
            for rows, runner in zip(found, runners):
                seen = ~rows[:, 0].isnan()
                assert torch.equal(rows[seen], expected[seen]), (counts, runner.model.wanted)
            assert found[0][-1].isfinite().all() and found[3].isnan().all()
        for runner in runners:
            assert_same_cache(runner.kv, eager.kv)


def test_a_prompt_runs_through_the_first_layers_only(tmp_path):
    save_tiny(tmp_path, "gemma4_text", {})
    compiled = ProgramRunner(load_model(tmp_path, torch.float32, native))
    runner = Runner(Wanting(compiled, none), 1, 40)
    runner.step({0: torch.arange(2, 32)})
    assert [len(program.instructions) for program in compiled.num_steps] == [
        len(compiled.num_steps.most_common()[0][0].instructions)
    ]
    assert compiled.program not in compiled.num_steps
