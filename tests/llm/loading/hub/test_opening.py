"""Models of a fake Hub in this process are opened by name, or refused before their weights are downloaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace import cli  # noqa: E402
from pace.assets import TINY, TINY_DRAFT  # noqa: E402
from pace.llm import DraftModelConfig, LLMModel, SamplingConfig  # noqa: E402
from pace.llm.loading import hub as hub_module  # noqa: E402
from pace.llm.loading import load, memory, model  # noqa: E402
from pace.llm.loading.options import LoadOptions  # noqa: E402
from pace.server.fingerprint import fingerprint  # noqa: E402
from pace.tokenizer.loading import load_tokenizer  # noqa: E402
from tests.checkpoints.gguf.files import add_tokenizer, write_gguf  # noqa: E402

GREEDY = SamplingConfig(max_new_tokens=8)
SMALL = {"progress": False, "kv_cache_bytes": "4MiB"}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Returns the bundled model as GGUF files: one whole file, and one in shards."""
    folder = tmp_path_factory.mktemp("tiny")
    for kind, shard in (("F16", 0), ("Q8_0", 40)):
        add = lambda writer: add_tokenizer(writer, load_tokenizer(TINY), "gpt-2")
        write_gguf(Path(TINY), folder / f"tiny-{kind}.gguf", kind, add, tensors_a_shard=shard)
    return contents(folder)


@pytest.fixture
def repos(hub, tiny, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    shards = {f"Q8_0/{name}": content for name, content in tiny.items() if "Q8_0" in name}
    hub.repos |= {"org/tiny": contents(Path(TINY)), "org/draft": contents(Path(TINY_DRAFT)),
                  "org/tiny-GGUF": {"tiny-F16.gguf": tiny["tiny-F16.gguf"], **shards}}  # fmt: skip
    return hub.repos


def with_config(repos, **changes: object) -> None:
    config = json.loads(repos["org/tiny"]["config.json"]) | changes
    repos["org/tiny"] = repos["org/tiny"] | {"config.json": json.dumps(config).encode()}


@pytest.mark.usefixtures("repos")
def test_models_by_name(tmp_path):
    with LLMModel(TINY, **SMALL) as model:
        expected = model.generate("Once upon a time", GREEDY).texts
    for name, options in (
        ("org/tiny", {}),
        ("org/tiny:f16", None),
        ("org/tiny-GGUF:F16", {"revision": "v1"}),
        ("org/tiny-GGUF:F16", {"spec_config": DraftModelConfig("org/tiny-GGUF:Q8_0", revision="v1")}),
        ("org/tiny-GGUF:q8_0", {"tokenizer_name_or_path": "org/tiny", "spec_config": DraftModelConfig("org/draft")}),
    ):
        if options is None:
            with pytest.raises(FileNotFoundError, match="org/tiny has no GGUF file"):
                LLMModel(name)
            continue
        with LLMModel(name, **options, **SMALL) as model:
            texts = model.generate("Once upon a time", GREEDY).texts
        assert texts == expected or "q8_0" in name and texts
        read = fingerprint(LoadOptions(name, **options))
        assert read == fingerprint(LoadOptions(name, **options)) and read.startswith("fp_")


def test_the_command_line_takes_names_and_quants(repos, hub, capsys):
    command = ["generate", "--model", "org/tiny-GGUF:f16", "--revision", "v1", "--draft", "org/tiny-GGUF:Q8_0"]
    assert cli.main([*command, "--max-new-tokens", "4", "Once upon a time"]) == 0
    assert capsys.readouterr().out.strip() and set(hub.downloads) == {*repos["org/tiny-GGUF"]}


# -- refused before the download ---------------------------------------------------------------------------------------


def assert_no_weights(hub) -> None:
    assert not [name for name in hub.downloads if name.endswith((".safetensors", ".bin"))]


def without_memory(monkeypatch) -> None:
    for module in (model, memory):
        monkeypatch.setattr(module, "available_memory_bytes", lambda kept=0: 1000)


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, {}, NotImplementedError, "MambaForCausalLM"),
     ({"hidden_act": "unheard"}, {}, NotImplementedError, "unheard"),
     ({"hidden_size": -1}, {}, ValueError, "hidden_size"),
     ({"quantization_config": {"quant_method": "unheard"}}, {}, NotImplementedError, "unheard"),
     ({}, {"max_seq_len": 1 << 20}, ValueError, "max_seq_len"), ({}, {"kv_cache_bytes": 64}, ValueError, "kv_cache_"),
     ({}, {"weights": "mapped"}, ValueError, "experts"),
     ({}, {"dtype": "float32"}, MemoryError, "GiB of memory are free")],
    ids=str,
)  # fmt: skip
def test_what_config_json_shows_is_told_before_weights_come(changes, options, error, message, repos, hub, monkeypatch):
    with_config(repos, **changes)
    if error is MemoryError:
        without_memory(monkeypatch)
    with pytest.raises(error, match=message):
        LLMModel("org/tiny", **{"progress": False, **options})
    assert "config.json" in hub.downloads
    assert_no_weights(hub)


