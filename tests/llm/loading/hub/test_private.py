"""Opening local files sends nothing to the network: a Hub that records every request receives none."""

from __future__ import annotations

import json
import pickle
import shutil
import socket
from pathlib import Path

import pytest

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed")
pytest.importorskip("transformers")

from pace.assets import TINY  # noqa: E402
from pace.llm import LLMModel  # noqa: E402
from pace.llm.loading.find import find_checkpoint  # noqa: E402
from pace.llm.loading.options import LoadOptions  # noqa: E402
from pace.server.fingerprint import fingerprint  # noqa: E402
from pace.tokenizer.loading import load_tokenizer  # noqa: E402
from tests.checkpoints.gguf.files import add_tokenizer, write_gguf  # noqa: E402
from tests.editing import change_json  # noqa: E402
from tests.llm.models.variants import save_tiny  # noqa: E402
from tests.llm.text.tokenizer_zoo import sentencepiece  # noqa: E402

MORE = 100_100
"""Number of extra tokens. transformers asks the Hub about tokenizers of more than 100,000 tokens, to fix some of
Mistral's."""


def with_many_tokens(folder: Path, tokenizer, **config: object) -> Path:
    """Saves the tokenizer with `MORE` unused tokens, and returns the folder."""
    tokenizer.save_pretrained(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    taken = len(tokenizer)
    state["model"]["vocab"] |= {f"filler{index}": taken + index for index in range(MORE)}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    change_json(folder / "tokenizer_config.json", **config)
    return folder


def as_gguf(path: Path, tokenizer, pre: str | None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, tokenizer, pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    return path


FORMS = {
    "bytes.gguf": ("gpt-2", {}),
    "pieces.gguf": (None, {}),
    "org/llama": ("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}),
    "org/mistral": ("mistral", {"tokenizer_class": "LlamaTokenizerFast"}),
    "unnamed": (None, {"tokenizer_class": None}),
}
"""The checkpoints to open. GGUF files: the kind of pre-tokenizer. Directories: the model_type and tokenizer
settings."""


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Returns a folder with all forms. Their relative paths look like repository ids."""
    folder = tmp_path_factory.mktemp("forms")
    by_bytes = with_many_tokens(folder / "by_bytes", load_tokenizer(TINY))
    as_gguf(folder / "bytes.gguf", load_tokenizer(by_bytes), FORMS["bytes.gguf"][0])
    by_pieces = with_many_tokens(folder / "by_pieces", sentencepiece())
    as_gguf(folder / "pieces.gguf", load_tokenizer(by_pieces), None)
    for name, (model_type, settings) in FORMS.items():
        if not name.endswith(".gguf"):
            shutil.copytree(by_bytes, folder / name)
            change_json(folder / name / "tokenizer_config.json", **settings)
            if model_type:
                (folder / name / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.fixture
def silence(request, hub, monkeypatch):
    """Yields True if HF_HUB_OFFLINE is set. Fails if this process looked up a host or connected to one, or if the Hub
    received a request."""
    from huggingface_hub import constants

    is_offline = getattr(request, "param", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    asked, connect, look_up = [], socket.socket.connect, socket.getaddrinfo
    monkeypatch.setattr(socket.socket, "connect", lambda self, where: (asked.append(where), connect(self, where))[1])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **how: (asked.append(where), look_up(*where, **how))[1])
    yield is_offline
    assert asked == [] and hub.asked == []


@pytest.mark.parametrize(
    ("name", "silence"), [*((name, False) for name in FORMS), ("bytes.gguf", True)], indirect=["silence"]
)
def test_the_hub_hears_nothing_of_a_tokenizer(name, forms, silence, monkeypatch):
    monkeypatch.chdir(forms)
    path = str(forms / name) if silence else name  # offline a path that is no id, online one that looks like an id
    tokenizer = load_tokenizer(find_checkpoint(path))
    assert len(tokenizer) > MORE and tokenizer.name_or_path == path
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied("a", return_tensors="pt")["input_ids"].tolist() == [tokenizer.encode("a")]
    assert copied.add_tokens("<new>") == 1 and len(copied) == len(tokenizer) + 1


@pytest.mark.usefixtures("silence")
def test_the_hub_hears_nothing_of_a_model(tmp_path, monkeypatch):
    save_tiny(tmp_path / "org/tiny", "llama", {"vocab_size": 2048})
    add = lambda writer: add_tokenizer(writer, load_tokenizer(TINY), "gpt-2")
    write_gguf(tmp_path / "org/tiny", tmp_path / "tiny.gguf", "F16", add)
    monkeypatch.chdir(tmp_path)
    for model in ("tiny.gguf", "org/tiny"):
        with LLMModel(model, TINY, progress=False, kv_cache_bytes="1MiB", max_seq_len=32) as opened:
            assert opened.generate("Once", max_new_tokens=2).texts
            assert fingerprint(LoadOptions(model, TINY))
