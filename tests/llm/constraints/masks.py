"""Token masks for tests: a small automaton, a mask computed by a function of the tokens, and models with that mask
built in."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import torch
from torch import Tensor

from pace.llm.configs import SamplingConfig
from pace.llm.constraints.masks import TokenMask, fill_bits
from tests.llm.fake_model import FakeModel

VOCAB = 50
Allowed = Callable[[tuple[int, ...]], frozenset[int]]
"""Function from the generated tokens to those that may follow; none if the text is complete."""


class FunctionMask(TokenMask):
    """Allows the tokens that a function of the generated tokens returns."""

    def __init__(self, allowed: Allowed, forces: bool = True, releases_gil: bool = False) -> None:
        self.allowed = allowed
        self.forces = forces
        self.releases_gil = releases_gil
        self.tokens: list[int] = []

    @property
    def is_finished(self) -> bool:
        return not self.allowed(tuple(self.tokens))

    def fill(self, row: Tensor) -> None:
        fill_bits(row, self.allowed(tuple(self.tokens)))

    def accept(self, token: int) -> None:
        if token not in self.allowed(tuple(self.tokens)):
            raise ValueError(f"{token} may not follow {self.tokens}")
        self.tokens.append(token)

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self.tokens)
        del self.tokens[len(self.tokens) - num_tokens :]

    def count_allowed(self, tokens: list[int]) -> int:
        for index, token in enumerate(tokens):
            if token not in self.allowed((*self.tokens, *tokens[:index])):
                return index
        return len(tokens)

    def forced(self) -> list[int]:
        tokens: list[int] = []
        while self.forces and len(tokens) < 20:
            allowed = self.allowed((*self.tokens, *tokens))
            if len(allowed) != 1:
                break
            tokens += allowed
        return tokens


def random_allowed(seed: int, vocab_size: int = VOCAB, share_forced: float = 0.5) -> Allowed:
    """Returns a random function: a share `share_forced` of texts allows a single token, the others at least two."""

    @functools.cache
    def allowed(tokens: tuple[int, ...]) -> frozenset[int]:
        chance = random.Random(hash((seed, *tokens)))
        count = 1 if chance.random() < share_forced else chance.randint(2, vocab_size)
        return frozenset(chance.sample(range(1, vocab_size), min(count, vocab_size - 1)))

    return allowed


class Automaton(TokenMask):
    """A deterministic automaton over tokens: `table[state][token]` is the next state. A state without an entry ends
    it."""

    def __init__(self, table: dict[int, dict[int, int]]) -> None:
        self.table = table
        self.states = [0]

    @property
    def is_finished(self) -> bool:
        return not self.table.get(self.states[-1])

    def fill(self, row: Tensor) -> None:
        fill_bits(row, self.table[self.states[-1]])

    def accept(self, token: int) -> None:
        if token not in self.table[self.states[-1]]:
            raise ValueError(f"the automaton has no way on with {token}")
        self.states.append(self.table[self.states[-1]][token])

    def rollback(self, num_tokens: int) -> None:
        del self.states[len(self.states) - num_tokens :]

    def _walk(self, tokens: list[int]) -> int:
        state, count = self.states[-1], 0
        for token in tokens:
            if token not in self.table.get(state, {}):
                break
            state, count = self.table[state][token], count + 1
        return count

    count_allowed = _walk

    def forced(self) -> list[int]:
        state, tokens = self.states[-1], []
        while len(self.table.get(state, {})) == 1:
            ((token, state),) = self.table[state].items()
            tokens.append(token)
        return tokens


class MaskedModel(FakeModel):
    """A `FakeModel` that sets the logits of tokens its mask does not allow to -inf, for one length of prompt. A plain
    model with the mask must generate the same tokens."""

    def __init__(self, allowed: Allowed, num_prompt_tokens: int, **fields) -> None:
        super().__init__(**fields)
        self.allowed = allowed
        self.num_prompt_tokens = num_prompt_tokens

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        logits = super().logits_of(tokens)
        if len(tokens) >= self.num_prompt_tokens:
            allowed = torch.tensor([*self.allowed(tuple(tokens[self.num_prompt_tokens :]))], dtype=torch.int64)
            return torch.full_like(logits, -torch.inf).index_copy_(0, allowed, logits[allowed])
        return logits


def with_mask(config: SamplingConfig, mask: TokenMask | None, num_tokens: int = 24) -> SamplingConfig:
    return config.copy().merge_from(SamplingConfig(max_new_tokens=num_tokens, token_mask=mask))
