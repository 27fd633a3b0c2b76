"""Steps in which some sequences take rows of the final norm in place of logits, as embeddings of texts do."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from pace.batch import ForwardBatch
from pace.llm.sequence import RowStrategy, Span


def run_model(model: Any, batch: ForwardBatch, spans: list[Span]) -> Tensor:
    """Runs a step. Returns the logits `[R, V]` of the rows that spans want (`Span.num_rows`), and gives the rows of the
    final norm to the sequences that take those.

    The head runs for logits only. A strategy that raises fails its own sequence."""
    for span in spans:  # any() takes four times as long, in each step
        if span.sequence.takes_rows and span.num_wanted:
            return _run_with_rows(model, batch, spans)
    return model.forward(batch)


def _run_with_rows(model: Any, batch: ForwardBatch, spans: list[Span]) -> Tensor:
    rows, first = model.final_rows(batch), 0
    with_logits: list[int] = []
    for span in spans:
        end = first + span.num_wanted
        if not span.sequence.takes_rows:
            with_logits += range(first, end)
        elif end > first:
            _give(rows[first:end], span)
        first = end
    if not with_logits:
        return torch.empty(0, model.vocab_size)
    if batch.routing is None:
        return model.logits(rows[with_logits])
    return model.logits(rows[with_logits], batch.routing[batch.logit_rows[with_logits]])


def _give(rows: Tensor, span: Span) -> None:
    sequence = span.sequence
    try:
        if not rows.isfinite().all():
            raise ValueError(
                f"the model's rows are not finite (NaN or inf) within the first {span.end} tokens; the weights may be "
                "damaged, or the dtype too narrow: try dtype=float32"
            )
        cast(RowStrategy, sequence.strategy).take(rows, span)
    except Exception as error:
        sequence.fail(error)
