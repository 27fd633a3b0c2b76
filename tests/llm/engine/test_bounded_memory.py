"""A long text needs memory only for its keys and values. Activations and logits do not grow with its length."""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pace import memory
from pace.bench.shapes import RandomWeights
from pace.llm.clients import session
from pace.llm.clients.scoring import score
from pace.llm.clients.session import Session
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from pace.llm.models.model_list import read_config
from pace.llm.runners import make_runner
from pace.llm.sampling.sampler import Sampling
from pace.llm.sequence import Sequence
from pace.llm.text.stopping_criteria import StoppingCriteria
from pace.memory import resident_bytes
from pace.ops import native
from tests.llm.generators import check_idle

pytestmark = pytest.mark.alone

VOCAB, HIDDEN, INNER, LAYERS, HEADS, HEAD_DIM = 32000, 64, 4096, 2, 4, 16
STEP_TOKENS, STEP_ROWS = 512, 128
"""Limits of the scheduler: tokens and logit rows per step."""

ALLOCATOR_BYTES = 24 << 20
"""Allowance for token lists, block tables, and memory kept by Python, threads and the allocator. Activations of the
long text would take far more."""


@functools.cache
def engine() -> Engine:
    model_class, config = read_config(
        dict(
            architectures=["LlamaForCausalLM"],
            model_type="llama",
            vocab_size=VOCAB,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            max_position_embeddings=1 << 15,
            rms_norm_eps=1e-5,
            hidden_act="silu",
            rope_theta=1e4,
            tie_word_embeddings=True,
        )  # fmt: skip
    )
    model = model_class(config, torch.bfloat16, native)
    model.load_weights(RandomWeights(model))
    return Engine.create(make_runner(model, "native"), native, 64 << 20)


def text(length: int) -> list[int]:
    return torch.randint(VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()


@contextmanager
def driving() -> Iterator[EngineDriver]:
    """Lets a thread own the engine for a while. Elsewhere the tests step it by hand."""
    driver = EngineDriver(engine())
    try:
        yield driver
    finally:
        driver.close()


def generate(length: int) -> None:
    sequence = Sequence(text(length), Sampling(), StoppingCriteria(length + 4, []), length + 4)
    engine().submit([sequence])
    while not sequence.is_finished:
        engine().step()


def peak_growth(run: Callable[[], object]) -> int:
    """Returns the peak growth of resident memory during `run`, in bytes."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory freed by earlier tests must not be reused here
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pytest.skip("this system does not let a process count its peak memory anew")
    before = resident_bytes()
    result = run()  # kept until the peak is read
    growth = resident_bytes(peak=True) - before
    del result
    return growth


def activation_bytes(tokens: int) -> int:
    """Returns the largest size of a layer's activations in a step. These are the residual and the term added to it,
    queries, keys, values, attention's output, and the MLP's intermediate, all in fp32. Instruction sets with bf16
    products also need bf16 copies of their inputs."""
    return tokens * 6 * (4 * HIDDEN + 4 * HEADS * HEAD_DIM + INNER)


def test_a_prompt_of_16k_tokens_grows_by_its_keys_and_values() -> None:
    length, touched = 16_000, engine().cache.touched_bytes
    unbounded, bound = activation_bytes(length), activation_bytes(STEP_TOKENS)
    growth = peak_growth(lambda: generate(length))
    kv_bytes = engine().cache.touched_bytes - touched
    assert kv_bytes <= engine().cache.bytes_for(length + 4), f"{kv_bytes} bytes of cache"
    assert engine().model.program.buffer_bytes <= bound
    expected = kv_bytes + bound + ALLOCATOR_BYTES
    assert growth <= expected < unbounded / 4, f"{growth >> 20} MiB where at most {expected >> 20} were to come"


def test_scores_and_all_logits_of_a_long_text_need_few_rows_at_once() -> None:
    generate(STEP_TOKENS)  # creates buffers and threads
    length, row_bytes = 4000, 4 * VOCAB
    bound = STEP_ROWS * row_bytes + engine().cache.bytes_for(length) + activation_bytes(STEP_TOKENS) + ALLOCATOR_BYTES
    with driving() as driver:
        growth = peak_growth(lambda: score(driver, [text(length)]))
        assert growth <= bound < length * row_bytes / 4, f"{growth >> 20} MiB of at most {bound >> 20}"
        with Session(driver) as s:
            result_bytes = 2000 * row_bytes
            growth = peak_growth(lambda: s.append(text(2000), "all"))
            assert result_bytes <= growth <= result_bytes + bound, f"{growth >> 20} MiB for {result_bytes >> 20}"
        check_idle(driver)


def test_logits_that_memory_does_not_hold_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(session, "available_memory_bytes", lambda: 100 << 20)
    with driving() as driver, Session(driver) as s:
        with pytest.raises(
            MemoryError,
            match=r"1000 rows of logits take 122.1 MiB, but only 100.0 MiB of memory are free; .* or use score",
        ):
            s.append(text(1000), "all")
        assert len(s) == 0 and s.append(text(600), 600).shape == (600, VOCAB)


def test_a_step_whose_logits_find_no_memory_fails_alone(monkeypatch) -> None:
    def refuse(num_bytes: int, huge_pages: bool) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with driving() as driver:
        with monkeypatch.context() as patch:
            patch.setattr(memory, "reserve", refuse)
            patch.setattr(engine().model.program, "_pages", memory.ReusedPages())
            with pytest.raises(
                MemoryError, match=r"128 rows of logits take 15.6 MiB: Cannot allocate memory; score fewer"
            ):
                score(driver, [text(200)])
        assert score(driver, [text(200)])[0].shape == (199,)
        check_idle(driver)
