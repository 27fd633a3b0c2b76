"""Extra layers after the last one, which predict further tokens, are left out unless they draft. They are recognised
only by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from pace.llm.loading.load import load_model
from pace.llm.loading.options import LoadOptions
from tests.checkpoints.quantized.models import save_quantized
from tests.checkpoints.quantized.test_models import FIELDS
from tests.editing import change_json, change_tensors
from tests.llm.models.draft_heads import run, runners, save_mtp
from tests.llm.models.variants import save_tiny
from tests.llm.models.visit import TOLERANCE, relative_error
from tests.support import prefill

IDS = torch.randint(2, 96, (20,), generator=torch.Generator().manual_seed(4))
FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
LAST = "model.layers.2."


def logits(path):
    return prefill(load_model(LoadOptions(path, dtype="float32", num_threads=1, progress=False)), IDS)


def with_further_layer(state, last=LAST):
    """Returns `state` with a third layer of constants, which has the tensors of the extra layer of DeepSeek-V3 and
    GLM-4.5."""
    own = {name: tensor for name, tensor in state.items() if name.startswith("model.layers.1.")}
    further = {name.replace("model.layers.1.", last): tensor.clone().fill_(3) for name, tensor in own.items()}
    hidden = state["model.norm.weight"].numel()
    for name in ("enorm", "hnorm", "shared_head.norm"):
        further[f"{last}{name}.weight"] = torch.ones(hidden)
    for name in ("embed_tokens", "shared_head.head"):
        further[f"{last}{name}.weight"] = torch.ones_like(state["model.embed_tokens.weight"])
    return state | further | {f"{last}eh_proj.weight": torch.ones(hidden, 2 * hidden)}


def rewrite(folder, change, **fields):
    change_tensors(folder, change)
    change_json(folder / "config.json", **fields)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_of_checkpoints(tmp_path, model_type):
    save_tiny(tmp_path, model_type, {})
    expected = logits(tmp_path)
    rewrite(tmp_path, with_further_layer, num_nextn_predict_layers=1)
    assert torch.equal(logits(tmp_path), expected)
    rewrite(tmp_path, lambda state: state | {"model.further.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"unexpected \(1\): model.further.weight"):
        logits(tmp_path)


def test_of_a_quantised_checkpoint(tmp_path):
    """In DeepSeek-V3 as published this layer also is float8 in blocks."""
    folder = save_quantized(tmp_path, "fp8", "deepseek_v3", **FIELDS["deepseek_v3"])
    expected = logits(folder)
    rewrite(folder, with_further_layer, num_nextn_predict_layers=1)
    assert load_file(folder / "model.safetensors")[f"{LAST}self_attn.o_proj.weight"].dtype == torch.float8_e4m3fn
    assert torch.equal(logits(folder), expected)


@pytest.mark.parametrize("model_type", ["glm4_moe", "deepseek_v3"])
def test_of_files(tmp_path, model_type):
    """llama.cpp counts it as a layer, and stores the number of extra layers separately."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tests.checkpoints.gguf.files import write_gguf

    hub = tmp_path / "hub"
    save_tiny(hub, model_type, {})
    expected = logits(hub)
    rewrite(hub, lambda state: as_files_name_it(with_further_layer(state)), num_hidden_layers=3)
    write_gguf(hub, tmp_path / "model.gguf", add=count_further_layers)
    assert torch.equal(logits(tmp_path / "model.gguf"), expected)


def as_files_name_it(state):
    own = ("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.head", "shared_head.norm")
    moved = {part: state.pop(f"{LAST}{part}.weight") for part in own if f"{LAST}{part}.weight" in state}
    return state | {f"blk.2.nextn.{part.replace('.', '_')}.weight": tensor for part, tensor in moved.items()}


def count_further_layers(writer):
    writer.add_uint32(f"{writer.arch}.nextn_predict_layers", 1)


@pytest.mark.parametrize("model_type", ["glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_drafts_of_files(tmp_path, model_type):
    """The layer in a file is that of the Hub. Without a norm of its own it has the final one."""
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tests.checkpoints.gguf.files import write_gguf

    hub, path = tmp_path / "hub", tmp_path / "model.gguf"
    save_mtp(hub, model_type)
    target, head = runners(hub, "mtp")
    rows = run(target, IDS)[1]
    expected = run(head, IDS[1:], rows[:-1])[0]
    state = load_file(hub / "model.safetensors")
    rewrite(hub, as_files_name_it, num_hidden_layers=3)
    write_gguf(hub, path, add=count_further_layers)
    drafts = run(runners(path, "mtp")[1], IDS[1:], rows[:-1])[0]
    assert relative_error(drafts, expected) < TOLERANCE
    del state[f"{LAST}shared_head.norm.weight"]
    rewrite(hub, lambda _: state, num_hidden_layers=2)
    final = run(runners(hub, "mtp")[1], IDS[1:], rows[:-1])[0]
    assert final.isfinite().all() and relative_error(final, expected) > TOLERANCE
