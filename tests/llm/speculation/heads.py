"""A fake draft head that is right whenever it gets the right rows, and engines with it."""

from __future__ import annotations

import torch

from pace.batch import BLOCK_SIZE, ForwardBatch
from pace.llm.cache.manager import CacheManager
from pace.llm.speculation.draft_head import DraftHead
from tests.llm.fake_model import OPS, FakeModel


class Target(FakeModel):
    """Keeps for each token the number of the text that ends with it."""

    def __init__(self, **options) -> None:
        super().__init__(**{"eos_bias": -50.0, **options})
        self.kept_width = 1


class FakeHead(FakeModel):
    """Has the logits of its target, for the text that a given row stands for and the token after it.

    Checks its own cache. It has the tokens of the text from the second one on. After the first blocks of them, some may
    be missing."""

    def __init__(self, target: Target, is_right=lambda text: True) -> None:
        """`is_right(text)` is False for texts after which it is wrong."""
        super().__init__(target.vocab_size)
        self.target, self.is_right = target, is_right
        self.model = self  # it is its own runner
        self.run_slice = None
        self.kept_width = self.given_width = 1
        self.sees_inputs = False
        self.num_read = 0

    def encode(self, run, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def to_target(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        self.num_read += len(batch.tokens)
        before = [self.target.texts[int(number)] for number in batch.given.rows[:, 0]]
        texts = [[*text, token] for text, token in zip(before, batch.tokens.tolist(), strict=True)]
        for rows, _, own in self.read(batch):
            self._check(own, texts[rows[-1]])
        for row, text in enumerate(texts):
            batch.kept[row, 0] = self.target._number_of(text)
        logits = [self._after(texts[row]) for row in batch.logit_rows.tolist()]
        return torch.stack(logits) if logits else torch.empty(0, self.vocab_size)

    def _after(self, text: list[int]) -> torch.Tensor:
        logits = self.target.logits_of(text)
        return logits if self.is_right(text) else logits.flip(0)

    @staticmethod
    def _check(own: list[int], text: list[int]) -> None:
        cuts = range(0, len(own), BLOCK_SIZE)
        is_cut = any(own[:cut] == text[1 : cut + 1] and own[cut:] == text[len(text) - len(own) + cut :] for cut in cuts)
        assert is_cut, f"the head has computed {own} of {text}"


def make_head(target: Target, num_blocks: int = 400, keeps_prefixes: bool = True, **options) -> DraftHead:
    head = FakeHead(target, **options)
    cache = CacheManager(
        head.kv_spec, num_blocks * head.kv_spec.block_bytes, prefix_cache_bytes=None if keeps_prefixes else 0
    )
    return DraftHead(head, OPS, cache, target.vocab_size, {}, {})
