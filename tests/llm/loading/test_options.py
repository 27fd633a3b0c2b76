"""Loading checks its options in two steps. `LoadOptions` refuses values that are wrong for every checkpoint.
`open_model` refuses the rest before weights are read."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path

import pytest
import torch

from pace import _C
from pace.assets import TINY, TINY_DRAFT
from pace.llm import (
    DraftModelConfig,
    Generator,
    LLMModel,
    LoadOptions,
    PardConfig,
    PromptLookupConfig,
    SamplingConfig,
)
from pace.llm.loading import checkpoint, load, memory
from pace.llm.loading import model as model_module
from pace.llm.speculation import build

GREEDY = SamplingConfig(max_new_tokens=8, ignore_eos=True)
PROMPT = [5, 6, 7, 5, 6, 7, 5]

GOOD = {
    "tokenizer_name_or_path": (str(TINY), lambda model: model.tokenizer is not None),
    "dtype": ("float32", lambda model: model._model.dtype == torch.float32),
    "kv_cache_type": ("dynamic", lambda model: type(model._engine.cache.allocator).__name__ == "Contiguous"),
    "spec_config": (PromptLookupConfig(), lambda model: type(model._engine.drafter).__name__ == "SpeculativeDrafter"),
    "quantization": ("int4", lambda model: model._model.quantization.format.name == "int4"),
    "backend": ("torch", lambda model: model._engine.ops.__name__ == "pace.ops.reference"),
    "num_threads": (1, lambda model: num_threads() == 1),
    "max_seq_len": (64, lambda model: model._engine.max_length == 64),
    "kv_cache_bytes": ("1MiB", lambda model: model.memory_report().cache_budget <= 1 << 20),
    "prefix_cache_bytes": (0, lambda model: type(model._engine.cache.prefix).__name__ == "NoPrefixCache"),
    "kv_cache_dtype": ("int8", lambda model: model._engine.cache.kv[0].k.dtype == torch.int8),
    "load_in_4bit": (True, lambda model: model._model.quantization.format.name == "nf4"),
    "load_in_8bit": (True, lambda model: model._model.quantization.format.name == "int8"),
    "progress": (False, lambda model: model._generator.progress is False),
    "media": (False, lambda model: model._model.towers == []),
    "media_cache_bytes": ("1MiB", lambda model: model._engine.media.cache_bytes == 1 << 20),
    "max_adapters": (3, lambda model: model._engine.model.adapters.max_adapters == 3),
    "max_lora_rank": (16, lambda model: model._engine.model.adapters.max_rank == 16),
    "bmc_rows": (32, lambda model: model._engine.cache.allocator.spare_rows(100) == 32),
}
HUB = {"revision": "v1", "token": "secret", "cache_dir": "/nowhere", "local_files_only": True, "progress": False}
"""Options for the Hub. `GOOD` has the others: a value, mostly not the default, and a check that it reached the
model."""

WRONG = {
    "model_name_or_path": [(5, TypeError), (None, TypeError), ("no/such/model/here", FileNotFoundError)],
    "tokenizer_name_or_path": [(5, TypeError), ("./nowhere", FileNotFoundError)],
    "dtype": [("int3", ValueError), (torch.int64, ValueError), (16, TypeError)],
    "kv_cache_type": [("pages", ValueError)],
    "spec_config": [("lookup", TypeError), (DraftModelConfig("./nowhere"), FileNotFoundError)],
    "quantization": [("int3", ValueError), (4, TypeError), ({"format": "int4", "groups": 3}, TypeError)],
    "backend": [("gpu", ValueError), ("attention=gpu", ValueError), (1, ValueError)],
    "num_threads": [(0, ValueError), (10**6, ValueError), (1.5, TypeError), (True, TypeError)],
    "pin_threads": [(1, TypeError)],
    "max_seq_len": [(1, ValueError), (10**9, ValueError), (64.0, TypeError), (True, TypeError)],
    "revision": [(5, TypeError), ("main", ValueError)],
    "token": [(5, TypeError), (b"secret", TypeError)],
    "cache_dir": [(5, TypeError)],
    "local_files_only": [("yes", TypeError), (1, TypeError)],
    "progress": [("no", TypeError), (None, TypeError)],
    "kv_cache_bytes": [("2G", ValueError), (1.5, TypeError), (1, ValueError), ("0%", ValueError), ("101%", ValueError)],
    "bmc_rows": [(0, ValueError), (8, ValueError), ("8", TypeError)],
    "prefix_cache_bytes": [("most", ValueError), (None, TypeError), (1, ValueError), (1 << 62, ValueError)],
    "kv_cache_dtype": [("int4", ValueError), (8, TypeError)],
    "load_in_4bit": [(1, TypeError)],
    "load_in_8bit": [("yes", TypeError)],
    "weights": [("disk", ValueError), (None, ValueError), ("mapped", ValueError)],
    "weights_cache": [(5, TypeError), (True, TypeError)],
    "media": [("image", TypeError), (None, TypeError), (1, TypeError)],
    "max_image_tokens": [(0, ValueError), (1280.0, TypeError), (True, TypeError)],
    "media_cache_bytes": [("most", ValueError), (None, TypeError)],
    "adapter": [(3, TypeError), ("no/such/adapter", ValueError)],
    "merge": [(1, TypeError), (True, ValueError)],
    "max_adapters": [(0, ValueError), (2.0, TypeError), (True, TypeError)],
    "max_lora_rank": [(0, ValueError), ("8", TypeError)],
    "mmproj": [(3, TypeError), (True, TypeError), ("absent.gguf", ValueError)],
}
NEEDED_WITH = {"bmc_rows": {"kv_cache_type": "bmc"}}


def num_threads() -> int:
    return _C.get_num_threads()


def names() -> list[str]:
    return [field.name for field in dataclasses.fields(LoadOptions)]


def both(**options):
    """Yields the model made in each of the two ways."""
    yield LLMModel(**options)
    parts = load.open_model(LoadOptions(**options))
    model = LLMModel.__new__(LLMModel)
    model._model, model.tokenizer = parts.model, parts.tokenizer
    model._generator = Generator(parts.engine, parts.tokenizer, parts.defaults, options["progress"])
    yield model


def test_the_face_and_the_options_have_the_same_names_order_and_defaults() -> None:
    asked = dict(inspect.signature(LLMModel.__init__).parameters)
    del asked["self"], asked["other_names"]
    own = inspect.signature(LoadOptions).parameters
    assert [(name, parameter.default, parameter.annotation) for name, parameter in asked.items()] == [
        (name, parameter.default, parameter.annotation) for name, parameter in own.items()
    ]
    assert all(f"`{name}`" in LLMModel.__init__.__doc__ for name in own)


def test_every_option_is_tried() -> None:
    # Below, in loading/memory/test_mapped_experts.py, processors/test_loading.py, adapters/test_named.py and
    # checkpoints/gguf/projectors/test_qwen.py.
    elsewhere = {"pin_threads", "weights", "weights_cache", "max_image_tokens", "mmproj", "adapter", "merge"}
    assert {*GOOD, *HUB, *elsewhere, "model_name_or_path"} == {*WRONG} == {*names()}


@pytest.mark.usefixtures("restore_isa_and_threads")
@pytest.mark.parametrize("name", GOOD)
def test_every_option_is_reached_both_ways(name: str) -> None:
    value, shows = GOOD[name]
    options = {"model_name_or_path": TINY, "progress": False, name: value, **NEEDED_WITH.get(name, {})}
    outputs = []
    for model in both(**options):
        assert shows(model)
        outputs.append(model.generate(PROMPT, GREEDY).generated_token_ids)
    assert outputs[0] == outputs[1]


def test_options_of_the_hub_reach_every_search_for_a_checkpoint(monkeypatch) -> None:
    searches = []

    def find(path: object, revision: str | None = None, weights: bool = True, check: object = None, **other: object):
        searches.append((path, revision, other))
        return TINY

    monkeypatch.setattr(load, "find_checkpoint", find)
    monkeypatch.setattr(build, "find_checkpoint", find)
    for way in (LLMModel, lambda *arguments, **options: load.open_model(LoadOptions(*arguments, **options))):
        searches.clear()
        way("them/it", "them/tokenizer", spec_config=DraftModelConfig("them/draft", revision="v2"), **HUB)
        other = {name: value for name, value in HUB.items() if name != "revision"}
        of_model = other | {"media": True}
        assert searches == [("them/it", "v1", of_model), ("them/tokenizer", None, other), ("them/draft", "v2", other)]


@pytest.mark.parametrize(
    "path", ["/no/such", "./nowhere", "~/no/such", "nowhere/", "a/b/c", "no.gguf", Path("no/such")]
)
@pytest.mark.parametrize("kind", [DraftModelConfig, PardConfig, None])
def test_a_draft_model_or_tokenizer_that_is_not_there_is_told_first(monkeypatch, path, kind) -> None:
    """The error comes before the model is searched for, downloaded or read."""
    searches, find = [], load.find_checkpoint
    monkeypatch.setattr(load, "find_checkpoint", lambda name, **more: searches.append(name) or find(name, **more))
    options = {"tokenizer_name_or_path": path} if kind is None else {"spec_config": kind(path)}
    with pytest.raises(FileNotFoundError, match="there is no (directory|file)"):
        load.open_model(LoadOptions("org/model", **options))
    assert searches == [path]


def test_pinning_reaches_the_kernels(monkeypatch) -> None:
    asked = []
    monkeypatch.setattr(load, "use_threads", lambda *arguments: asked.append(arguments) or 1)
    for _ in both(model_name_or_path=TINY, num_threads=1, pin_threads=True, progress=False):
        pass
    assert asked == [(1, True)] * 2


def cases() -> list[tuple[str, object, type[Exception]]]:
    return [(name, value, error) for name, wrong in WRONG.items() for value, error in wrong]


@pytest.mark.parametrize(("name", "value", "error"), cases())
def test_a_wrong_value_of_any_option_is_told_before_weights_are_read(
    name: str, value: object, error: type[Exception], monkeypatch
) -> None:
    monkeypatch.setattr(checkpoint, "CheckpointReader", lambda directory: pytest.fail("weights were read"))
    needed = NEEDED_WITH.get(name, {}) if value != 8 else {}
    for way in (LLMModel, lambda **options: load.open_model(LoadOptions(**options))):
        with pytest.raises(error) as caught:
            way(**{"model_name_or_path": TINY, "progress": False, name: value, **needed})
        assert "secret" not in str(caught.value)
        if error in (TypeError, ValueError) and name != "model_name_or_path":
            told = {"dtype": "dtype", "quantization": "format|quantization|group", "backend": "backend|attention"}
            assert any(word in str(caught.value) for word in told.get(name, name).split("|")), caught.value


@pytest.mark.parametrize(
    ("changes", "options", "error", "message"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, {}, NotImplementedError, "MambaForCausalLM"),
        ({"hidden_act": "unheard"}, {}, NotImplementedError, "unheard"),
        ({"quantization_config": {"quant_method": "unheard"}}, {}, NotImplementedError, "unheard"),
        ({}, {"max_seq_len": 1 << 20}, ValueError, "max_seq_len"),
        ({}, {"kv_cache_bytes": 64}, ValueError, "kv_cache_bytes"),
        ({}, {"weights": "mapped"}, ValueError, "experts"),
        ({}, {"quantization": {"format": "int4", "overrides": {"nothing": "int8"}}}, ValueError, "nothing"),
        ({}, {}, MemoryError, "GiB of memory are free"),
    ],
    ids=str,
)
def test_what_config_and_headers_show_is_told_before_the_tokenizer_is_read(
    changes: dict, options: dict, error: type[Exception], message: str, tmp_path, monkeypatch
) -> None:
    for path in Path(TINY).iterdir():
        (tmp_path / path.name).symlink_to(path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(
        checkpoint, "load_tokenizer", lambda *arguments, **others: pytest.fail("the tokenizer was read")
    )
    if error is MemoryError:
        for module in (model_module, memory):
            monkeypatch.setattr(module, "available_memory_bytes", lambda kept=0: 1000)
    with pytest.raises(error, match=message):
        LLMModel(tmp_path, progress=False, **options)


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [(None, FileNotFoundError, "no weights"), (b"x" * 99, ValueError, "model.safetensors"),
     ('{"w": {"dtype": "F3", "shape": [1], "data_offsets": [0, 4]}}', ValueError, "unknown dtype 'F3'")],
    ids=str,
)  # fmt: skip
def test_what_headers_of_weights_show_is_told_before_the_tokenizer_is_read(
    content: str | bytes | None, error: type[Exception], message: str, tmp_path, monkeypatch
) -> None:
    (tmp_path / "config.json").symlink_to(Path(TINY) / "config.json")
    if isinstance(content, str):
        content = len(content).to_bytes(8, "little") + content.encode() + bytes(4)
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    monkeypatch.setattr(
        checkpoint, "load_tokenizer", lambda *arguments, **others: pytest.fail("the tokenizer was read")
    )
    with pytest.raises(error, match=message):
        LLMModel(tmp_path, progress=False)


@pytest.mark.parametrize(
    "options",
    [
        {"load_in_4bit": True, "load_in_8bit": True},
        {"quantization": "int4", "load_in_8bit": True},
        {"kv_cache_type": "dynamic", "prefix_cache_bytes": 4096},
        {"kv_cache_type": "dynamic", "bmc_rows": 4},
        {"weights": "mapped", "weights_cache": False},
        {"weights": "mapped", "backend": "torch"},
    ],
)
def test_options_that_contradict_each_other_are_refused_without_a_checkpoint(options: dict) -> None:
    with pytest.raises(ValueError):
        LoadOptions("nowhere", **options)


def test_options_may_be_replaced() -> None:
    options = dataclasses.replace(LoadOptions(TINY, quantization="int4"), dtype="float32")
    assert (options.weight_dtype, options.kv_dtype) == (torch.float32, torch.float32)
    assert dataclasses.replace(options, kv_cache_dtype="int8").kv_dtype == torch.int8


def test_refused_options_leave_the_threads_alone(restore_isa_and_threads) -> None:
    before = num_threads()
    with pytest.raises(TypeError):
        LoadOptions(TINY, num_threads=before + 1, progress=1)
    with pytest.raises(TypeError):
        LLMModel(TINY, num_threads=before + 1, progress=1)
    assert num_threads() == before


def test_a_draft_model_is_opened_with_the_model() -> None:
    parts = load.open_model(LoadOptions(TINY, spec_config=DraftModelConfig(str(TINY_DRAFT)), progress=False))
    assert "draft Embedding" in parts.engine.drafter.memory().weights
