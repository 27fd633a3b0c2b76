"""Peak memory of loading, measured in separate processes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.load import measure, write_checkpoint
from tests.plugins.tiers import sample

# 27 million parameters, 22 million of them in the embedding. A loader that maps whole tensors fails on such a large
# float32 matrix in a small model.
SIZES = {
    "vocab_size": 50000,
    "hidden_size": 448,
    "intermediate_size": 1200,
    "num_hidden_layers": 2,
    "num_attention_heads": 7,
    "num_key_value_heads": 1,
}
# In addition to the weights: a piece of 4 MB for each of two threads, and allocations at the first use of the kernels.
OVERHEAD_BYTES = 48 << 20


CASES = [
    ("safetensors", torch.float32, "bfloat16"),
    ("bin", torch.bfloat16, "nf4"),
    ("bin-legacy", torch.float32, "bfloat16"),
    ("safetensors-sharded", torch.bfloat16, "fp8"),
    ("safetensors-sharded", torch.bfloat16, "bfloat16"),
    ("bin", torch.float32, "bfloat16"),
    ("safetensors", torch.bfloat16, "float32"),
    ("safetensors", torch.bfloat16, "int8"),
    ("safetensors", torch.float32, "int4"),
]
"""Kind of files, stored dtype, and loaded format. The first two cover safetensors and pickles, floats and codes."""


@pytest.mark.parametrize("case", sample(CASES, always=CASES[:2].__contains__), ids=str)
def test_peak_memory_is_the_weights_and_little_more(case, tmp_path):
    kind, stored, dtype = case
    write_checkpoint(tmp_path / "model", stored, kind, **SIZES)
    check_peak(tmp_path / "model", dtype)


@pytest.mark.parametrize("kind", sample(["Q4_0", "Q5_1", "F16"], always="Q4_0".__eq__))
def test_peak_memory_of_gguf_files(kind, tmp_path):
    pytest.importorskip("gguf", reason="the gguf package is not installed")
    from tests.checkpoints.gguf.files import write_gguf

    write_checkpoint(tmp_path / "model", torch.bfloat16, "safetensors", **SIZES)
    (tmp_path / "file").mkdir()
    write_gguf(
        tmp_path / "model", tmp_path / "file" / "model.gguf", lambda name: "F16" if "down_proj" in name else kind
    )  # 1200 is not a multiple of a block
    check_peak(tmp_path / "file", "bfloat16")


def check_peak(path, dtype):
    row = measure(path, dtype, num_threads=2)
    assert row["peak_bytes"] <= row["bound_bytes"], "the promise: 1.1 times the weights + 300 MB"
    above_start = row["peak_bytes"] - row["start_bytes"]
    assert above_start <= 1.1 * row["weights_bytes"] + OVERHEAD_BYTES
    assert above_start >= 0.9 * row["weights_bytes"], "this does not measure the load"
