"""Drafts from a small model that sees the target's own keys and values: the assistant of Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pace.batch import BLOCK_SIZE, ForwardBatch, GivenRows, KVBlocks, LayerBlocks, Spans
from pace.llm.engine.drafter import DraftMemory
from pace.llm.sequence import Sequence, Span
from pace.llm.speculation.draft_writer import DraftWriter


class LastRow(NamedTuple):
    """The target's row of a token, the last one that is computed."""

    at: int
    """Index of the token."""
    row: Tensor
    """float32 `[W]`."""


class DraftAssistant(DraftWriter):
    """`DraftSource` whose model has no cache: each of its layers sees the keys and values of one of the target's.

    A first draft follows from the last token, which the target has not computed yet, and the target's row of the token
    before it. Further drafts follow from the draft before and the model's own row. All are computed at the position of
    the last token, and see the positions before it. So only one row of each sequence is kept between steps."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """The arguments of `DraftWriter`."""
        super().__init__(*arguments, **named)
        self._rows: dict[Sequence, LastRow] = {}
        self._target_kv: list[LayerBlocks] | None = None
        """The target's cache, by layer of the target."""
        self._kv: list[LayerBlocks] = []
        """The same, by layer of this model."""

    # -- calls of the drafter ------------------------------------------------------------------------------------------

    def kind(self, sequence: Sequence, most: int) -> int | None:
        """Returns 0, the only kind; None if the target's row is missing."""
        last = self._rows.get(sequence)
        return 0 if last is not None and last.at == len(sequence.tokens) - 2 else None

    def propose(
        self, sequences: list[Sequence], lengths: list[int], kv: list[LayerBlocks] | None = None
    ) -> list[list[int]]:
        assert kv is not None, "an assistant sees the target's cache"
        if kv is not self._target_kv:
            self._target_kv, self._kv = kv, [kv[layer] for layer in self.model.model.target_layers]
        self._spent = 0.0
        proposals: list[list[int]] = [[] for _ in sequences]
        live = [index for index, length in enumerate(lengths) if length]
        last = {index: (sequences[index].tokens[-1], self._rows[sequences[index]].row) for index in live}
        batch, depth = None, 0
        while live:
            if batch is None or len(batch.tokens) > len(live):
                batch = self._batch([sequences[index] for index in live])
            batch.tokens.copy_(torch.tensor([last[index][0] for index in live]))
            torch.stack([last[index][1] for index in live], out=batch.given.rows)
            logits = self._forward(batch)
            for row, (index, largest) in enumerate(zip(live, self.ops.argmax(logits).tolist())):
                token = self._pick(sequences[index], logits[row], largest, depth)
                if token is not None:
                    proposals[index].append(token)
                    last[index] = token, batch.kept[row]
            depth += 1
            live = [index for index in live if len(proposals[index]) == depth < lengths[index]]
        return proposals

    def observe(self, spans: list[Span], outcomes: list[list[int]], kept: Tensor) -> None:
        first = 0
        for span, tokens in zip(spans, outcomes):
            sequence = span.sequence
            if tokens and sequence.strategy.takes_drafts and not sequence.is_finished:
                at = len(sequence.tokens) - 2
                if at >= span.start + span.num_tokens - 1 + span.num_certain:  # else the target has no row of it
                    self._rows[sequence] = LastRow(at, kept[first + at - span.start].clone())
            first += span.end - span.start
        if len(self._rows) > 2 * len(spans) + 16:
            self._forget_finished()

    def settle(self, sequence: Sequence, num_valid: int) -> None:
        pass

    def forget(self, sequence: Sequence) -> None:
        self._rows.pop(sequence, None)

    def reset(self) -> None:
        self._rows.clear()

    def check_integrity(self) -> None:
        self._forget_finished()

    def _forget_finished(self) -> None:
        """Drops the rows of sequences that were aborted before they drafted."""
        for sequence in [sequence for sequence in self._rows if sequence.is_finished]:
            self.forget(sequence)

    def bytes_for(self, num_tokens: int) -> int:
        return 0

    def memory(self) -> DraftMemory:
        return DraftMemory(self._weights, self._weight_counts)

    # -- the model -----------------------------------------------------------------------------------------------------

    def _forward(self, batch: ForwardBatch) -> Tensor:
        """Returns logits `[S, V]` of the target's vocabulary."""
        begin = self._clock()
        logits = self._of_target(self.model.model.to_target(self.model.forward(batch)))
        self._spent += self.costs.add(len(batch.tokens), self._clock() - begin)
        return logits

    def _batch(self, sequences: list[Sequence]) -> ForwardBatch:
        """A step with one token of each sequence, whose tokens and given rows are still to be filled. It is rotated to
        the position of the last token, and sees what comes before: the tables end there."""
        lengths = np.array([len(sequence.tokens) - 1 for sequence in sequences])
        num_blocks, count = -(-lengths // BLOCK_SIZE), len(sequences)
        num_groups = 1 + max(blocks.group for blocks in self._kv if isinstance(blocks, KVBlocks))
        tables = np.zeros((num_groups, count, int(num_blocks.max())), dtype=np.int32)
        for index, sequence in enumerate(sequences):
            for table, blocks in zip(tables, sequence.block_tables):
                table[index, : num_blocks[index]] = blocks[: num_blocks[index]]
        width = self.model.kept_width
        starts, seen = torch.arange(count + 1, dtype=torch.int32), torch.from_numpy(lengths.astype(np.int32))
        first, *others = [Spans(starts, seen, torch.from_numpy(table)) for table in tables]
        batch = ForwardBatch(
            tokens=torch.zeros(count, dtype=torch.int64),
            positions=torch.from_numpy(lengths),
            rope_lengths=torch.from_numpy(lengths + 1),
            spans=first,
            slots=torch.zeros(count, dtype=torch.int64),
            logit_rows=torch.arange(count),
            kv=self._kv,
            given=GivenRows(torch.empty(count, width), torch.arange(count)),
            kept=torch.empty(count, width),
        )
        return replace(batch, others=tuple(replace(batch, spans=spans) for spans in others))
