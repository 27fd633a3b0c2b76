"""Converts spans to the flat tensors of one model call. Reuses the tensors if their shapes do not change."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from pace.batch import BLOCK_SIZE, NOT_FOUND, ForwardBatch, GivenRows, KVBlocks, LayerBlocks, Spans
from pace.llm.sequence import Sequence, Span
from pace.media.media import Media
from pace.states import StateSlots, StateSpans

_TABLE_STEP = 8
"""The block table's width grows in steps of this, so that decoding changes the shape every 128 tokens instead of every
16."""

Slots = list[tuple[int, float]]
"""Slot and weight of each adapter of a sequence."""


class BatchBuilder:
    """Builds the `ForwardBatch` of a list of spans. The tensors of a batch are overwritten by the next `build`."""

    def __init__(
        self,
        model: Any = None,
        rows_of: Callable[[Sequence, Media], Tensor] | None = None,
        kept_width: int = 0,
        given_width: int = 0,
    ) -> None:
        """`rows_of` returns the rows of a medium of a sequence, float32 `[num_tokens, W]`. `model` has the
        `angle_positions` of sequences with media, and `towers`. Without them, sequences have none. `kept_width`:
        columns of `ForwardBatch.kept`. With `given_width`, each token has a given row of that width, which the caller
        fills; media then only decide the positions of tokens."""
        self._model = model
        self._rows_of = rows_of
        self._kept_width = kept_width
        self._given_width = given_width
        self._stand_ins: Mapping[int, int] = {} if model is None else model.stand_ins
        self._shape: tuple[int, ...] = ()
        self._routed: tuple[list[tuple[int, Slots]], ForwardBatch, ForwardBatch] | None = None
        """Number of tokens and slots of the last spans that had adapters, their batch, and the batch with routing."""

    def build(self, spans: list[Span], kv: list[LayerBlocks]) -> ForwardBatch:
        ends = [span.end for span in spans]
        rows = [span.num_wanted for span in spans]
        num_tokens = sum(ends) - sum(span.start for span in spans)
        width = -(-max(ends) // (BLOCK_SIZE * _TABLE_STEP)) * _TABLE_STEP
        shape = (len(spans), num_tokens, sum(rows), width)
        if shape != self._shape:
            self._allocate(*shape, kv)
        self._largest.fill(NOT_FOUND)
        first = row = 0
        for index, (span, end, num_rows) in enumerate(zip(spans, ends, rows)):
            sequence, start = span.sequence, span.start
            self._fill(span, end, first)
            self._fill_places(index, start, end, first, sequence.block_table, self._block_table, self._slots)
            for blocks, places in zip(sequence.more_tables, self._others):
                self._fill_places(index, start, end, first, blocks, *places)
            first += end - start
            self._query_start[index + 1] = first
            self._kv_len[index] = end
            for logit_row in range(first - num_rows, first):
                self._logit_rows[row] = logit_row
                row += 1
        batch = self._batch
        if batch.states is not None:
            batch = self._with_states(spans, batch.states)
        for span in spans:
            if span.sequence.adapter:
                batch = self._with_routing(spans, batch)
                break
        if (self._rows_of or self._given_width) and any(span.sequence.media for span in spans):
            batch = self._with_media(spans, batch)
        return batch

    def _with_states(self, spans: list[Span], states: StateSpans) -> ForwardBatch:
        """The batch, with the slots that the spans' plans read and write."""
        marks: list[tuple[int, int]] = []
        for index, span in enumerate(spans):
            step = span.sequence.state.step
            assert step is not None, f"the cache has no plan for {span}"
            self._states[:, index] = step.read, step.replay, step.write, step.certain
            marks += step.marks
            self._mark_start[index + 1] = len(marks)
        if not marks:
            return self._batch
        rows, slots = torch.tensor(marks, dtype=torch.int32).t().contiguous()
        changes = {"states": replace(states, mark_rows=rows, mark_slots=slots)}
        others = tuple(replace(other, **changes) for other in self._batch.others)
        return replace(self._batch, **changes, others=others)

    def _with_routing(self, spans: list[Span], batch: ForwardBatch) -> ForwardBatch:
        """The batch, with the adapters of its tokens."""
        adapters = self._model.adapters
        wanted = [(span.end - span.start, adapters.route(span.sequence.adapter)) for span in spans]
        if self._routed and self._routed[0] == wanted and self._routed[1] is batch:
            return self._routed[2]
        per_row = max(len(slots) for _, slots in wanted)
        routing, first = np.zeros((sum(count for count, _ in wanted), 2 * per_row), dtype=np.float32), 0
        routing[:, :per_row] = -1
        for count, slots in wanted:
            for place, (slot, weight) in enumerate(slots):
                routing[first : first + count, place] = slot
                routing[first : first + count, per_row + place] = weight
            first += count
        routed = replace(batch, routing=torch.from_numpy(routing))
        self._routed = wanted, batch, routed
        return routed

    def _with_media(self, spans: list[Span], batch: ForwardBatch) -> ForwardBatch:
        """The batch, with the rows of the media that spans overlap, and the positions of their tokens. Rows of a tower
        end with zeros if another tower has wider ones. Without `rows_of`, it only gets positions."""
        rows, places, positions, seen, first = [], [], [], {}, 0
        for span in spans:
            start, end, media = span.start, span.end, span.sequence.media
            for placed in media if self._rows_of else ():
                begin, stop = max(start, placed.start), min(end, placed.end)
                if begin < stop:
                    row = begin - placed.start + placed.first
                    rows.append(self._rows_of(span.sequence, placed.media)[row : row + stop - begin])
                    places.append(np.arange(begin, stop) + first - start)
                    if placed.media.kind == "image":
                        seen[first + begin - start, first + stop - start] = placed
            positions.append(self._model.angle_positions(media, start, end))
            first += end - start
        changes: dict[str, Any] = {}
        if rows:
            width = max(tower.width for tower in self._model.towers)
            padded = [piece if piece.shape[1] == width else pad(piece, (0, width - piece.shape[1])) for piece in rows]
            changes["given"] = GivenRows(torch.cat(padded), torch.from_numpy(np.concatenate(places)))
        if positions[0] is not None:
            changes["angle_positions"] = torch.from_numpy(np.concatenate(positions, 1))
        if seen and self._model.whole_media:
            newest = batch.positions.to(torch.int32)
            oldest = newest.clone() if self._model.sees_beyond_windows else None
            for (begin, stop), placed in seen.items():
                newest[begin:stop] = placed.end - 1
                if oldest is not None:
                    oldest[begin:stop] = placed.start
            sight = {"newest": newest, "oldest": oldest}
            batch = replace(
                batch,
                spans=replace(batch.spans, **sight),
                others=tuple(replace(other, spans=replace(other.spans, **sight)) for other in batch.others),
            )
        others = tuple(replace(other, **changes) for other in batch.others)
        return replace(batch, **changes, others=others)

    def _fill(self, span: Span, end: int, first: int) -> None:
        """Writes the tokens of one span, starting at column `first`."""
        sequence, start = span.sequence, span.start
        if end - start == 1:
            token = sequence.tokens[start]
            self._tokens[first] = self._stand_ins.get(token, token)
            self._positions[first] = start
            self._rope_lengths[first] = max(sequence.rope_length, end)
            return
        columns = slice(first, first + end - start)
        positions = np.arange(start, end)
        tokens = sequence.tokens[start : start + span.num_tokens] + span.drafts
        if self._stand_ins:
            tokens = [self._stand_ins.get(token, token) for token in tokens]
        self._tokens[columns] = tokens
        self._positions[columns] = positions
        self._rope_lengths[columns] = np.maximum(positions + 1, sequence.rope_length)

    @staticmethod
    def _fill_places(
        index: int, start: int, end: int, first: int, blocks: array, block_table: np.ndarray, slots: np.ndarray
    ) -> None:
        """Writes one span's row of a group's block table, and its slots, for positions `start .. end - 1`."""
        table = np.frombuffer(blocks, dtype=np.intc)
        num_blocks = -(-end // BLOCK_SIZE)
        block_table[index, :num_blocks] = table[:num_blocks]
        if end - start == 1:
            slots[first] = blocks[start // BLOCK_SIZE] * BLOCK_SIZE + start % BLOCK_SIZE
            return
        positions = np.arange(start, end)
        slots[first : first + end - start] = (
            table[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
        )

    def _allocate(self, num_spans: int, num_tokens: int, num_rows: int, width: int, kv: list[LayerBlocks]) -> None:
        """Allocates arrays, and a batch whose tensors share their memory."""
        self._shape = ()  # until all are allocated, which may fail
        self._tokens, self._positions, self._rope_lengths, self._slots = np.zeros((4, num_tokens), dtype=np.int64)
        self._logit_rows, self._largest = np.zeros((2, num_rows), dtype=np.int64)
        self._query_start = np.zeros(num_spans + 1, dtype=np.int32)
        self._kv_len = np.zeros(num_spans, dtype=np.int32)
        self._block_table = np.zeros((num_spans, width), dtype=np.int32)
        num_others = max((layer.group for layer in kv if isinstance(layer, KVBlocks)), default=0)
        self._others = [
            (np.zeros((num_spans, width), dtype=np.int32), np.zeros(num_tokens, dtype=np.int64))
            for _ in range(num_others)
        ]
        tensor = torch.from_numpy
        states = None
        if any(isinstance(layer, StateSlots) for layer in kv):
            self._states = np.zeros((4, num_spans), dtype=np.int32)
            self._mark_start = np.zeros(num_spans + 1, dtype=np.int32)
            no_marks = torch.empty(0, dtype=torch.int32)
            parts = map(tensor, (self._query_start, *self._states, self._mark_start))
            states = StateSpans(*parts, mark_rows=no_marks, mark_slots=no_marks)
        given = None
        if self._given_width:
            given = GivenRows(torch.empty(num_tokens, self._given_width), torch.arange(num_tokens))
        batch = ForwardBatch(
            tokens=tensor(self._tokens),
            positions=tensor(self._positions),
            rope_lengths=tensor(self._rope_lengths),
            spans=Spans(tensor(self._query_start), tensor(self._kv_len), tensor(self._block_table)),
            slots=tensor(self._slots),
            logit_rows=tensor(self._logit_rows),
            kv=kv,
            given=given,
            kept=torch.empty(num_tokens, self._kept_width) if self._kept_width else None,
            states=states,
            largest=tensor(self._largest),
        )
        others = (
            replace(batch, spans=replace(batch.spans, block_table=tensor(table)), slots=tensor(slots))
            for table, slots in self._others
        )
        self._batch = replace(batch, others=tuple(others))
        self._shape = (num_spans, num_tokens, num_rows, width)
