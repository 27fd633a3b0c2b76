"""Rows of stacked, transposed or interleaved tensors are loaded into the right places, piece by piece."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from pace.checkpoints.reader import CheckpointReader
from pace.llm.layers import Embedding, GatedLinear, Layer, Linear, NoNorm, NoRotary, RowRange, TensorSource
from pace.llm.layers.weight_target import check_targets
from pace.llm.loading import fill
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.model_config import ModelConfig
from pace.ops import native, reference
from pace.ops.weight_layout import QuantizedRows, WeightLayout
from pace.quant import QuantizationConfig
from tests.support import TensorDict

K, HEADS, D, EXPERTS, INNER = 32, 3, 10, 4, 20


class Parts(Layer):
    """Weights and biases filled from the tensors of `SHAPES`."""

    cache = None

    def __init__(self):
        per_head = tuple(RowRange(i * D, HEADS * D, D, 3 * D) for i in range(3))
        stacked = (EXPERTS, 2 * INNER, K)
        self.neox = Linear({"neox": TensorSource((3 * HEADS * D, K), per_head)}, K, bias=True)
        self.conv = Linear({"conv": TensorSource((K, 3 * D), transposed=True)}, K, bias=True)
        self.experts = [
            GatedLinear(
                {
                    f"experts.{e}": TensorSource(
                        stacked,
                        (RowRange(2 * e * INNER, INNER, step=2), RowRange(2 * e * INNER + 1, INNER, step=2)),
                        "gate_up",
                        "gate_up_bias",
                    )
                },
                K,
                bias=True,
            )
            for e in range(EXPERTS)
        ]
        self.turned = [
            Linear(
                {
                    f"turned.{e}": TensorSource(
                        (EXPERTS, K, INNER), (RowRange(e * INNER, INNER),), "down", transposed=True
                    )
                },
                K,
            )
            for e in range(EXPERTS)
        ]
        self.halves = [
            Linear({f"half{i}": TensorSource((2 * D, K), (RowRange(i * D, D),), "both")}, K) for i in range(2)
        ]


SHAPES = {
    "neox.weight": (3 * HEADS * D, K),
    "neox.bias": (3 * HEADS * D,),
    "conv.weight": (K, 3 * D),
    "conv.bias": (3 * D,),
    "gate_up": (EXPERTS, 2 * INNER, K),
    "gate_up_bias": (EXPERTS, 2 * INNER),
    "down": (EXPERTS, K, INNER),
    "both": (2 * D, K),
    "embed_tokens.weight": (40, K),
    "lm_head.weight": (40, K),
}


def random_state(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


class Model(BaseModelForCausalLM):
    prefix = ""
    embedding_name = "embed_tokens"

    def __init__(self, dtype=torch.float32, ops=native):
        super().__init__(ModelConfig(vocab_size=40), dtype, ops)
        self.rotary = NoRotary()
        self.embedding = Embedding(self.embedding_name, 40, K)
        self.layers = [Parts()]
        self.final_norm = NoNorm()
        self.lm_head = self.make_head(K)


def expected(state):
    """Returns the expected weights and biases, computed directly."""
    qkv = state["neox.weight"].view(HEADS, 3, D, K)
    found = {"neox": qkv.transpose(0, 1).reshape(-1, K), "conv": state["conv.weight"].t()}
    for e in range(EXPERTS):
        both = state["gate_up"][e]
        found[f"experts.{e}"] = torch.cat([both[0::2], both[1::2]])
        found[f"turned.{e}"] = state["down"][e].t()
    found |= {"half0": state["both"][:D], "half1": state["both"][D:]}
    biases = {"neox": state["neox.bias"].view(HEADS, 3, D).transpose(0, 1).flatten(), "conv": state["conv.bias"]}
    for e in range(EXPERTS):
        biases[f"experts.{e}"] = torch.cat([state["gate_up_bias"][e, 0::2], state["gate_up_bias"][e, 1::2]])
    return found, biases


def check(model, state, quantised=None):
    weights, biases = expected(state)
    for matrix in model.layers[0].matrices():
        [part] = matrix.parts
        rows = weights[part]
        wanted = rows.to(model.dtype) if quantised is None else quantised.quantize(rows.contiguous(), part).dequantize()
        assert torch.equal(model.ops.unpack(matrix.weight), wanted), part
        if part in biases:
            assert torch.equal(matrix.bias.values, biases[part].float()), part


@pytest.mark.parametrize("ops", [native, reference])
@pytest.mark.parametrize("stored, dtype", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)])
def test_every_row_gets_where_it_belongs(ops, stored, dtype) -> None:
    state, model = random_state(stored), Model(dtype, ops)
    model.load_weights(TensorDict(state), workers=2)
    check(model, state)
    assert model.planned_nbytes(ops, dtype) == model.nbytes
    assert sum(tensor.numel() for tensor in state.values()) == model.num_weights


def test_floats_are_quantised_by_rows_wherever_they_lie() -> None:
    state, model = random_state(), Model()
    config = QuantizationConfig("int8")
    model.quantize(config)
    model.load_weights(TensorDict(state), workers=2)
    [matrix, *_] = model.layers[0].matrices()
    check(model, state, next(iter(matrix.plan.formats.values())))


class Quantised(TensorDict):
    """A checkpoint that holds some tensors as quantised codes."""

    def __init__(self, state, names):
        super().__init__(state)
        self.layout, self.names = WeightLayout("int8", 16), names
        for name in names:
            self.tensors[name] = (self.layout, tuple(state[name].shape))

    def column_order(self, name):
        return None

    def read(self, name, start=0, stop=None):
        rows = super().read(name, start, stop)
        return codes_of(rows, self.layout) if name in self.names else rows


def codes_of(rows, layout):
    codes = rows.mul(40).round().clamp(-127, 127).to(torch.int8)
    scales = rows.abs().view(len(rows), -1, layout.group).amax(-1).half().float() / 128
    return QuantizedRows(layout, codes, scales)


def test_codes_are_sorted_like_floats() -> None:
    state, model = random_state(), Model()
    model.load_weights(Quantised(state, ["neox.weight", "both"]))
    layout = WeightLayout("int8", 16)
    weights, _ = expected(state)
    for matrix in model.layers[0].matrices():
        [part] = matrix.parts
        if part in ("neox", "half0", "half1"):
            assert matrix.plan.layouts[part] == layout
            assert torch.equal(native.unpack(matrix.weight), codes_of(weights[part], layout).dequantize()), part
        else:
            assert torch.equal(native.unpack(matrix.weight), weights[part]), part


def test_codes_that_would_have_to_be_transposed_are_refused_by_name() -> None:
    with pytest.raises(NotImplementedError, match=r"conv.weight is stored as int8.*the model needs it transposed"):
        Model().load_weights(Quantised(random_state(), ["conv.weight"]))


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_missing_or_of_another_shape_is_named(name) -> None:
    state = random_state()
    tensor = state.pop(name)
    with pytest.raises(ValueError, match=rf"missing \(1\): {name}"):
        Model().load_weights(TensorDict(state))
    longer = torch.cat([tensor, tensor])
    with pytest.raises(ValueError, match=rf"{name} has shape \[{longer.shape[0]}"):
        Model().load_weights(TensorDict({**state, name: longer}))


def test_pieces_of_a_file_are_bounded_and_released(tmp_path, monkeypatch) -> None:
    """At most one piece is held at a time, or one band of a transposed matrix. Each byte of the file is read, and the
    reported bytes are those of the file."""
    limit = 16 * K * 4
    monkeypatch.setattr(fill, "PIECE_BYTES", limit)
    monkeypatch.setattr(fill, "MIN_BAND_BYTES", 16)
    state = random_state()
    save_file(state, tmp_path / "model.safetensors")
    held, progress = set(), []

    class Reader(CheckpointReader):
        def row_ranges(self, name):
            return super().row_ranges(name, limit)

        def read(self, name, start=0, stop=None):
            assert not held, "one worker, one piece"
            rows = super().read(name, start, stop)
            held.add((name, start, stop))
            assert rows.nbytes <= limit
            return rows

        def release(self, name, start=0, stop=None):
            held.remove((name, start, stop))
            super().release(name, start, stop)

    model = Model()
    with Reader(tmp_path) as reader:
        model.load_weights(reader, progress=progress.append)
    check(model, state)
    assert not held and sum(progress) == sum(tensor.nbytes for tensor in state.values())
    assert max(progress) <= limit, "a band of a turned matrix is a piece, too"


def test_rows_by_brute_force() -> None:
    chance = random.Random(0)
    for _ in range(300):
        run = chance.randint(1, 5)
        rows = RowRange(chance.randint(0, 9), chance.randint(1, 20), run, run + chance.choice([0, 0, 1, 4]))
        lies = [rows.first + r // rows.run * rows.step + r % rows.run for r in range(rows.count)]
        assert rows.indices(0, rows.count).tolist() == lies == sorted(set(lies))
        for row in range(lies[-1] + 5):
            assert rows.before(row) == sum(place < row for place in lies), (rows, row)
    for wrong in ({"first": -1}, {"count": -1}, {"run": 0}, {"run": 3, "step": 2}):
        with pytest.raises(ValueError, match="runs must be"):
            replace(RowRange(0, 4), **wrong)


def test_rows_that_nobody_or_two_claim_are_a_mistake_of_the_model() -> None:
    def targets(*rows, shape=(6, 4)):
        sources = [TensorSource(shape, (part,), "x") for part in rows]
        return [target for source in sources for target in source.targets(lambda piece, start: None, 0)]

    check_targets("x", targets(RowRange(0, 3, step=2), RowRange(1, 3, step=2)))
    with pytest.raises(ValueError, match="two layers claim the tensor 'x', the first time at row 2"):
        check_targets("x", targets(RowRange(0, 3), RowRange(2, 4)))
    with pytest.raises(ValueError, match="no layer claims row 5 of the tensor 'x'"):
        check_targets("x", targets(RowRange(0, 5)))
    with pytest.raises(ValueError, match="which has 6 rows"):
        check_targets("x", targets(RowRange(0, 7)))
    with pytest.raises(ValueError, match="as different things"):
        check_targets("x", targets(RowRange(0, 6)) + targets(RowRange(0, 3), shape=(3, 4)))
    with pytest.raises(ValueError, match="two layers claim"):
        check_targets("x", TensorSource((6, 4)).targets(lambda *_: None, 0) * 2)
