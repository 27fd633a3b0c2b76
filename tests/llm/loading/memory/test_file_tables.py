"""Embedding tables that stay in their file: any format gives its own values, and no page stays in memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pace.checkpoints.gguf.checkpoint import GgufCheckpoint
from pace.checkpoints.quantized import read_quant_method
from pace.checkpoints.reader import CheckpointReader
from pace.llm import LLMModel, SamplingConfig
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.loading.fill import open_table
from pace.ops import native
from tests.checkpoints.quantized.models import save_quantized
from tests.llm.models.variants import save_tiny

ROWS, WIDTH = 1 << 15, 1024
"""64 MiB in bfloat16."""


def resident_bytes(path: Path) -> int:
    """Bytes of a file that are mapped in this process and in memory."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith(str(path))
        elif found and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_a_table_that_is_read_as_a_whole_never_becomes_resident(tmp_path, file):
    matrix = torch.arange(ROWS)[:, None].expand(ROWS, WIDTH).remainder(251).bfloat16().contiguous()
    if file.endswith("bin"):
        torch.save({"table": matrix}, tmp_path / file)
    else:
        save_file({"other": torch.ones(3), "table": matrix}, tmp_path / file)
    with CheckpointReader(tmp_path) as reader:
        table = open_table(native, reader, "table")
    assert (table.n, table.k, table.nbytes) == (ROWS, WIDTH, matrix.nbytes)
    most = 0
    for ids in torch.randperm(ROWS).split(256):
        assert torch.equal(table.rows(ids), matrix[ids].float())
        most = max(most, resident_bytes(tmp_path / file))
    assert most < 2 << 20  # the pages around 256 rows are up to 16 MiB, were they kept
    with pytest.raises(ValueError, match=rf"ids must be in 0..{ROWS - 1}; got {ROWS}..{ROWS}"):
        table.rows(torch.tensor([ROWS]))


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K", "F16", "BF16"])
def test_rows_of_gguf_tables_have_the_values_of_the_file(tmp_path, kind):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tests.checkpoints.gguf.files import write_gguf

    save_tiny(tmp_path / "hub", "qwen3", {"hidden_size": 256})
    types = lambda name: kind if "token_embd" in name else "F16"
    expected = write_gguf(tmp_path / "hub", tmp_path / "model.gguf", types)
    with GgufCheckpoint(tmp_path / "model.gguf") as reader:
        table = open_table(native, reader, "model.embed_tokens.weight")
    ids = torch.tensor([98, 3, 3, 0, 41])
    assert torch.equal(table.rows(ids), expected["model.embed_tokens.weight"][ids])
    assert table.rows(ids[:0]).shape == (0, 256)


def test_rows_of_quantised_matrices_have_the_values_of_the_checkpoint(tmp_path):
    folder = save_quantized(tmp_path, "gptq", "qwen3")
    checkpoint, name = Checkpoint(folder), "model.layers.0.mlp.up_proj.weight"
    with checkpoint.open_weights(read_quant_method(checkpoint.config["quantization_config"])) as reader:
        expected = reader.read(name).dequantize()
        table = open_table(native, reader, name)
    ids = torch.tensor([5, 0, 5, 17])
    assert torch.equal(table.rows(ids), expected[ids])


def test_a_report_counts_the_table_as_a_file(tmp_path):
    save_tiny(tmp_path, "gemma4_text", {"vocab_size_per_layer_input": 500})
    with LLMModel(tmp_path, progress=False) as model:
        report = model.memory_report()
        assert report.mapped == 500 * 7 * 8 * 4 and "FileEmbedding" not in report.weights
        model.generate([3, 4, 5], SamplingConfig(max_new_tokens=3))
