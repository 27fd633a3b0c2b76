"""Refusals of `quantize_checkpoint` and `pace quantize`, before anything is read, and without leaving any files."""

from __future__ import annotations

import json
import shutil

import pytest

from pace.assets import TINY
from pace.calibrate import job
from pace.calibrate.job import Job
from pace.cli import main
from pace.llm import QuantizationConfig
from tests.calibrate.inputs import HELDOUT, quantize_checkpoint, texts, tokens
from tests.llm.models.variants import save_tiny

pytest.importorskip("transformers")


NOTHING = QuantizationConfig("int4", embedding=None, overrides={"*": None})
RTN = {"method": "rtn", "calibrate": None}
AWQ_ROUNDS = "the method awq rounds all at once; leave it out, or take one of gptq, awq.gptq, smoothquant.gptq"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"calibrate": None}, "needs a text to calibrate on"),
        ({"calibrate": ["Once upon a time"]}, "has 0 tokens; at least 256|has . tokens; at least 256"),
        ({"calibrate": [""]}, "at least 256"),
        ({"quantization": "nf4"}, "nf4 needs no calibration"),
        ({"quantization": "int5"}, "no format 'int5'"),
        ({"quantization": None}, "say what the checkpoint is to become"),
        ({"quantization": QuantizationConfig("int4", symmetric=False)}, "zero points"),
        ({"quantization": QuantizationConfig("int4", lm_head="fp8")}, "fp8 needs no calibration"),
        ({"quantization": QuantizationConfig("int4", overrides={"*.nothing": None})}, "no module matches"),
        ({"quantization": NOTHING}, "nothing to quantise"),
        ({"method": "magic"}, "no method 'magic'; known are rtn"),
        ({"max_tokens": 10}, "max_tokens must be at least 256"),
        ({"context": 5000}, "context must be from 2 to the 1024"),
        ({"method": "awq", "act_order": False}, AWQ_ROUNDS),
        ({"quantization": "int8", "act_order": True}, "the method smoothquant rounds all at once"),
        ({**RTN, "act_order": False}, "the method rtn rounds all at once"),
        ({**RTN, "context": 64}, "^context would have no effect: there is no text to read"),
        ({**RTN, "max_tokens": 512, "tokenizer_name_or_path": TINY}, "^max_tokens and tokenizer_name_or_path would"),
        ({"method": "rtn"}, "the text would have no effect: .* the report is turned off"),
        ({"out": "taken"}, "taken exists already"),
        ({"method": "rtn", "report": True, "max_tokens": 512}, "max_tokens=512 would have no effect"),
    ],
    ids=str,
)
def test_what_is_refused(arguments, message, tmp_path):
    (tmp_path / "taken").mkdir()
    arguments = {"quantization": "int4", "calibrate": texts(0, 20), "out": "out", **arguments}
    out = tmp_path / arguments.pop("out")
    with pytest.raises(FileExistsError if out.exists() else ValueError, match=message):
        quantize_checkpoint(TINY, out, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"], "nothing is left behind"


def test_quantised_checkpoints_are_refused(tmp_path):
    quantize_checkpoint(TINY, tmp_path / "once", "int8", method="rtn")
    with pytest.raises(ValueError, match="quantised already"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", "int8", method="rtn")
    config = json.loads((tmp_path / "once" / "config.json").read_text())
    early = config | {"compression_config": config["quantization_config"]}  # its name in early checkpoints
    both = early | {"quantization_config": early.pop("quantization_config")}
    (tmp_path / "once" / "config.json").write_text(json.dumps(early))
    with pytest.raises(ValueError, match="quantised already"):
        quantize_checkpoint(tmp_path / "once", tmp_path / "twice", "int8", method="rtn")
    (tmp_path / "once" / "config.json").write_text(json.dumps(both))
    assert main(["eval", str(tmp_path / "once"), "--text", str(HELDOUT), "--against", "bf16"]) == 1


def test_gguf_files_are_refused_by_name(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ValueError, match="model.gguf is a GGUF file.*original"):
        quantize_checkpoint(tmp_path / "model.gguf", tmp_path / "out", "int8")  # before a calibration text is missed


LAYER = 4 * (256 * 512 + 256 * 256 + 3 * 256 * 640 + 2 * 256)
MEMORY = {"gptq": LAYER + 44 * 640**2 + 4 * 512 * 256, "awq": LAYER + 4 * 512 * 256, "rtn": LAYER}
"""Minimum memory in bytes for the bundled model and 512 tokens of text. It has room for a layer, GPTQ's matrices
for the MLP's 640 inputs, and the hidden states. A layer is queries, keys and values, output, MLP and two norms."""


@pytest.mark.parametrize("method", MEMORY)
def test_too_little_memory_is_refused_before_anything_is_read(method, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "available_memory_bytes", lambda: MEMORY[method] - 1)
    monkeypatch.setattr(Job, "run", lambda *arguments: pytest.fail("it began"))
    options = {} if method == "rtn" else {"calibrate": tokens(20, 256), "context": 256, "max_tokens": 512}
    told = f"quantising takes {MEMORY[method] / 2**20:.1f} MiB of memory at least"
    with pytest.raises(MemoryError, match=told) as raised:
        quantize_checkpoint(TINY, tmp_path / "out", "int4", method=method, **options)
    message = str(raised.value)
    assert "decoder layer in float32" in message and message.endswith("free some memory")
    assert not list(tmp_path.iterdir())
    assert ("512 tokens 512.0 KiB" in message and "fewer tokens (max_tokens)" in message) == (method != "rtn")
    assert ("without GPTQ (method='awq'" in message) == (method == "gptq")


@pytest.mark.parametrize(("more", "warned"), [(0, True), (1 << 30, False)])
def test_memory_that_may_not_be_enough_is_warned_of(more, warned, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(job, "available_memory_bytes", lambda: MEMORY["rtn"] + more)
    quantize_checkpoint(TINY, tmp_path / "out", "int4", method="rtn")
    assert ("should the system end the process" in caplog.text) == warned


def test_an_embedding_larger_than_a_layer_is_counted(tmp_path, token_ids, monkeypatch):
    save_tiny(tmp_path / "float", "llama", {"vocab_size": 9000, "hidden_size": 64, "tie_word_embeddings": True})
    monkeypatch.setattr(job, "available_memory_bytes", lambda: 9000 * 64 * 4)
    with pytest.raises(MemoryError, match="the embedding 2.2 MiB"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "out", "int8", tokens(20, 40), method="smoothquant")


def test_a_disk_without_room_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1 << 20))
    monkeypatch.setattr(Job, "run", lambda *arguments: pytest.fail("it began"))
    told = "the file takes 2.4 MiB, and its disk has 1.0 MiB left; free some, or write to another"
    with pytest.raises(OSError, match=told):
        quantize_checkpoint(TINY, tmp_path / "out", "int4", method="rtn")
    assert not list(tmp_path.iterdir())


def test_what_fails_leaves_nothing_behind(tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "quantize_part", fail)
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(TINY, tmp_path / "out", "int8", texts(0, 20))
    assert not list(tmp_path.iterdir())


def test_the_command_refuses_options_without_effect(tmp_path, capsys):
    for option in (["--no-act-order"], ["--act-order"], ["--context", "64"], ["--tokens", "512"]):
        assert main(["quantize", str(TINY), str(tmp_path / "out"), "--method", "rtn", *option]) == 1
        assert f"pace: error: {option[0]}" in capsys.readouterr().err
