"""Models with states on the kernels. Slots, marks, journals and forks change no bit of logits or texts."""

from __future__ import annotations

import pytest
import torch

from pace.llm.engine.engine import Engine
from pace.llm.generator import Generator
from pace.llm.runners import make_runner
from pace.llm.speculation.draft_length import FixedLength
from pace.llm.speculation.drafter import SpeculativeDrafter
from pace.llm.speculation.prompt_lookup import PromptLookup
from pace.ops import native
from tests.llm.cache.test_window_models import check_competition, check_sessions, text
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import sample
from tests.support import load_model

pytest.importorskip("transformers")

STEP, POSITIONS, MAX_DRAFTS = 24, 512, 5
MODELS = ("lfm2", "qwen3_5_text", "granitemoehybrid", "mamba2", "falcon_h1")


@pytest.fixture(scope="module", params=sample(MODELS, lambda name: name == "qwen3_5_text"))
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny(folder, request.param, {} if request.param == "mamba2" else {"max_position_embeddings": POSITIONS})
    return folder


def generator(folder, backend="native", num_blocks=400, num_slots=60, drafter=None, **options) -> Generator:
    """Returns a generator with this room in its cache, by default plenty."""
    model = load_model(folder, torch.float32, native)
    options |= {"max_drafts": MAX_DRAFTS, "num_slots": num_slots}
    num_bytes = num_blocks * model.kv_spec.block_bytes + num_slots * model.kv_spec.slots(MAX_DRAFTS).slot_bytes
    runner = make_runner(model, backend)
    return Generator(Engine.create(runner, native, num_bytes, drafter, cache_options=options, max_tokens_per_step=STEP))


def test_logits_of_sessions_that_grow_are_cut_back_and_forked(checkpoint) -> None:
    generators = [generator(checkpoint, **options) for options in ({}, {"prefix_cache_bytes": None})]
    check_sessions(generators, 110, 70, (112, 105, 64, 50), used_bytes=None)


def test_texts_that_compete_for_slots(checkpoint) -> None:
    """One of the small pools runs op by op, with the same bits as the program."""
    prompts = [text(length, length) for length in (90, 17)] + [text(90, 90)[:70] + text(9), text(4) * 12]
    drafter = SpeculativeDrafter(PromptLookup(1, 3), FixedLength(MAX_DRAFTS), MAX_DRAFTS)
    small = [
        generator(checkpoint, "native", 40, 3, prefix_cache_bytes=0, drafter=drafter),
        generator(checkpoint, "native-eager", 40, 9, prefix_cache_bytes=None),
    ]
    check_competition(generator(checkpoint), small, prompts, (20, 12, 9), used_bytes=None)
