"""Values of both operations against their reference in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from pace.ops import native, reference
from tests.ops.isas import on_each_isa
from tests.ops.states.support import Layer, Span, convolution, recurrence, slots_of
from tests.plugins.tiers import sample

EPS = 2.0**-24
TOKENS = 23

LAYERS = {
    "a head of one element": lambda: recurrence((1, 1), (1, 1), TOKENS),
    "grouped": lambda: recurrence((2, 6), (16, 32), TOKENS),
    "tiled": lambda: recurrence((2, 6), (16, 32), TOKENS, tiled=True),
    "128 x 128": lambda: recurrence((1, 2), (128, 128), TOKENS),
    "odd sizes": lambda: recurrence((1, 2), (33, 71), TOKENS, skip=True),
    "wide": lambda: recurrence((1, 2), (8, 300), TOKENS),
    "decay per row": lambda: recurrence((2, 2), (24, 20), TOKENS, per_row=True),
    "odd decays per row": lambda: recurrence((1, 2), (5, 17), TOKENS, per_row=True),
    "bounded decays per row": lambda: recurrence((2, 2), (24, 20), TOKENS, per_row=True, lower_bound=-5.0),
    "bounded decays": lambda: recurrence((1, 2), (16, 32), TOKENS, lower_bound=-0.5),
    "Mamba-2": lambda: recurrence((1, 4), (64, 48), TOKENS, delta=False, skip=True),
    "Mamba-2 tiled": lambda: recurrence((2, 6), (17, 5), TOKENS, delta=False, tiled=True),
    "limited steps": lambda: recurrence((1, 2), (16, 16), TOKENS, delta=False, limits=(0.4, 0.9)),
}


def steps_of(layer: Layer, ops, dtype: torch.dtype):
    """The rows and slots of a prefill, a step with drafts and marks, and a step that replays one of them."""
    slots = slots_of(layer.state, dtype=dtype)
    rows = layer.run(ops, slots, Span(0, 12, -1, 0, marks=((5, 1),)))
    rows += layer.run(ops, slots, Span(12, 18, 0, 2, certain=3))
    rows += layer.run(ops, slots, Span(16, TOKENS, 2, 3, replay=1))
    return torch.cat(rows), slots


@pytest.mark.parametrize("name", LAYERS)
@on_each_isa
def test_recurrence(name) -> None:
    layer = LAYERS[name]()
    got, slots = steps_of(layer, native, torch.float32)
    exact, wanted = steps_of(layer.doubled(), reference, torch.float64)
    # A token adds at most one rounding for each row, and 16 for its decay, unit vectors and delta. States do not grow:
    # decays are at most 1, and a delta moves S' k between its old value and the new one.
    tolerance = EPS * TOKENS * (layer.state.key_dim + 16)
    assert (got - exact).abs().max() <= tolerance * exact.abs().max()
    used = [0, 1, 2, 3]
    assert (slots.matrix[used] - wanted.matrix[used]).abs().max() <= tolerance * wanted.matrix[used].abs().max()
    journal, rows = slots.journal[2, :3], wanted.journal[2, :3]
    assert (journal - rows).abs().max() <= tolerance * rows.abs().max()


@pytest.mark.parametrize("kernel", sample(range(1, 8), lambda kernel: kernel in (1, 4)))
@pytest.mark.parametrize("channels", [1, 13, 530])
@on_each_isa
def test_causal_conv(channels, kernel) -> None:
    for bias in (True, False):
        for activation in ("silu", None):
            layer = convolution(channels, kernel, TOKENS, bias, activation)
            if kernel == 1:  # keeps nothing
                exact = layer.doubled().run(reference, slots_of(layer.state), Span(0, 9, -1, 0), Span(9, TOKENS, 3, 1))
                got = layer.run(native, slots_of(layer.state), Span(0, 9, -1, 0), Span(9, TOKENS, 3, 1))
                got, exact = torch.cat(got), torch.cat(exact)
            else:
                got, slots = steps_of(layer, native, torch.float32)
                exact, wanted = steps_of(layer.doubled(), reference, torch.float64)
                assert torch.equal(slots.inputs[:4].double(), wanted.inputs[:4])
                assert torch.equal(slots.journal_inputs[2, :3].double(), wanted.journal_inputs[2, :3])
            # One rounding for each term, at the size of the largest sum; silu has slopes up to 1.1 and 4 of its own.
            assert (got - exact).abs().max() <= EPS * (2 * kernel + 8) * exact.abs().max().clamp(min=1) * 3


@pytest.mark.thorough
@pytest.mark.parametrize("per_row", [False, True])
def test_errors_do_not_grow_over_8192_tokens(per_row) -> None:
    """Decays from e^-1e-4 to e^-5, strong and weak deltas, and keys that repeat. float64 has the decays of float32,
    from the journal: the rounding of a decay close to 1 changes how long a state remembers."""
    tokens = 8192
    layer = recurrence((1, 2), (64, 64), tokens, per_row=per_row)
    q, k, v, steps, beta = (part.copy_(part.clone()) for part in layer.arguments[0])
    k[::3] = k[:1]
    steps.uniform_(-9, 4)
    beta.uniform_(-6, 6)
    slots = slots_of(layer.state, 1, tokens)
    got = layer.run(native, slots, Span(0, tokens, -1, 0, certain=1))[0]

    decays = slots.journal[0, :, :, : layer.state.decay_dim].double()[..., None]
    q, k = (functional.normalize(heads.double(), dim=2).repeat(1, 2, 1) for heads in (q, k))
    gains = layer.options.beta_scale * beta.double().sigmoid()[..., None]
    matrix, exact = torch.zeros(2, 64, 64, dtype=torch.float64), torch.empty(tokens, 2, 64, dtype=torch.float64)
    for t in range(tokens):
        if t:  # the first token is certain, and the matrix before it is 0
            matrix *= decays[t - 1]
        delta = gains[t] * (v[t] - torch.einsum("hk, hkv -> hv", k[t], matrix))
        matrix += k[t].unsqueeze(2) * delta.unsqueeze(1)
        exact[t] = torch.einsum("hk, hkv -> hv", q[t], matrix) / 8
    error = (got - exact.flatten(1)).abs() / exact.abs().max()
    assert error.max() <= 2e-6
    assert error[-1024:].max() <= 2 * error[:1024].max()
