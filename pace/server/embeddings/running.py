"""Runs tokenised texts in the model, a few steps' worth of each request at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import torch
from torch import Tensor

from pace.llm.encoding.embedder import TextTokens
from pace.llm.encoding.steps import MAX_TOKENS

PART_TOKENS = MAX_TOKENS
"""Tokens of one part of a request: those of a step."""
PARTS_AT_ONCE = 2
"""Parts of one request in the model: one that runs, and one that fills the next step. Between the parts of a large
request, other requests have their turns."""

Submit = Callable[[list[TextTokens]], Future[Tensor]]


async def run_in_parts(submit: Submit, texts: list[TextTokens]) -> Tensor:
    """Returns the rows of all texts, in order. If it is cancelled or one part fails, cancels the others."""
    running: deque[Future[Tensor]] = deque()
    rows: list[Tensor] = []
    try:
        for part in parts_of(texts):
            if len(running) == PARTS_AT_ONCE:
                rows.append(await _first(running))
            running.append(submit(part))
        while running:
            rows.append(await _first(running))
    finally:
        for future in running:  # at once: the future of an event loop would pass it on in the loop's next turn
            future.cancel()
    return torch.cat(rows)


def parts_of(texts: list[TextTokens]) -> Iterator[list[TextTokens]]:
    """Yields the texts in parts of at least PART_TOKENS tokens, except for the last."""
    part: list[TextTokens] = []
    num_tokens = 0
    for text in texts:
        part.append(text)
        num_tokens += len(text.tokens)
        if num_tokens >= PART_TOKENS:
            yield part
            part, num_tokens = [], 0
    if part:
        yield part


async def _first(running: deque[Future[Tensor]]) -> Tensor:
    """Waits for the first part, which stays in `running` until it is done."""
    rows = await asyncio.wrap_future(running[0])
    running.popleft()
    return rows
