"""`load_model` turns a directory into a model with the logits of transformers, or raises one clear error."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from pace import _C
from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions, parse_dtype, select_ops, use_threads
from pace.ops import native, reference
from tests.fuzz import checkpoints
from tests.llm.models.variants import save_tiny
from tests.support import prefill

IDS = torch.arange(3, 40)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Returns the folder and logits of a tiny float32 Llama saved by transformers. Its weights are exact in
    bfloat16."""
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny(folder, "llama", {})
    with torch.no_grad():
        return folder, model(IDS[None]).logits[0]


def copy_as(tiny, folder, kind="safetensors", dtype=torch.float32, change=lambda state: state, **config):
    """Stores the tiny checkpoint in another form, and returns the folder."""
    source, _ = tiny
    state = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    for name, data in checkpoints.weight_files(kind, change(state)).items():
        (folder / name).write_bytes(data)
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | config))
    return folder


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_dtype_as_every_other(stored, dtype, backend, tiny, tmp_path):
    model = load_model(LoadOptions(copy_as(tiny, tmp_path, dtype=stored), dtype=dtype, backend=backend))
    assert model.dtype == getattr(torch, dtype)
    exact = load_model(LoadOptions(copy_as(tiny, tmp_path), dtype="float32", backend="torch"))
    for ours, theirs in zip(matrices(model), matrices(exact), strict=True):
        assert torch.equal(ours, theirs.to(stored).to(model.dtype))
    error = (prefill(model, IDS).float() - tiny[1]).abs().max() / tiny[1].abs().max()
    assert error < {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}[dtype]


def matrices(model):
    return [
        model.ops.unpack(layer.weight) for layer in model.walk() if hasattr(layer, "weight") and hasattr(layer, "parts")
    ]


