"""Sampling operations on rows of logits, on the C++ kernels (csrc/kernels/sampling.inl). Logits are float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pace import _C
from pace.ops.checks import check_rows, check_vector, describe
from pace.ops.draws import RULES_DTYPE, Drawn, Draws


def argmax(logits: Tensor) -> Tensor:
    rows, vocab_size = _check_logits(logits)
    indices = torch.empty(rows, dtype=torch.int64)
    _C.argmax(logits.data_ptr(), logits.stride(0), rows, vocab_size, indices.data_ptr())
    return indices


def apply_mask_(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    num_rows, vocab_size = _check_logits(logits)
    num_masks = num_rows if rows is None else len(rows)
    _check_masks("mask", mask, num_masks, vocab_size)
    rows_address = 0
    if rows is not None:
        rows_address = check_vector("rows", rows, num_masks, torch.int64)
        named = rows.tolist()
        if named and (min(named) < 0 or max(named) >= num_rows or len(set(named)) < num_masks):
            raise ValueError(f"rows must name different rows of the {num_rows} there are; got {named}")
    _C.apply_mask(
        logits.data_ptr(), logits.stride(0), vocab_size, mask.data_ptr(), mask.stride(0), num_masks, rows_address
    )


def sample(logits: Tensor, draws: Draws) -> Drawn:
    """Draws a token for each of `draws`, from row `draws.rows[m]` of `logits [R, V]`, which may be edited during the
    call. `pace.ops.reference.sample` is the definition.

    Numerics: with top_k weights are fp64; else fp32, summed in fp32 over 4096 tokens and in fp64 over those sums."""
    num_rows, vocab_size = _check_logits(logits)
    count = len(draws.rows)
    rows_address = check_vector("rows", draws.rows, count, torch.int64)
    uniform_address = check_vector("uniform", draws.uniform, count, torch.float64)
    rules = draws.rules
    if rules.dtype != RULES_DTYPE or rules.shape != (count,) or not rules.flags.c_contiguous:
        raise ValueError(
            f"rules must be a contiguous array of {count} RULES_DTYPE; got {rules.dtype} {list(rules.shape)}"
        )
    _check_rows(draws.rows, num_rows)
    ends, lists = (None, None) if draws.edits is None else _lists_of(draws, count)
    masks = _masks_of(draws, count, vocab_size)
    max_top, wanted = 0, draws.num_top is not None
    if wanted:
        num_top_address = check_vector("num_top", draws.num_top, count, torch.int64)
        max_top = max(0, int(draws.num_top.max())) if count else 0
    shape = (count if wanted else 0, max_top)
    drawn = Drawn(
        torch.empty(count, dtype=torch.int64),
        torch.full(shape[:1], -math.inf),
        torch.full(shape, -1, dtype=torch.int64),
        torch.full(shape, -math.inf),
    )
    _C.sample(
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        count,
        rows_address,
        rules.ctypes.data,
        RULES_DTYPE.itemsize,
        uniform_address,
        0 if ends is None else ends.data_ptr(),
        0 if lists is None else lists.data_ptr(),
        *masks,
        drawn.tokens.data_ptr(),
        num_top_address if wanted else 0,
        max_top,
        drawn.logprobs.data_ptr(),
        drawn.top_tokens.data_ptr(),
        drawn.top_logprobs.data_ptr(),
    )
    return drawn


def _lists_of(draws: Draws, count: int) -> tuple[Tensor, Tensor]:
    """Returns the index in the lists at which each draw's edits end, int64 `[M]`, and the address and length of each
    list, `[L, 2]`."""
    if len(draws.edits) != count:
        raise ValueError(f"edits must be a list for each of {count} draws; got {len(draws.edits)}")
    if len(set(draws.rows.tolist())) < count:
        raise ValueError(f"a row with edits is drawn from once; got rows {draws.rows.tolist()}")
    ends, lists = [], []
    for edits in draws.edits:
        for one in edits:
            lists += (one.address, len(one))
        ends.append(len(lists) // 2)
    return torch.tensor(ends, dtype=torch.int64), torch.tensor(lists, dtype=torch.int64)


def _masks_of(draws: Draws, count: int, vocab_size: int) -> tuple[int, int, int]:
    """Returns the address of the masks, the words between them, and the address of each draw's mask index."""
    if (draws.masks is None) != (draws.mask_rows is None):
        raise ValueError("masks and mask_rows come together")
    if draws.masks is None:
        return 0, 0, 0
    num_masks = len(draws.masks)
    _check_masks("masks", draws.masks, num_masks, vocab_size)
    address = check_vector("mask_rows", draws.mask_rows, count, torch.int64)
    if count and not -1 <= int(draws.mask_rows.min()) <= int(draws.mask_rows.max()) < num_masks:
        raise ValueError(f"mask_rows must be in -1..{num_masks - 1}; got {draws.mask_rows.tolist()}")
    return draws.masks.data_ptr(), draws.masks.stride(0), address


def _check_masks(name: str, masks: Tensor, num_masks: int, vocab_size: int) -> None:
    num_words = -(-vocab_size // 32)
    if masks.dtype != torch.int32 or masks.shape != (num_masks, num_words) or (masks.stride(1) != 1 and num_words > 1):
        raise ValueError(
            f"{name} must be int32 [{num_masks}, {num_words}] with contiguous rows, a bit for each of {vocab_size} "
            f"tokens; got {describe(masks)}"
        )


def token_logprobs(logits: Tensor, rows: Tensor, tokens: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows, vocab_size = _check_logits(logits)
    count = len(rows)
    rows_address = check_vector("rows", rows, count, torch.int64)
    tokens_address = check_vector("tokens", tokens, count, torch.int64)
    _check_rows(rows, num_rows)
    if count and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
        raise ValueError(f"tokens must be in 0..{vocab_size - 1}; got {tokens.tolist()}")
    if num_top < 0:
        raise ValueError(f"num_top must be at least 0; got {num_top}")
    values = torch.empty(count)
    top_tokens, top_values = torch.empty(count, num_top, dtype=torch.int64), torch.empty(count, num_top)
    _C.logprobs(
        logits.data_ptr(),
        logits.stride(0),
        vocab_size,
        count,
        num_top,
        rows_address,
        tokens_address,
        values.data_ptr(),
        top_tokens.data_ptr(),
        top_values.data_ptr(),
    )
    return values, top_tokens, top_values


def _check_rows(rows: Tensor, num_rows: int) -> None:
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
        raise ValueError(f"rows must be in 0..{num_rows - 1}; got {rows.tolist()}")


def _check_logits(logits: Tensor) -> tuple[int, int]:
    rows, vocab_size = check_rows("logits", logits)
    if not 1 <= vocab_size < 2**31:
        raise ValueError(f"a row of logits has 1 to 2**31 - 1 words; got {vocab_size}")
    return rows, vocab_size
