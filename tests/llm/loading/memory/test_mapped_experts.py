"""Experts in a file give the same bits. The file is made once and used only for the same weights. A mixture can be
larger than a memory limit."""

from __future__ import annotations

import os
import shutil

import pytest
import torch

from pace import _C
from pace.assets import TINY
from pace.checkpoints.packed_file import PARTIAL
from pace.llm import LLMModel, SamplingConfig
from tests.checkpoints.quantized.models import save_quantized
from tests.editing import edit_tensors
from tests.llm.forked import run_each
from tests.llm.models.families.test_expert_forms import in_mxfp4
from tests.llm.models.variants import save_tiny

IDS = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
INT4 = {"quantization": "int4"}
MAPPED = {"weights": "mapped"}


def logits(folder, ids=IDS, **options):
    with LLMModel(folder, progress=False, **options) as model, model.session() as session:
        return session.append(ids, logits="all")


def caches(folder):
    return sorted(folder.glob("*.experts"))


@pytest.fixture
def qwen(tmp_path):
    save_tiny(tmp_path / "qwen", "qwen3_moe", {})
    return tmp_path / "qwen"


@pytest.fixture
def gpt_oss(tmp_path):
    """Returns the folder of a tiny gpt-oss, with biases and MXFP4 experts."""
    folder = tmp_path / "gpt_oss"
    save_tiny(folder, "gpt_oss", {"hidden_size": 64, "intermediate_size": 96})
    in_mxfp4(folder)
    return folder


@pytest.mark.usefixtures("restore_isa_and_threads")
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("options", [INT4, {"quantization": "int8", "backend": "native-eager"}], ids=str)
def test_bits_are_those_of_weights_in_memory(qwen, options, threads):
    for ids in ([7], IDS, IDS * 4):
        expected = logits(qwen, ids, **options)
        assert torch.equal(logits(qwen, ids, num_threads=threads, **options, **MAPPED), expected)


def test_experts_that_come_quantised_are_mapped(gpt_oss):
    expected = logits(gpt_oss)
    assert torch.equal(logits(gpt_oss, **MAPPED), expected)
    assert torch.equal(logits(gpt_oss, **MAPPED), expected)
    assert len(caches(gpt_oss)) == 1


@pytest.mark.parametrize("kind", ["Q4_K", "MXFP4"])
def test_experts_of_a_gguf_file_are_mapped(tmp_path, kind):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tests.checkpoints.gguf.files import write_gguf

    save_tiny(tmp_path / "hub", "qwen3_moe", {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 4})
    path = tmp_path / "model.gguf"
    write_gguf(tmp_path / "hub", path, lambda name: kind if "_exps" in name else "F16")
    expected = logits(path)
    for _ in range(2):  # the first run packs, the second does not
        assert torch.equal(logits(path, **MAPPED), expected)
    assert len(caches(tmp_path)) == 1


@pytest.mark.parametrize("kind", ["awq", "fp8"])
def test_experts_of_a_quantised_checkpoint_are_mapped(tmp_path, kind):
    folder = save_quantized(tmp_path, kind, "qwen3_moe")
    expected = logits(folder)
    assert torch.equal(logits(folder, **MAPPED), expected)
    assert len(caches(folder)) == 1


@pytest.mark.usefixtures("restore_isa_and_threads")
def test_one_file_serves_every_instruction_set(qwen):
    logits(qwen, **INT4, **MAPPED)
    stamp = caches(qwen)[0].stat().st_mtime_ns
    for isa in ("generic", "avx2"):
        _C.select_isa(isa)
        assert torch.equal(logits(qwen, **INT4, **MAPPED), logits(qwen, **INT4))
    assert caches(qwen)[0].stat().st_mtime_ns == stamp


def test_rows_keep_their_bits_among_others(qwen):
    with LLMModel(qwen, progress=False, **INT4, **MAPPED) as model:
        prompts, config = [IDS[:4], IDS, IDS[3:9]], SamplingConfig(max_new_tokens=12, ignore_eos=True)
        together = model.generate(prompts, config).generated_token_ids
        assert together == [model.generate(prompt, config).generated_token_ids[0] for prompt in prompts]


# -- the file


def test_the_second_load_reads_no_expert(qwen, reads):
    first = logits(qwen, **INT4, **MAPPED)
    assert any(".experts." in name for name in reads)
    stamp = caches(qwen)[0].stat()
    reads.clear()
    assert torch.equal(logits(qwen, **INT4, **MAPPED), first)
    assert reads and not any(".experts." in name for name in reads)
    assert caches(qwen)[0].stat() == stamp


def test_a_changed_checkpoint_gets_a_new_file(qwen, reads):
    first = logits(qwen, **INT4, **MAPPED)
    path = qwen / "model.safetensors"
    before = path.stat()
    with edit_tensors(qwen) as state:
        state["model.layers.0.mlp.experts.0.up_proj.weight"] *= -1
    assert path.stat().st_size == before.st_size
    changed = logits(qwen, **INT4, **MAPPED)
    assert torch.equal(changed, logits(qwen, **INT4)) and not torch.equal(changed, first)
    assert len(caches(qwen)) == 1
    for touched in (path, qwen / "config.json"):
        os.utime(touched, ns=(0, 0))
        reads.clear()
        assert torch.equal(logits(qwen, **INT4, **MAPPED), changed)
        assert any(".experts." in name for name in reads)