@pytest.mark.parametrize("kind", checkpoints.KINDS)
def test_every_layout_gives_the_same_model(kind, tiny, tmp_path):
    model = load_model(LoadOptions(copy_as(tiny, tmp_path, kind), dtype="float32"))
    expected = load_model(LoadOptions(tiny[0], dtype="float32"))
    assert torch.equal(prefill(model, IDS), prefill(expected, IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_beyond_float16_are_refused(dtype, tiny, tmp_path):
    def enlarge(state):
        state["model.layers.0.mlp.up_proj.weight"][5, 3] = -70000.0
        return state

    folder = copy_as(tiny, tmp_path, dtype=dtype, change=enlarge)
    with pytest.raises(ValueError, match="model.layers.0.mlp.up_proj.weight.*float16"):
        load_model(LoadOptions(folder, dtype="float16"))
    load_model(LoadOptions(folder, dtype="bfloat16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_infinite_and_nan_weights_are_loaded_as_they_are(dtype, tiny, tmp_path):
    def spoil(state):
        state["model.layers.0.mlp.up_proj.weight"][0, :2] = torch.tensor([torch.nan, -torch.inf])
        state["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.inf
        return state

    model = load_model(LoadOptions(copy_as(tiny, tmp_path, change=spoil), dtype=dtype))
    assert sum(int(matrix.isnan().sum()) for matrix in matrices(model)) == 1
    assert sum(int(matrix.isinf().sum()) for matrix in matrices(model)) == 2


def test_values_beyond_float16_are_refused_next_to_nan(tiny, tmp_path):
    def spoil(state):
        state["model.layers.0.mlp.up_proj.weight"][0, :3] = torch.tensor([torch.nan, -torch.inf, 70000.0])
        return state

    with pytest.raises(ValueError, match=r"up_proj.weight reaches 7e\+04, which float16 \(at most 65504\)"):
        load_model(LoadOptions(copy_as(tiny, tmp_path, change=spoil), dtype="float16"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_of_float64_that_nothing_else_holds_are_refused(dtype, tiny, tmp_path):
    def enlarge(state):
        state["model.layers.0.mlp.up_proj.weight"][0, 0] = 1e200
        return state

    with pytest.raises(ValueError, match=rf"up_proj.weight reaches 1e\+200, which {dtype}"):
        load_model(LoadOptions(copy_as(tiny, tmp_path, dtype=torch.float64, change=enlarge), dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_weights_are_refused_by_name(dtype, tiny, tmp_path):
    name = "model.layers.1.self_attn.q_proj.weight"
    folder = copy_as(tiny, tmp_path, change=lambda state: state | {name: state[name].to(dtype)})
    with pytest.raises((ValueError, NotImplementedError), match=f"{name}.*{str(dtype).removeprefix('torch.')}"):
        load_model(LoadOptions(folder))


def test_one_error_lists_all_tensors_that_do_not_fit(tiny, tmp_path):
    def damage(state):
        del state["model.norm.weight"]
        state["model.extra"] = torch.ones(2)
        state["lm_head.weight"] = state["lm_head.weight"][:-1].clone()
        return state

    with pytest.raises(ValueError) as caught:
        load_model(LoadOptions(copy_as(tiny, tmp_path, change=damage)))
    for name in ("model.norm.weight", "model.extra", "lm_head.weight"):
        assert name in str(caught.value)


def test_an_embedding_and_a_tied_head_in_different_shards(tiny, tmp_path):
    """Equal matrices are tied even if they are in two files."""

    def tie(state):
        head = state.pop("lm_head.weight")
        return {"lm_head.weight": state["model.embed_tokens.weight"].clone(), **state} if head is not None else state

    names = list(tie(load_file(tiny[0] / "model.safetensors")))
    assert names.index("lm_head.weight") % 2 != names.index("model.embed_tokens.weight") % 2, "they are in one shard"
    model = load_model(
        LoadOptions(copy_as(tiny, tmp_path, "safetensors-sharded", change=tie, tie_word_embeddings=True))
    )
    assert type(model.lm_head).__name__ == "TiedLMHead"


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (
            {"architectures": ["T5ForConditionalGeneration"]},
            NotImplementedError,
            "T5ForConditionalGeneration.*LlamaForCausalLM.*Qwen3",
        ),
        ({"architectures": 3}, (ValueError, NotImplementedError), "architectures"),
        ({"architectures": None, "model_type": None}, (ValueError, NotImplementedError), "architectures"),
        ({"quantization_config": {"quant_method": "aqlm"}}, NotImplementedError, "quantization_config.*aqlm"),
        ({"num_hidden_layers": 10**12}, ValueError, "num_hidden_layers"),
        ({"hidden_size": 2**31}, ValueError, "hidden_size"),
        ({"vocab_size": -1}, ValueError, "vocab_size"),
        ({"num_attention_heads": 0}, ValueError, "num_attention_heads"),
        ({"intermediate_size": 56.0}, ValueError, "intermediate_size"),
    ],
)
def test_configs_that_are_refused(config, error, message, tiny, tmp_path):
    with pytest.raises(error, match=message):
        load_model(LoadOptions(copy_as(tiny, tmp_path, **config)))


def test_directories_that_are_no_checkpoint(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_model(LoadOptions(tmp_path))
    (tmp_path / "config.json").write_bytes((tiny[0] / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="no weights"):
        load_model(LoadOptions(tmp_path))


def test_dtypes():
    for name in ("bfloat16", "bf16", "torch.bfloat16", "BFloat16", torch.bfloat16):
        assert parse_dtype(name) == torch.bfloat16
    assert [parse_dtype(name) for name in ("fp16", "half", "fp32", "float")] == [torch.float16] * 2 + [
        torch.float32
    ] * 2
    for wrong in ("int8", "auto", "", "bfloat17", torch.int8, torch.float64):
        with pytest.raises(ValueError, match="bfloat16, float16 or float32"):
            parse_dtype(wrong)
    for wrong in (None, 16, float):
        with pytest.raises(TypeError, match="dtype must be"):
            parse_dtype(wrong)


def test_backends():
    assert select_ops("native") is native and select_ops("torch") is reference
    for wrong in ("cuda", "", None, ["native"]):
        with pytest.raises(ValueError, match="'native', 'native-eager', 'torch'"):
            select_ops(wrong)


def test_threads():
    before = _C.get_num_threads()
    try:
        assert use_threads(3) == 3 == _C.get_num_threads()
        assert use_threads(None) == _C.cpu_info()["default_threads"] == _C.get_num_threads()
        for wrong in (0, -1, 5000):
            with pytest.raises(ValueError, match="from 1 to 4096"):
                use_threads(wrong)
        for wrong in (True, 1.0, "2"):
            with pytest.raises(TypeError, match="integer"):
                use_threads(wrong)
    finally:
        _C.set_num_threads(before)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_where_someone_watches(tiny, monkeypatch, capfd):
    load_model(LoadOptions(tiny[0]))
    assert capfd.readouterr() == ("", "")
    terminal, notebook = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    load_model(LoadOptions(tiny[0], progress=False))
    assert terminal.getvalue() == ""
    load_model(LoadOptions(tiny[0]))
    assert "Loading" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", notebook)
    monkeypatch.setitem(sys.modules, "ipykernel", None)  # as in a notebook, with or without ipywidgets
    load_model(LoadOptions(tiny[0]))
    assert "Loading" in notebook.getvalue()


def test_threads_fill_disjoint_pieces(tiny, tmp_path, monkeypatch):
    """Many pieces per tensor and more threads than cores give the same bits."""
    from pace.checkpoints.reader import CheckpointReader

    expected = matrices(load_model(LoadOptions(tiny[0], num_threads=1)))
    ranges = CheckpointReader.row_ranges
    monkeypatch.setattr(CheckpointReader, "row_ranges", lambda self, name: ranges(self, name, piece_bytes=1))
    threads = _C.get_num_threads()
    try:
        found = matrices(load_model(LoadOptions(tiny[0], num_threads=8)))
    finally:
        _C.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_ignored_tensors_of_any_dtype(tiny, tmp_path):
    save_file(
        load_file(tiny[0] / "model.safetensors")
        | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float64)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "config.json").write_bytes((tiny[0] / "config.json").read_bytes())
    load_model(LoadOptions(tmp_path))
