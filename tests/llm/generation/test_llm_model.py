"""`LLMModel`: arguments that it refuses, its lengths, a model without a tokenizer, and closing."""

from __future__ import annotations

import shutil

import pytest

from pace.checkpoints.reader import CheckpointReader
from pace.llm import GenerateOutput, LLMModel, SamplingConfig
from pace.llm.loading import checkpoint as checkpoint_module
from tests.llm.generation.loaded import GREEDY


def test_what_is_not_there_is_refused(checkpoint) -> None:
    for name, value, error, word in [
        ("kv_cache_type", "ring", ValueError, "kv_cache_type"),
        ("spec_config", {}, TypeError, "spec_config"),
        ("quantization", "int3", ValueError, "int3"),
        ("backend", "cuda", ValueError, "backend"),
        ("dtype", "int3", ValueError, "dtype"),
        ("max_seq_len", 100_000, ValueError, "max_seq_len"),
        ("max_seq_len", 0, ValueError, "max_seq_len"),
        ("max_seq_len", True, TypeError, "max_seq_len"),
        ("num_threads", 0, ValueError, "num_threads"),
        ("tokenizer_name_or_path", "/nowhere/at/all", FileNotFoundError, "nowhere"),
    ]:
        with pytest.raises(error, match=word):
            LLMModel(checkpoint("llama")[0], **{"backend": "torch", "progress": False, name: value})


def test_max_seq_len_bounds_a_sequence(checkpoint) -> None:
    model = LLMModel(checkpoint("llama")[0], max_seq_len=20, dtype="fp32", backend="torch", progress=False)
    assert model.generate([5], GREEDY).output_token_ids.shape == (1, 20)
    with pytest.raises(ValueError, match="20"):
        model.generate([5] * 20, GREEDY)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "error"),
    [
        ("generation_config.json", '{"temperature": -1}', {}, ValueError),
        ("tokenizer.json", "{", {}, ValueError),
        ("chat_template.json", "[]", {}, ValueError),
        ("unused", "", {"max_seq_len": 10**6}, ValueError),
        ("unused", "", {"num_threads": 0}, ValueError),
        ("unused", "", {"tokenizer_name_or_path": "./nowhere"}, FileNotFoundError),
    ],
)
def test_small_things_are_checked_before_weights_are_read(
    checkpoint, tmp_path, monkeypatch, name, content, arguments, error
) -> None:
    folder, reads = shutil.copytree(checkpoint("llama")[0], tmp_path / "model"), []
    (folder / name).write_text(content)
    reader = lambda directory: reads.append(directory) or CheckpointReader(directory)
    monkeypatch.setattr(checkpoint_module, "CheckpointReader", reader)
    with pytest.raises(error):
        LLMModel(folder, progress=False, **arguments)
    assert not reads
    LLMModel(checkpoint("llama")[0], progress=False).close()
    assert reads


def test_a_model_without_a_tokenizer_takes_ids(checkpoint, tmp_path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint("llama")[0] / name, tmp_path / name)
    options = {"dtype": "fp32", "backend": "torch", "progress": False}
    model = LLMModel(tmp_path, **options)
    out = model.generate([5, 6], GREEDY)
    assert model.tokenizer is None and out.texts == [] and isinstance(out, GenerateOutput)
    with pytest.raises(ValueError, match="no tokenizer"):
        model.generate("text")
    with pytest.raises(ValueError, match="tokenizer"):
        model.stream([5])
    with pytest.raises(ValueError, match="stop_strings"):
        model.generate([5], SamplingConfig(stop_strings="x"))
    other = LLMModel(tmp_path, tokenizer_name_or_path=checkpoint("llama")[0], **options)
    assert other.generate("fox", GREEDY).texts


def test_close_frees_and_tells(checkpoint) -> None:
    with LLMModel(checkpoint("llama")[0], dtype="fp32", backend="torch", progress=False) as model:
        report = model.memory_report()
        assert report.total == sum(report.weights.values()) + report.cache_touched > 0 and report.process > report.total
        assert "weights" in str(report)
        assert model.get_tokenizer() is model.tokenizer and model.get_config() is model.config
    for call in (lambda: model.generate([5]), model.session, model.memory_report, lambda: model.score([5])):
        with pytest.raises(ValueError, match="closed"):
            call()