def damage_header(path, offset):
    """Changes the sizes in the header of the second expert."""
    with open(path, "r+b") as file:
        file.seek(offset)
        assert file.read(4) == b"PACE"
        file.seek(offset + 16)
        file.write((1 << 20).to_bytes(8, "little"))


def test_a_damaged_file_is_written_anew(qwen, caplog):
    expected = logits(qwen, **INT4, **MAPPED)
    [path] = caches(qwen)
    damage_header(path, 2 * 4096)
    assert torch.equal(logits(qwen, **INT4, **MAPPED), expected)
    assert "is damaged" in caplog.text
    os.truncate(path, path.stat().st_size // 2)
    assert torch.equal(logits(qwen, **INT4, **MAPPED), expected)
    assert "not whole" in caplog.text


def test_each_plan_has_a_file(qwen):
    for format in ("int4", "int8", "int4"):
        assert torch.equal(logits(qwen, quantization=format, **MAPPED), logits(qwen, quantization=format))
    assert len(caches(qwen)) == 2


def test_models_of_one_name_share_a_folder(qwen, tmp_path, reads):
    other = tmp_path / "elsewhere" / "qwen"
    save_tiny(other, "qwen3_moe", {"num_experts_per_tok": 2})
    folder = tmp_path / "cache"
    for model in (qwen, other):
        logits(model, weights_cache=folder, **INT4, **MAPPED)
    reads.clear()
    for model in (qwen, other):
        assert torch.equal(logits(model, weights_cache=str(folder), **INT4, **MAPPED), logits(model, **INT4))
        assert not caches(model)
    assert len(caches(folder)) == 2


def test_a_damaged_checkpoint_leaves_no_file(qwen):
    with edit_tensors(qwen) as state:
        state["model.layers.1.mlp.experts.2.down_proj.weight"][0, 0] = torch.nan
    with pytest.raises(ValueError, match="cannot be quantised"):
        logits(qwen, **INT4, **MAPPED)
    assert not caches(qwen) and not list(qwen.glob("*" + PARTIAL))


def test_a_folder_that_cannot_be_written_is_told(qwen):
    with pytest.raises(OSError, match="cannot be written.*give weights_cache= another folder"):
        logits(qwen, weights_cache=qwen / "config.json", **INT4, **MAPPED)


# -- experts that cannot be mapped


def test_what_has_no_such_experts_is_refused_by_name(qwen):
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        LLMModel(TINY, progress=False, **INT4, **MAPPED)
    with pytest.raises(ValueError, match="those of this checkpoint are floats"):
        LLMModel(qwen, progress=False, **MAPPED)


def test_stacks_that_are_floats_stay_in_memory_beside_mapped_ones(qwen):
    config = {"format": "int4", "overrides": {"*.0.mlp.experts.*": None}}
    with LLMModel(qwen, progress=False, quantization=config, **MAPPED) as model, model.session() as session:
        found = session.append(IDS, logits="all")
        first, second = (layer.mlp.gate_up for layer in model._model.layers)
        assert first.in_file is None and second.in_file is second.stack
        assert model.memory_report().mapped == second.stack.nbytes + model._model.layers[1].mlp.down.stack.nbytes
    assert torch.equal(found, logits(qwen, quantization=config))


# -- larger than memory

LIMITED = """
import re, resource, sys
import torch
from pace.assets import TINY
from pace.llm import LLMModel

with LLMModel(TINY, progress=False, num_threads=1):
    pass  # what the first model imports is there before the limit holds
folder, room, weights, out = arguments
taken = int(re.search(r"VmData:\\s*(\\d+)", open("/proc/self/status").read())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (taken + room, taken + room))
options = {"quantization": "int8", "weights": weights, "progress": False, "num_threads": 1}
try:
    with LLMModel(folder, **options) as model, model.session() as session:
        torch.save(session.append([3, 14, 15, 92, 65, 35], logits="all"), out)
except MemoryError as error:
    print(error)
    sys.exit(3)
"""
ROOM = 32 << 20
"""Memory in addition to that of Python and the libraries. The experts are 48 MiB, the checkpoint is 97 MiB."""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 64, "num_hidden_layers": 4}
    save_tiny(folder, "qwen3_moe", sizes)
    with edit_tensors(folder) as state:
        state |= {name: tensor.bfloat16() for name, tensor in state.items()}
    yield folder
    shutil.rmtree(folder)


def test_a_mixture_larger_than_a_limit_is_refused_with_numbers_or_runs_from_the_file(large, tmp_path):
    runs = [("memory", "none"), ("mapped", "first"), ("mapped", "second")]  # the first packs, the second does not
    programs = [f"arguments = {(str(large), ROOM, weights, str(tmp_path / out))}\n{LIMITED}" for weights, out in runs]
    refused, *mapped = run_each(programs)
    assert refused.code == 3, refused.err
    assert "the weights take 0.05 GiB in quantised form, but only 0.0" in refused.out
    assert 'load with weights="mapped", which leaves 0.05 GiB of experts in a file' in refused.out
    expected = logits(large, [3, 14, 15, 92, 65, 35], quantization="int8")
    for ran, (_, out) in zip(mapped, runs[1:], strict=True):
        assert ran.code == 0, ran.out + ran.err
        assert torch.equal(torch.load(tmp_path / out), expected)
    assert caches(large)[0].stat().st_size > ROOM
