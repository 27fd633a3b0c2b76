"""Drawing tokens: the kernel matches the reference for each row separately, for distributions of every shape."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pace.ops import native, reference
from pace.ops.draws import RULES_DTYPE, Draws, Edits
from pace.ops.reference_parts.sampling import top_k_top_p_
from pace.ops.rules import Rules
from tests.ops.isas import each_isa, on_each_isa
from tests.plugins.tiers import quarter

RULES = {
    "plain": {}, "largest": dict(temperature=0.0), "cooler": dict(temperature=0.7), "hotter": dict(temperature=1.9),
    "top_k": dict(top_k=20), "top_k of one": dict(top_k=1, temperature=0.3),
    "top_k, cooler": dict(top_k=40, temperature=0.6), "top_p": dict(top_p=0.9),
    "top_p, hotter": dict(top_p=0.5, temperature=3.0), "top_p of nothing": dict(top_p=0.0),
    "top_k and top_p": dict(top_k=50, top_p=0.8, temperature=0.8), "min_p": dict(min_p=0.05),
    "min_p of one": dict(min_p=1.0), "top_k and min_p": dict(top_k=100, min_p=0.1), "typical_p": dict(typical_p=0.6),
    "top_k and typical_p": dict(top_k=100, typical_p=0.5), "top_p and min_p": dict(top_p=0.9, min_p=0.2),
    "top_p and a lower min_p": dict(top_p=0.5, min_p=0.01), "min_p and typical_p": dict(min_p=0.1, typical_p=0.7),
    "top_p of nearly all": dict(top_p=0.99999), "typical_p of little": dict(typical_p=0.02),
    "all": dict(temperature=1.3, top_p=0.95, min_p=0.001, typical_p=0.9),
    "all of few": dict(temperature=1.3, top_k=200, top_p=0.95, min_p=0.01, typical_p=0.9),
}  # fmt: skip


def peaked(rows: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """Logits like a trained model's: few tokens have nearly all of the mass."""
    logits = torch.randn(rows, n, generator=generator) - 8.0
    logits[:, :: max(1, n // 7)] += 8.0 * torch.rand(1, generator=generator) + 6.0
    return logits


def misleading(rows: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """Logits with small values at the 128 places of 16 elements from which a kernel may take a sample."""
    logits = 2.0 * torch.randn(rows, n, generator=generator)
    if n > 4096:
        places = torch.arange(128) * (n - 16) // 127
        logits[:, places[:, None] + torch.arange(16)] = 0.1 * torch.randn(rows, 128, 16, generator=generator) - 2.0
    return logits


DISTRIBUTIONS = {
    "flat": lambda rows, n, generator: 0.02 * torch.randn(rows, n, generator=generator),
    "bell": lambda rows, n, generator: 3.0 * torch.randn(rows, n, generator=generator), "peaked": peaked,
    "rising": lambda rows, n, generator: torch.linspace(-6.0, 6.0, n).repeat(rows, 1),
    "falling": lambda rows, n, generator: torch.linspace(6.0, -6.0, n).repeat(rows, 1),
    "cluster": lambda rows, n, generator: torch.randn(rows, n, generator=generator).index_add_(1, torch.arange(n // 3,
      min(n, n // 3 + 20)), torch.full((rows, min(n, n // 3 + 20) - n // 3), 9.0)),
    "tiny": lambda rows, n, generator: 1e-36 * torch.randn(rows, n, generator=generator),
    "huge": lambda rows, n, generator: 1e30 * torch.randn(rows, n, generator=generator), "misleading": misleading,
    "equal": lambda rows, n, generator: torch.full((rows, n), 2.5),
    "steps": lambda rows, n, generator: torch.randn(rows, n, generator=generator).round(),
    "masked": lambda rows, n, generator: torch.where(torch.rand(rows, n, generator=generator) < 0.9,
      -math.inf, torch.randn(rows, n, generator=generator)).index_fill_(1, torch.tensor([n // 2]), 0.5),
}  # fmt: skip


def make_draws(rows: torch.Tensor, uniform: torch.Tensor, **rules: float) -> Draws:
    return Draws(rows=rows, rules=np.array([Rules(**rules)] * len(rows), RULES_DTYPE), uniform=uniform.double())


@functools.cache
def drawn_from(distribution: str, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[4, n]`, which a test must not change, and 6 places to draw at."""
    generator = torch.Generator().manual_seed(n)
    return DISTRIBUTIONS[distribution](4, n, generator), torch.rand(6, generator=generator)


@pytest.mark.parametrize("rules", RULES)
def test_tokens_are_those_of_the_definition(rules: str) -> None:
    """Every other distribution also in one of the two sizes beyond 4096, in turn. Four commits have both sizes of
    all."""
    for number, name in enumerate(DISTRIBUTIONS, list(RULES).index(rules) + quarter()):
        for n in (1, 15, 17, 100, *([4097], [], [9001], [])[number % 4]):
            compare(*drawn_from(name, n), f"{name}, {n}", **RULES[rules])


def test_cuts_between_limits_that_a_sample_tells() -> None:
    """The row has many logits that are equal, also at the cut. The first of them are kept."""
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(4, 12_001, generator=generator).round(decimals=2)
    for rules in (dict(top_p=0.9), dict(top_p=0.95, temperature=0.8, typical_p=0.9), dict(typical_p=0.7)):
        compare(logits, torch.rand(6, generator=generator), str(rules), **rules)


def compare(logits: torch.Tensor, places: torch.Tensor, case: str, **rules: float) -> None:
    rows = torch.tensor([3, 0, 1, 1, 2, 0])
    draws = make_draws(rows, places, **rules)
    given = logits.clone()
    expected = reference.sample(logits.clone(), draws).tokens
    for isa in each_isa():
        tokens = native.sample(logits, draws).tokens
        assert torch.equal(logits, given), (case, isa)
        for row, token, other, place in zip(rows, tokens.tolist(), expected.tolist(), draws.uniform.tolist()):
            near = token == other or is_at_a_boundary(logits[row], token, place, **rules)
            assert near, (case, isa, token, other)


def compare_all(logits: torch.Tensor, draws: Draws, kept: slice = slice(None)) -> torch.Tensor:
    """Compares the tokens of all draws, and the log-probabilities of the `kept` ones, with the definition on each
    instruction set. Checks that the logits do not change. Returns the tokens."""
    given, other = logits.clone(), logits.clone()
    expected = reference.sample(other, draws)
    for isa in each_isa():
        drawn = native.sample(logits, draws)
        assert torch.equal(drawn.tokens, expected.tokens), isa
        assert torch.equal(drawn.top_tokens[kept], expected.top_tokens[kept]), isa
        for found, wanted in ((drawn.logprobs, expected.logprobs), (drawn.top_logprobs, expected.top_logprobs)):
            torch.testing.assert_close(found[kept], wanted[kept], rtol=0, atol=2e-6)
        for after in (logits, other):
            assert torch.equal(after.view(torch.int32), given.view(torch.int32)), isa
    return expected.tokens


def is_at_a_boundary(logits: torch.Tensor, token: int, place: float, **rules: float) -> bool:
    """True if a change within rounding leads to `token`. The change is in the place, or in the mass at which a rule
    cuts. For typical sampling, it may be one token on either side of the entropy."""
    near = [{}]
    for name, change in (("top_p", 1e-5), ("min_p", 1e-5), ("typical_p", 1.0 / len(logits))):
        if name in rules:
            near += [{name: rules[name] * (1 - change)}, {name: min(1.0, rules[name] * (1 + change))}]
    places = torch.tensor([max(0.0, place - 1e-5), place, min(1 - 1e-12, place + 1e-5)])
    rows = torch.zeros(3, dtype=torch.int64)
    return any(
        token in reference.sample(logits[None].clone(), make_draws(rows, places, **(rules | change))).tokens
        for change in near
    )


@on_each_isa
def test_a_row_is_its_own() -> None:
    generator = torch.Generator().manual_seed(5)
    logits = DISTRIBUTIONS["bell"](6, 9000, generator)
    rules = np.array([Rules(**rules) for rules in RULES.values()], RULES_DTYPE)
    rows = torch.randint(6, (len(rules),), generator=generator)
    uniform = torch.rand(len(rules), generator=generator).double()
    together = native.sample(logits, Draws(rows=rows, rules=rules, uniform=uniform)).tokens
    for index in range(len(rules)):
        one = slice(index, index + 1)
        alone = Draws(rows=torch.tensor([0]), rules=rules[one], uniform=uniform[one])
        assert torch.equal(native.sample(logits[rows[one]], alone).tokens, together[one])


@pytest.mark.parametrize("rules", ["plain", "top_k and top_p", "top_p", "min_p", "typical_p"])
@on_each_isa
def test_nothing_is_drawn_where_nothing_is_left(rules: str) -> None:
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(1))
    logits[1, 4000], logits[2, 17], logits[3] = math.nan, math.inf, -math.inf
    for ops in (native, reference):
        draws = make_draws(torch.arange(5), torch.full((5,), 0.5), **RULES[rules])
        assert (ops.sample(logits.clone(), draws).tokens < 0).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("temperature", [1e-3, 100.0])
@on_each_isa
def test_temperatures_far_from_one(temperature: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = temperature * torch.randn(4, 9000, generator=generator)
    for rules in ({}, dict(top_k=30), dict(top_p=0.9), dict(min_p=0.1), dict(typical_p=0.8)):
        draws = make_draws(torch.arange(4), torch.rand(4, generator=generator), temperature=temperature, **rules)
        given = zip(logits, native.sample(logits, draws).tokens.tolist(), draws.uniform.tolist())
        assert all(is_at_a_boundary(row, token, place, temperature=temperature, **rules) for row, token, place in given)


@pytest.mark.parametrize("num_top", [-1, 0, 5])
@pytest.mark.parametrize("rules", ["plain", "largest", "cooler", "top_k and top_p", "top_p", "typical_p"])
def test_edits_hold_for_the_draw_and_log_probabilities_are_of_the_row_without(rules: str, num_top: int) -> None:
    generator = torch.Generator().manual_seed(7)
    logits = DISTRIBUTIONS["bell"](5, 9000, generator)
    edits = [[] for _ in range(5)]
    for row in (1, 2, 4):
        tokens = torch.randperm(9000, generator=generator)[: 3000 * row % 8000].tolist()
        edits[row] += [Edits(tokens, factor=1.5), Edits(tokens[::3], addend=-math.inf), Edits([5, 20_000], addend=2.0)]
    edits[2].append(Edits([int(logits[2].argmax())], addend=-math.inf))
    rows = torch.tensor([3, 1, 0, 2, 4])
    draws = replace(
        make_draws(rows, torch.rand(5, generator=generator), **RULES[rules]),
        edits=[edits[row] for row in rows],
        num_top=torch.tensor([num_top, num_top, -1, num_top, 2]),
    )
    compare_all(logits, draws)


@pytest.mark.parametrize("num_top", [-1, 3])
@pytest.mark.parametrize(
    "rules", ["plain", "largest", "cooler", "top_k of one", "top_k and top_p", "top_p", "min_p", "typical_p", "all"]
)
def test_few_edits_that_move_the_largest(rules: str, num_top: int) -> None:
    """The edits are so few that the row's maxima are corrected instead of searched again."""
    n, nan = 20_011, math.nan
    logits = DISTRIBUTIONS["bell"](1, n, torch.Generator().manual_seed(9)).repeat(8, 1)
    likeliest = logits[0].topk(40).indices.tolist()
    top, other, last = likeliest[0], n // 2, n - 1
    edits = [
        [], [Edits(likeliest, addend=-math.inf)], [Edits([top], factor=1.5), Edits([top], addend=-7.0)],
        [Edits([last], addend=30.0)], [Edits([last, other], addend=30.0), Edits([last], addend=-math.inf)],
        [Edits([other], addend=nan)], [Edits([top], addend=nan), Edits([last], addend=30.0)],
        [Edits([last], addend=math.inf)],
    ]  # fmt: skip
    draws = replace(
        make_draws(torch.arange(8), torch.linspace(0.2, 0.8, 8), **RULES[rules]),
        edits=edits,
        num_top=torch.full((8,), num_top),
    )
    assert (compare_all(logits, draws, kept=slice(5)) < 0).tolist() == [False] * 5 + [True] * 3


@on_each_isa
def test_a_row_whose_tokens_are_all_banned_gives_none() -> None:
    logits = torch.randn(2, 300, generator=torch.Generator().manual_seed(1))
    for rules in RULES.values():
        draws = replace(
            make_draws(torch.arange(2), torch.full((2,), 0.3), **rules),
            edits=[[Edits(range(300), addend=-math.inf)], []],
        )
        for ops in (native, reference):
            assert (ops.sample(logits, draws).tokens < 0).tolist() == [True, False]


MASKS = {
    "all": lambda n, generator: torch.full((n,), True),
    "one": lambda n, generator: torch.arange(n) == n // 3,
    "few": lambda n, generator: torch.rand(n, generator=generator) < 0.01,
    "half": lambda n, generator: torch.rand(n, generator=generator) < 0.5,
    "most": lambda n, generator: torch.arange(n) % 777 > 0,
}


@pytest.mark.parametrize("n", [1, 31, 33, 700, 20_011])
@pytest.mark.parametrize("rules", ["plain", "largest", "top_k and top_p", "top_p", "min_p", "typical_p"])
def test_what_a_mask_bans_is_not_there(rules: str, n: int) -> None:
    """This holds for NaN too, and edits of banned tokens have no effect."""
    generator = torch.Generator().manual_seed(n)
    logits = DISTRIBUTIONS["bell"](len(MASKS) + 1, n, generator)
    allowed = torch.stack([mask(n, generator) for mask in MASKS.values()])
    allowed[:, n // 3] = True
    logits[:-1][~allowed] = math.nan
    tokens = torch.randperm(n, generator=generator)[: n // 3].tolist()
    rows = torch.randperm(len(logits), generator=generator)
    draws = replace(
        make_draws(rows, torch.rand(len(rows), generator=generator), **RULES[rules]),
        edits=[[Edits(tokens, factor=1.2), Edits(range(n // 2, n + 40), addend=-0.5)]] * len(rows),
        masks=bits_of(allowed),
        mask_rows=torch.where(rows < len(MASKS), rows, -1),
        num_top=torch.full((len(rows),), 4),
    )
    compare_all(logits, draws)


def bits_of(allowed: torch.Tensor) -> torch.Tensor:
    """Words of a mask. Bits beyond the vocabulary are set, but have no meaning."""
    padded = torch.nn.functional.pad(allowed, (0, -allowed.shape[1] % 32), value=True).unflatten(1, (-1, 32))
    return (padded.long() << torch.arange(32)).sum(-1).to(torch.int32)


@on_each_isa
def test_a_mask_that_allows_nothing_leaves_nothing() -> None:
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    masks = torch.zeros(1, 4, dtype=torch.int32)
    masks[0, 3] = -16  # beyond the vocabulary
    for rules in RULES.values():
        draws = replace(
            make_draws(torch.arange(2), torch.full((2,), 0.3), **rules), masks=masks, mask_rows=torch.tensor([0, -1])
        )
        for ops in (native, reference):
            assert (ops.sample(logits, draws).tokens < 0).tolist() == [True, False]


def test_edits_grow_and_are_cut() -> None:
    edits, expected = Edits(), []
    for number in range(100):
        edits.append(number, 2.0, -0.5)
        expected.append((number, 2.0, -0.5))
        assert edits.records.tolist() == expected and edits.address == edits.records.ctypes.data
    copied = edits.copy()
    edits.truncate(3)
    edits.set_addend(1, 7.0)
    assert edits.records.tolist() == [expected[0], (1, 2.0, 7.0), expected[2]] and copied.records.tolist() == expected


@on_each_isa
def test_the_ends_of_the_place() -> None:
    """Place 0 draws the first token that may be drawn, and a place just below 1 the last."""
    logits = torch.full((1, 10_000), -math.inf)
    logits[0, [3, 5000, 9999]] = torch.tensor([0.0, 1.0, 0.5])
    ends = make_draws(torch.zeros(2, dtype=torch.int64), torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64))
    assert native.sample(logits, ends).tokens.tolist() == reference.sample(logits, ends).tokens.tolist() == [3, 9999]


@on_each_isa
def test_tokens_far_above_all_before_them() -> None:
    """Until the row's maximum is known, weights are relative to the largest logit so far."""
    logits = torch.randn(2, 9000, generator=torch.Generator().manual_seed(4))
    logits[0, 5000] = logits[0, 8999] = logits[1, 8999] = 150.0
    logits[1, :4096] = -math.inf
    for rules in ({}, dict(temperature=2.0), dict(top_p=0.9), dict(typical_p=0.9)):
        draws = make_draws(torch.tensor([0, 0, 1]), torch.tensor([0.25, 0.75, 0.5]), **rules)
        assert native.sample(logits, draws).tokens.tolist() == [5000, 8999, 8999], rules


@on_each_isa
def test_shares_of_tokens_are_their_probabilities() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(2))
    places = (torch.arange(20_000) + 0.5) / 20_000
    for rules in ({}, dict(temperature=0.5), dict(top_k=10), dict(top_p=0.7), dict(min_p=0.2)):
        draws = make_draws(torch.zeros(20_000, dtype=torch.int64), places, **rules)
        counts = torch.bincount(native.sample(logits, draws).tokens, minlength=40)
        y = logits / rules.get("temperature", 1.0)
        kept = y.clone()
        top_k_top_p_(kept, torch.tensor([rules.get("top_k", 0)]), torch.tensor([rules.get("top_p", 1.0)]))
        kept[(y - y.max()).exp() < rules.get("min_p", 0.0)] = -math.inf
        assert (counts / 20_000 - kept.softmax(-1)[0]).abs().max() <= 2 / 20_000


@on_each_isa
def test_log_probabilities() -> None:
    for n, num_top in itertools.product((1, 5, 1000), (0, 1, 5, 20)):
        logits = torch.randn(4, n, generator=torch.Generator().manual_seed(n)).round(decimals=1)
        rows, tokens = torch.tensor([2, 0, 2]), torch.tensor([0, n - 1, n // 2])
        values, top, top_values = native.token_logprobs(logits, rows, tokens, num_top)
        expected = reference.token_logprobs(logits, rows, tokens, num_top)
        assert torch.equal(top, expected[1]), (n, num_top)
        torch.testing.assert_close(values, expected[0], rtol=0, atol=2e-6)
        torch.testing.assert_close(top_values, expected[2], rtol=0, atol=2e-6)


def test_what_does_not_fit_is_refused() -> None:
    logits, one = torch.randn(3, 10), torch.zeros(1, dtype=torch.int64)
    for wrong in (torch.tensor([3]), torch.tensor([-1])):
        with pytest.raises(ValueError, match=r"rows must be in 0..2"):
            native.sample(logits, make_draws(wrong, torch.zeros(1)))
        with pytest.raises(ValueError, match=r"rows must be in 0..2"):
            native.token_logprobs(logits, wrong, one, 0)
    with pytest.raises(ValueError, match=r"tokens must be in 0..9"):
        native.token_logprobs(logits, one, one + 10, 0)
    with pytest.raises(ValueError, match="num_top"):
        native.token_logprobs(logits, one, one, -1)
    twice = replace(make_draws(torch.zeros(2, dtype=torch.int64), torch.zeros(2)), edits=[[Edits([1])], []])
    with pytest.raises(ValueError, match="a row with edits is drawn from once"):
        native.sample(logits, twice)
    with pytest.raises(ValueError, match="edits must be a list for each of 1 draws"):
        native.sample(logits, replace(make_draws(one, torch.zeros(1)), edits=[]))
    with pytest.raises(ValueError, match="num_top must be a contiguous vector of 1"):
        native.sample(logits, replace(make_draws(one, torch.zeros(1)), num_top=torch.zeros(2)))
    draws, bits = make_draws(one, torch.zeros(1)), torch.zeros(1, 1, dtype=torch.int32)
    for message, wrong in [
        ("masks and mask_rows come together", dict(masks=bits)),
        ("masks and mask_rows come together", dict(mask_rows=one)),
        (r"mask_rows must be in -1..0", dict(masks=bits, mask_rows=one + 1)),
        (r"masks must be int32 \[1, 1\]", dict(masks=bits.long(), mask_rows=one)),
        (r"masks must be int32 \[1, 1\]", dict(masks=bits.repeat(1, 2), mask_rows=one)),
    ]:
        with pytest.raises(ValueError, match=message):
            native.sample(logits, replace(draws, **wrong))
    with pytest.raises(ValueError, match="uniform must be a contiguous vector of 1"):
        native.sample(logits, make_draws(one, torch.zeros(2)))
