"""Token masks: their bits, their forks, and values that are refused as masks."""

from __future__ import annotations

import pytest
import torch

from pace.llm.configs import SamplingConfig
from pace.llm.constraints.masks import AllowedTokens, TokenMask, fill_bits
from tests.llm.constraints.masks import Automaton, FunctionMask, random_allowed, with_mask
from tests.llm.speculation.drafters import make_generator


def test_bits_are_the_lowest_first() -> None:
    row = torch.full((3,), 77, dtype=torch.int32)
    fill_bits(row, [0, 1, 31, 33, 64])
    assert row.tolist() == [3 - 2**31, 2, 1]
    fill_bits(row, [])
    assert row.tolist() == [0, 0, 0]
    for beyond in ([96], [-1]):
        with pytest.raises(ValueError, match="a mask of 96 bits has no place for the token"):
            fill_bits(row, beyond)


def test_what_is_no_mask_is_told() -> None:
    for wrong in (5, "a", AllowedTokens, object(), [AllowedTokens([1])]):
        with pytest.raises(TypeError, match="token_mask must be a pace.llm.TokenMask"):
            SamplingConfig(token_mask=wrong)
    with pytest.raises(ValueError, match="name at least one"):
        AllowedTokens([])
    with pytest.raises(ValueError, match="no place for the token 5000"):
        make_generator().generate([1], with_mask(SamplingConfig(), AllowedTokens([5000])))
    for method, arguments in (("fill", (None,)), ("accept", (1,)), ("rollback", (1,)), ("count_allowed", ([1],))):
        with pytest.raises(NotImplementedError, match=f"TokenMask must define {method}"):
            getattr(TokenMask(), method)(*arguments)


def test_configs_with_one_mask_are_equal() -> None:
    config = with_mask(SamplingConfig(), AllowedTokens([1]))
    assert config == config.copy() == SamplingConfig().merge_from(config)


def test_forks_go_their_own_ways() -> None:
    for mask in (Automaton({0: {1: 1, 2: 0}, 1: {3: 0}}), FunctionMask(random_allowed(1)), AllowedTokens([1, 2, 3])):
        row, fresh, other = (torch.empty(2, dtype=torch.int32) for _ in range(3))
        mask.fill(fresh)
        twin = mask.fork()
        token = next(token for token in range(50) if mask.count_allowed([token]))
        twin.accept(token)
        mask.fill(row)
        assert torch.equal(row, fresh)
        twin.fill(other)
        twin.rollback(1)
        twin.fill(row)
        assert torch.equal(row, fresh)
