"""A model without weights whose logits depend on every token of the sequence, as read back from the cache.

It stores the token and its position as the key. So a wrong slot, a lost, shared or overwritten block, and a position
computed twice or never change the logits or raise at once. From a layer with a window it reads only the window.

A layer with a state stores a number that stands for all tokens so far. So a state that is read or written at the wrong
place is another text.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import numpy as np
import torch

from pace.batch import BLOCK_SIZE, ForwardBatch, KVSpec, Positions
from pace.llm.engine.engine import Engine
from pace.states import State, StateSlots, StateSpans
from tests.support import backend, backends

OPS = backend(backends()[-1])
LAYER = 2**16
"""Layer i adds i times this to the positions it stores, so that a key written by another layer is noticed."""


class FakeModel:
    """Has the `forward` that the engine calls. `hook` is called with each batch before anything else."""

    def __init__(
        self,
        vocab_size: int = 50,
        max_position_embeddings: int = 4096,
        eos_bias: float = 0.0,
        windows: tuple[int | None, ...] = (None, None),
        num_states: int = 0,
    ) -> None:
        """`windows`: one per layer of attention, None for a layer without one. `num_states` layers before them have a
        state."""
        self.vocab_size = vocab_size
        self.max_position_embeddings, self.length_field = max_position_embeddings, "max_position_embeddings"
        self.recompute_length: int | None = None
        self.towers: list = []
        self.whole_media = self.sees_beyond_windows = False
        self.stand_ins: dict[int, int] = {}
        self.kept_width = 0
        """1 for a model that keeps a row for each token: the number of the text that ends with it."""
        self.rope_regime = lambda length: 0
        self.eos_bias = eos_bias
        self.sharpness = 3.0
        states = (State(channels=2, kernel=2),) * num_states
        self.kv_spec = KVSpec(states + tuple(Positions(1, 2, 2, window) for window in windows), torch.float32)
        self.texts: list[tuple[int, ...]] = [()]
        """Texts that a state stands for, by number."""
        self._numbers_of_texts = {(): 0}
        self.seen = max_position_embeddings if None in windows or num_states else max(windows)
        """Number of last tokens that the logits depend on."""
        self.hook = lambda batch: None
        self.num_calls = 0
        self._positions = np.arange(max_position_embeddings + 1)
        self._busy = threading.Lock()

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        """Returns the logits after these tokens, fp32 `[V]`. A different sequence gives unrelated numbers."""
        unseen = max(0, len(tokens) - self.seen)
        seen = (*[0] * unseen, *tokens[unseen:]) if unseen else tuple(tokens)
        logits = _numbers(seen, self.vocab_size) * np.float32(self.sharpness)
        logits[0] += self.eos_bias
        return torch.from_numpy(logits)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        assert self._busy.acquire(blocking=False), "two threads in one step"
        try:
            self.hook(batch)
            self.num_calls += 1
            return self._forward(batch)
        finally:
            self._busy.release()

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = []
        wanted = batch.logit_rows.tolist()
        assert wanted == sorted(set(wanted))
        for rows, num_before, text in self.read(batch):
            logits += [self.logits_of(text[: num_before + row - rows.start + 1]) for row in wanted if row in rows]
            for row in rows if self.kept_width else ():
                batch.kept[row, 0] = self._number_of(text[: num_before + row - rows.start + 1])
        assert len(logits) == len(wanted)
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size)

    def read(self, batch: ForwardBatch) -> Iterator[tuple[range, int, list[int]]]:
        """Writes the step's tokens to the cache and the states, and reads the texts from them. Yields for each span its
        rows, the number of tokens before it, and its text."""
        spans, positions, tokens = batch.spans, batch.positions.numpy(), batch.tokens.numpy()
        starts, lengths = spans.query_start.tolist(), spans.kv_len.tolist()
        rope_lengths = batch.rope_lengths.numpy()
        assert starts[0] == 0 and starts[-1] == len(tokens) == len(positions) == len(batch.slots) == len(rope_lengths)
        slots = [slot for group in (batch, *batch.others) for slot in group.slots.tolist()]
        assert len(set(slots)) == len(slots), "two tokens share a slot"
        assert (rope_lengths > positions).all()
        layers, texts = [], []
        for number, (kv, layer) in enumerate(zip(batch.kv, self.kv_spec.layers)):
            if isinstance(kv, StateSlots):
                found = self._read_and_write(kv, batch.states, tokens.tolist(), number)
                assert texts in ([], found), "two layers have seen other texts"
                texts = found
                continue
            group, keys = batch.of_layer(kv), kv.k.numpy()
            blocks, rows = np.divmod(group.slots.numpy(), BLOCK_SIZE)
            keys[blocks, 0, 0, rows] = tokens
            keys[blocks, 0, 1, rows] = positions + LAYER * number
            layers.append((number, keys[:, 0], group.spans.block_table.numpy(), layer.window))
        for index, length in enumerate(lengths):
            begin, end = starts[index : index + 2]
            first = length - (end - begin)
            past = self._read_back(layers, index, first, length) if layers else texts[index]
            if texts:
                assert len(texts[index]) == length, f"a state has seen {len(texts[index])} tokens, not {length}"
                assert all(token in (0, seen) for token, seen in zip(past, texts[index])), (
                    "a state has seen other tokens"
                )
                past = texts[index]
            assert (positions[begin:end] == self._positions[first:length]).all()
            yield range(begin, end), first, past

    def _read_and_write(self, slots: StateSlots, spans: StateSpans, tokens: list[int], layer: int) -> list[list[int]]:
        """Does what `StateSpans` says, for one layer. Returns the text of each span."""
        numbers, journal = slots.inputs[:, 0, 0], slots.journal_inputs
        read, replay, write, certain, starts, mark_starts, mark_rows, mark_slots = (
            getattr(spans, name).tolist()
            for name in "read replay write certain query_start mark_start mark_rows mark_slots".split()
        )
        written = [*write, *mark_slots]
        assert len(set(written)) == len(written), f"two write one slot: {written}"
        others = [slot for slot, own in zip(read, write) if slot != own]
        assert not set(others) & set(written), f"a slot is read and written: {others}, {written}"
        texts = []
        for s in range(len(read)):
            text = []
            if read[s] >= 0:
                text += self.texts[int(numbers[read[s]]) - layer * LAYER]
                text += [int(journal[read[s], row, 0]) for row in range(replay[s])]
            new, before = tokens[starts[s] : starts[s + 1]], len(text)
            text += new
            assert (0 < certain[s] <= len(new)) and (replay[s] == 0 or read[s] >= 0)
            marks = slice(mark_starts[s], mark_starts[s + 1])
            rows = mark_rows[marks]
            assert rows == sorted(set(rows)) and all(0 < row <= certain[s] for row in rows)
            for row, slot in [(certain[s], write[s]), *zip(rows, mark_slots[marks])]:
                numbers[slot] = self._number_of(text[: before + row]) + layer * LAYER
            for row, token in enumerate(new[certain[s] :]):
                journal[write[s], row, 0] = token
            texts.append(text)
        return texts

    def _number_of(self, text: list[int]) -> int:
        key = tuple(text)
        if key not in self._numbers_of_texts:
            self._numbers_of_texts[key] = len(self.texts)
            self.texts.append(key)
        return self._numbers_of_texts[key]

    def _read_back(
        self, layers: list[tuple[int, np.ndarray, np.ndarray, int | None]], index: int, first: int, length: int
    ) -> list[int]:
        """Returns the tokens of a span's sequence, with 0 for those that no layer sees from position `first` on.
        `layers` holds the number, the keys `[blocks, 2, BLOCK_SIZE]`, the block tables and the window of each layer."""
        tokens = np.zeros(length, int)
        for number, keys, tables, window in layers:
            oldest = 0 if window is None else max(0, first - window + 1)
            blocks = tables[index, oldest // BLOCK_SIZE : -(-length // BLOCK_SIZE)]
            assert blocks.min() >= 0, "a block is gone that is still seen"
            skipped = oldest % BLOCK_SIZE
            seen, content = slice(skipped, skipped + length - oldest), keys[blocks]
            positions = content[:, 1].reshape(-1)[seen] - LAYER * number
            assert (positions == self._positions[oldest:length]).all(), f"positions in the cache: {positions}"
            tokens[oldest:] = content[:, 0].reshape(-1)[seen]
        return tokens.tolist()


@functools.lru_cache(maxsize=1 << 14)
def _numbers(tokens: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """Returns standard normal numbers `[V]`. Cached, because the model and the reference `greedy` need most sequences
    several times."""
    seed = np.array([len(tokens), *tokens], np.uint32)
    return np.random.default_rng(seed).standard_normal(vocab_size).astype(np.float32)


class FakeTokenizer:
    """Token i is the letter chr(97 + i % 26); token 0 ends a text and is special."""

    eos_token_id = 0
    pad_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 97 for letter in text]}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self(text)["input_ids"]

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(97 + token % 26)

    def decode(
        self, tokens: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = True
    ) -> str:
        return "".join(chr(97 + token % 26) for token in tokens if token or not skip_special_tokens)


def greedy(model: FakeModel, prompt: list[int], num_tokens: int, end_tokens: tuple[int, ...] = ()) -> list[int]:
    """Returns the greedy tokens by definition: without a cache or a batch."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model.logits_of(tokens).argmax()))
        if tokens[-1] in end_tokens:
            break
    return tokens[len(prompt) :]


def make_engine(
    num_blocks: int = 1000,
    windows: tuple[int | None, ...] = (None, None),
    num_states: int = 0,
    cache_options: dict | None = None,
    **limits: int,
) -> Engine:
    """Returns an engine on a fake model that never picks the end token."""
    model = FakeModel(eos_bias=-50.0, windows=windows, num_states=num_states)
    return engine_of(model, num_blocks, cache_options=cache_options, **limits)


def engine_of(
    model: FakeModel, num_blocks: int, num_slots: int = 100, kind: type[Engine] = Engine, **options
) -> Engine:
    """Returns an engine on `model` with a cache of `num_blocks` blocks, and `num_slots` slots if it has states.
    `options` are those of `Engine.create`."""
    cache_options = dict(options.pop("cache_options", None) or {})
    num_bytes = num_blocks * model.kv_spec.block_bytes
    if model.kv_spec.has_states:
        cache_options["num_slots"] = num_slots
        num_bytes += num_slots * model.kv_spec.slots(cache_options.get("max_drafts", 0)).slot_bytes
    return kind.create(model, OPS, num_bytes, cache_options=cache_options, **options)
