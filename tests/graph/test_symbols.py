"""Symbols support the operations that models use on tensors, and refuse those that a program cannot repeat."""

from __future__ import annotations

import pytest
import torch

from pace.batch import Positions
from pace.graph import recorded
from pace.graph.instructions import Columns, Heads
from pace.graph.symbols import Recording, Rows, SymbolicAngles
from pace.ops.weight import PackedWeight

LAYERS = (Positions(1, 4, 4),)


@pytest.fixture
def rows():
    """The symbol of a matrix with 12 columns."""
    batch = Recording().batch(LAYERS)
    return recorded.embedding(batch.tokens, PackedWeight(5, 12, torch.float32))


def test_views_name_the_columns_that_torch_would_show(rows):
    """Compares with a tensor whose columns hold their own numbers, after the same slices."""
    table, value = torch.arange(12)[None], rows.columns.value

    def shown(view):
        """Columns of a symbol's view, as a tensor of a single token."""
        if isinstance(view, Rows):
            return torch.tensor([list(range(view.columns.first, view.columns.first + view.columns.count))])
        heads = view.heads
        starts = [heads.column + head * heads.stride for head in range(heads.count)]
        return torch.tensor([[list(range(start, start + heads.head_dim)) for start in starts]])

    for view in (
        lambda x: x[:, 2:9],
        lambda x: x[:, 4:],
        lambda x: x[:, 3:11][:, 1:-2],
        lambda x: x.unflatten(1, (3, 4)),
        lambda x: x[:, 2:10].unflatten(1, (2, 4)),
        lambda x: x.unflatten(1, (3, 4))[:, 1:],
        lambda x: x.unflatten(1, (3, 4))[:, :, 1:3],
        lambda x: x.unflatten(1, (3, 4))[:, 1:, 2:][:, 1:],
    ):
        assert torch.equal(shown(view(rows)), view(table))
    assert rows[:, 2:9].columns == Columns(value, 2, 7)
    assert rows.unflatten(1, (3, 4))[:, :, 1:3].heads == Heads(value, 1, 3, 2, 4)


def test_rows_of_logits_are_a_new_matrix(rows):
    wanted = rows[:, 2:6][rows.recording.batch(LAYERS).logit_rows]
    assert wanted.columns.value is not rows.columns.value
    assert wanted.columns.is_whole and wanted.columns.count == 4 and not wanted.columns.value.per_token


@pytest.mark.parametrize(
    "message, call",
    [
        ("logit_rows, or by neighbouring columns", lambda x: x[3]),
        ("logit_rows, or by neighbouring columns", lambda x: x[:, ::2]),
        ("logit_rows, or by neighbouring columns", lambda x: x[1:, :2]),
        ("split into heads", lambda x: x.unflatten(1, (3, 5))),
        ("split into heads", lambda x: x.unflatten(0, (3, 4))),
        ("split into heads", lambda x: x[x.recording.batch(LAYERS).logit_rows].unflatten(1, (3, 4))),
        ("without gaps", lambda x: x.unflatten(1, (6, 2))[:, ::2]),
        ("without gaps", lambda x: x.unflatten(1, (6, 2))[:, :, 0]),
        ("without gaps", lambda x: x.unflatten(1, (6, 2))[2:, :, :]),
    ],
)
def test_what_cannot_be_recorded_is_refused(rows, message, call):
    with pytest.raises(NotImplementedError, match=message):
        call(rows)


def test_what_does_not_fit_is_refused_as_the_kernels_would(rows):
    heads = rows.unflatten(1, (3, 4))
    square = PackedWeight(12, 12, torch.float32)
    for message, call in [
        (r"x must be float32 \[T, 12\]", lambda: recorded.linear(rows[:, 1:], square)),
        (r"residual must be .*\[T, 12\]", lambda: recorded.linear(rows, square, residual=rows[:, :11])),
        ("weight must be .* of 12", lambda: recorded.rms_norm(rows, torch.ones(11), 1e-5)),
        ("bias must be .* of 12", lambda: recorded.layer_norm(rows, None, torch.ones(13), 1e-5)),
        ("weight must be .* of 4", lambda: recorded.head_rms_norm_(heads, torch.ones(12), 1e-5)),
        ("heads of 4", lambda: recorded.rotary_(heads, SymbolicAngles(3), SymbolicAngles(3), False)),
        ("12 columns and 11", lambda: rows + rows[:, 1:]),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(NotImplementedError, match="whole matrix"):
        recorded.linear(rows, PackedWeight(8, 12, torch.float32), residual=rows[:, :8])


def test_instructions_in_place_read_what_they_change(rows):
    heads = rows.unflatten(1, (3, 4))
    recorded.rotary_(heads, SymbolicAngles(2), SymbolicAngles(2), False)
    instruction = rows.recording.instructions[-1]
    assert instruction.changes() == heads.heads and list(instruction.reads()) == [heads.heads]
    assert instruction.makes() is None and instruction.values() == [rows.columns.value]