def test_a_draft_model_is_checked_before_its_weights_come(repos, hub):
    with_config(repos, architectures=["MambaForCausalLM"], model_type="mamba")
    with pytest.raises(NotImplementedError, match="MambaForCausalLM"):
        LLMModel(TINY, spec_config=DraftModelConfig("org/tiny"), **SMALL)
    assert_no_weights(hub)
    with pytest.raises(NotImplementedError, match="MambaForCausalLM"):
        load.load_model(LoadOptions("org/tiny", progress=False))
    assert_no_weights(hub)


def spoilt(content: bytes, what: str) -> bytes:
    """Returns a GGUF file of an unknown architecture, or with a tensor of an unknown type."""
    if what == "architecture":
        return content.replace(b"llama", b"lhama")
    name = next(name for name in (b"blk.0.ffn_up.weight", b"blk.0.attn_q.weight") if name in content)
    at = content.index(name) + len(name) + 4 + 2 * 8
    return content[:at] + b"\x63" + content[at + 1 :]


@pytest.mark.parametrize("quant", ["F16", "Q8_0"], ids=["one file", "shards"])
@pytest.mark.parametrize(
    ("what", "options", "error", "message"),
    [("architecture", {}, NotImplementedError, "org/tiny-GGUF/.*gguf.*'lhama'"),
     ("type", {}, NotImplementedError, "org/tiny-GGUF/.*gguf.*type 99"), ("memory", {}, MemoryError,
      "of memory are free"),
     ("option", {"max_seq_len": 1 << 20}, ValueError, "max_seq_len"),
     ("option", {"kv_cache_bytes": 64}, ValueError, "kv_cache_bytes")],
    ids=str,
)  # fmt: skip
def test_the_header_of_a_gguf_file_is_read_first(what, options, error, message, quant, repos, hub, monkeypatch):
    if quant == "Q8_0" and what in ("memory", "option"):
        pytest.skip("one shard does not say what all take")
    if what == "memory":
        without_memory(monkeypatch)
    repos["org/tiny-GGUF"] = {
        name: spoilt(content, what) if what in ("architecture", "type") and "00002-of" not in name else content
        for name, content in repos["org/tiny-GGUF"].items()
    }
    monkeypatch.setattr(hub_module, "HEADER_BYTES", 1 << 18)
    with pytest.raises(error, match=message):
        LLMModel(f"org/tiny-GGUF:{quant}", **SMALL | options)
    assert hub.ranges == [f"bytes=0-{(1 << 18) - 1}"] and set(hub.sent.values()) == {1 << 18}


def test_a_hub_that_sends_no_parts_of_files(repos, hub, monkeypatch):
    hub.ignores_ranges = True
    monkeypatch.setattr(hub_module, "HEADER_BYTES", 1 << 18)
    repos["org/tiny-GGUF"] = {"m.gguf": spoilt(repos["org/tiny-GGUF"]["tiny-F16.gguf"], "architecture")}
    with pytest.raises(NotImplementedError, match="lhama"):
        LLMModel("org/tiny-GGUF", **SMALL)
    assert not hub.ranges[1:]


@pytest.mark.parametrize("header_bytes", [1 << 18, 1000], ids=["enough", "too few"])
def test_a_gguf_file_whose_header_is_read_first_opens(header_bytes, hub, repos, monkeypatch):
    monkeypatch.setattr(hub_module, "HEADER_BYTES", header_bytes)
    with LLMModel("org/tiny-GGUF:F16", **SMALL) as model:
        assert model.generate("Once", GREEDY).texts
    assert hub.ranges == [f"bytes=0-{header_bytes - 1}"]
    hub.ranges.clear()
    LLMModel("org/tiny-GGUF:F16", **SMALL).close()
    assert not hub.ranges, "it is here now"
