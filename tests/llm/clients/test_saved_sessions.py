"""Saved sessions: after loading, logits are the same, and everything that does not fit is refused by name."""

from __future__ import annotations

import hashlib
import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch

from pace import _C
from pace.assets import TINY
from pace.llm import LLMModel
from pace.llm.cache import copies, saved_file
from pace.llm.cache.identity import ModelIdentity, Setting
from pace.llm.cache.saved_file import LENGTH, MAGIC
from pace.llm.clients.session import Session
from pace.llm.engine.driver import EngineDriver
from pace.llm.engine.engine import Engine
from tests.llm.bundled import bundled
from tests.llm.fake_model import OPS, FakeModel
from tests.llm.generators import check_idle
from tests.plugins.tiers import sample

IDENTITY = ModelIdentity({"dtype": Setting("fake", "the dtype", "use {}")}, lambda version: f"digest {version}")


def fake_driver(model: FakeModel, num_blocks: int = 400, **options) -> EngineDriver:
    engine = Engine.create(
        model, OPS, num_blocks * model.kv_spec.block_bytes, cache_options={"prefix_cache_bytes": None} | options
    )
    engine.identity = IDENTITY
    return EngineDriver(engine)


def tokens_of(count: int) -> list[int]:
    return [1 + (7 * number * number + number) % 48 for number in range(count)]


def of_version_1(data: bytes) -> bytes:
    """Returns a file as the first version wrote it."""
    first = len(MAGIC) + LENGTH.size
    (length,) = LENGTH.unpack(data[len(MAGIC) : first])
    sizes = json.loads(data[first : first + length])["sizes"]
    start = data[: first + length].replace(b"session 2", b"session 1", 1)
    contents = data[first + length : first + length + sum(sizes)]
    ends = [*itertools.accumulate(sizes, initial=0)]
    digests = b"".join(blake2b(contents[start:end]) for start, end in zip(ends, ends[1:]))
    return start + contents + digests + blake2b(start, digests)


def blake2b(*parts: bytes) -> bytes:
    return hashlib.blake2b(b"".join(parts), digest_size=16).digest()


@pytest.mark.parametrize(
    "windows, num_states, options",
    [
        ((None, None), 0, {}),
        ((None, 20, 20), 0, {}),
        ((30, 30), 0, {}),
        ((None,), 2, {}),
        ((None, None), 0, {"kv_cache_type": "bmc", "prefix_cache_bytes": 0}),
    ],
    ids=["plain", "windows", "windows-only", "states", "bmc"],
)
def test_a_loaded_session_continues_with_the_same_logits(
    tmp_path: Path, windows: tuple, num_states: int, options: dict
) -> None:
    """At every place of a block. Nothing is computed again, and the saved session goes on as well."""
    model = FakeModel(windows=windows, num_states=num_states)
    source, target = fake_driver(model, **options), fake_driver(model, **options)
    for length in (1, 15, 16, 17, 100, 143, 160):
        path = tmp_path / f"{length}.session"
        with Session(source) as session:
            session.append(tokens_of(length))
            session.save(path)
            first = path.read_bytes()
            session.save(path)
            assert path.read_bytes() == first
            expected = session.append([3, 4, 5], "all")
        loaded, note = Session.load(target, path)
        with loaded:
            assert loaded.tokens == tokens_of(length) and note == b""
            num_computed = []
            model.hook = lambda batch: num_computed.append(len(batch.tokens))
            assert torch.equal(loaded.append([3, 4, 5], "all"), expected)
            assert sum(num_computed) == 3
            target.call(lambda engine: engine.check_idle()).result()
            model.hook = lambda batch: None
    check_idle(source), check_idle(target)
    assert not list(tmp_path.glob(".*"))


def test_a_session_of_many_pieces_is_loaded(tmp_path: Path, monkeypatch) -> None:
    """They are read into the same few buffers, while the engine copies others."""
    monkeypatch.setattr(copies, "PIECE_BYTES", 1)
    for model in (FakeModel(windows=(None, 20)), FakeModel(num_states=2)):
        driver, target = fake_driver(model), fake_driver(model)
        with Session(driver) as session:
            session.append(tokens_of(333))
            session.save(tmp_path / "saved")
            expected = session.append([3, 4], "all")
        with Session.load(target, tmp_path / "saved")[0] as loaded:
            assert torch.equal(loaded.append([3, 4], "all"), expected)
        check_idle(target)


def test_files_of_the_first_version_are_loaded(tmp_path: Path) -> None:
    """Its digests were others, also that of the checkpoint."""
    driver = fake_driver(FakeModel(windows=(None, 20), num_states=1))
    with Session(driver) as session:
        session.append(tokens_of(90))
        session.save(tmp_path / "saved", b"note")
        expected = session.append([3, 4], "all")
    data = (tmp_path / "saved").read_bytes()
    for name, is_right in (("digest 1", True), ("digest 3", False)):
        (tmp_path / "first").write_bytes(of_version_1(data.replace(b"digest 2", name.encode())))
        if is_right:
            loaded, note = Session.load(driver, tmp_path / "first")
            with loaded:
                assert note == b"note" and torch.equal(loaded.append([3, 4], "all"), expected)
        else:
            with pytest.raises(ValueError, match="another checkpoint"):
                Session.load(driver, tmp_path / "first")
    check_idle(driver)


def test_a_session_that_was_cut_is_loaded(tmp_path: Path) -> None:
    """It keeps the length of its first append, which is more than it has now."""
    driver = fake_driver(FakeModel())
    with Session(driver) as session:
        session.append(tokens_of(40))
        session.truncate(9)
        session.save(tmp_path / "cut")
        expected = session.append([3, 4], "all")
    loaded, _ = Session.load(driver, tmp_path / "cut")
    with loaded:
        assert loaded.tokens == tokens_of(9) and torch.equal(loaded.append([3, 4], "all"), expected)
    check_idle(driver)


@pytest.mark.parametrize("windows, num_states", [((None, None), 0), ((None, 20), 0), ((20,), 0), ((None, 40), 2)])
def test_other_requests_reuse_what_was_loaded(tmp_path: Path, windows: tuple, num_states: int) -> None:
    """All full blocks, also if the session ends within one."""
    model = FakeModel(windows=windows, num_states=num_states)
    source = fake_driver(model)
    for length in (100, 143, 144, 33):
        with Session(source) as session:
            session.append(tokens_of(length - 30))
            session.append(tokens_of(length)[length - 30 :])
            session.save(tmp_path / "saved")
        target = fake_driver(model)
        Session.load(target, tmp_path / "saved")[0].close()
        num_computed = []
        model.hook = lambda batch: num_computed.append(len(batch.tokens))
        with Session(target) as other:
            logits = other.append([*tokens_of(length), 9, 9])
            assert torch.equal(logits, model.logits_of(other.tokens)[None])
        model.hook = lambda batch: None
        assert num_computed == [length % 16 + 2]
        check_idle(target)
    check_idle(source)


def test_a_session_that_lost_its_blocks_is_saved_whole_and_loads_without_room(tmp_path: Path) -> None:
    model = FakeModel()
    driver = fake_driver(model, num_blocks=10)
    with Session(driver) as session:
        session.append(tokens_of(100))
        driver.call(lambda engine: engine.cache.free(session._sequence)).result()
        session.save(tmp_path / "saved")
        expected = session.append([2])
    small = fake_driver(model, prefix_cache_bytes=0)
    cache = small.engine.cache
    blocks = [cache.pool.take() for _ in range(cache.num_free_blocks - 3)]  # as a running sequence might
    with Session.load(small, tmp_path / "saved")[0] as loaded:
        assert loaded.tokens == tokens_of(100) and not loaded._sequence.num_computed
        for block in blocks:
            cache.pool.give_back(block)
        assert torch.equal(loaded.append([2]), expected)


def test_room_that_is_taken_while_a_session_is_loaded_is_not_written(tmp_path: Path, monkeypatch) -> None:
    """The loading session only has its tokens then. A sequence that took its blocks keeps what it wrote there."""
    model = FakeModel()
    with Session(fake_driver(model)) as session:
        session.append(tokens_of(200))
        session.save(tmp_path / "saved")
    driver = fake_driver(model)
    other, read = Session(driver), saved_file.SavedFile.piece

    def read_late(self, number: int, memory: memoryview | None = None) -> memoryview:
        if number == 2:
            [loading] = [each for each in driver.engine.scheduler.parked if len(each.tokens) == 200]
            driver.call(lambda engine: engine.cache.free(loading)).result()
            other.append(tokens_of(150)[::-1])
        return read(self, number, memory)

    monkeypatch.setattr(saved_file.SavedFile, "piece", read_late)
    with Session.load(driver, tmp_path / "saved")[0] as loaded:
        assert torch.equal(other.append([5]), model.logits_of(other.tokens)[None])
        assert torch.equal(loaded.append([5]), model.logits_of(loaded.tokens)[None])
    other.close()
    check_idle(driver)


def test_a_file_has_nothing_of_other_sequences(tmp_path: Path) -> None:
    """Blocks are used again without being cleared, so the rest of the last one must be left out."""
    model = FakeModel()
    files = []
    for before in (None, [48] * 300):
        driver = fake_driver(model, prefix_cache_bytes=0)
        if before:
            with Session(driver) as session:
                session.append(before)
        with Session(driver) as session:
            session.append(tokens_of(33))
            session.save(tmp_path / "saved")
        files.append((tmp_path / "saved").read_bytes())
    assert files[0] == files[1]


def test_an_error_while_writing_keeps_the_earlier_file(tmp_path: Path, monkeypatch) -> None:
    model = FakeModel()
    with Session(fake_driver(model)) as session:
        session.append(tokens_of(40))
        session.save(tmp_path / "saved")
        before = (tmp_path / "saved").read_bytes()
        session.append([1])
        monkeypatch.setattr(saved_file.os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(OSError, match=r"saved cannot be written \(No space left"):
            session.save(tmp_path / "saved")
        monkeypatch.undo()
        assert [path.name for path in tmp_path.iterdir()] == ["saved"]
        assert (tmp_path / "saved").read_bytes() == before
        with pytest.raises(OSError, match="none/saved cannot be written"):
            session.save(tmp_path / "none" / "saved")
        assert torch.equal(session.append([2]), model.logits_of(session.tokens)[None])


def test_wrong_paths_are_refused(tmp_path: Path) -> None:
    driver = fake_driver(FakeModel())
    with pytest.raises(FileNotFoundError, match="none"):
        Session.load(driver, tmp_path / "none")
    with pytest.raises(ValueError, match="directory"):
        Session.load(driver, tmp_path)
    with pytest.raises(TypeError, match="path"):
        Session.load(driver, b"saved")
    driver.engine.identity = None
    with Session(driver) as session, pytest.raises(ValueError, match="checkpoint"):
        session.save(tmp_path / "saved")
    check_idle(driver)


# -- the bundled model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "tiny.session"
    with bundled().session() as session:
        session.append(list(range(20, 70)))
        session.append([5])
        session.save(path)
    return path


def opened(path: Path = TINY, **options) -> LLMModel:
    return LLMModel(path, **{"dtype": "float32", "progress": False} | options)


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"dtype": "bfloat16"}, "dtype of the weights was float32 .* bfloat16 here.*dtype='float32'"),
        ({"kv_cache_dtype": "int8"}, "dtype of keys and values was float32.*int8"),
        ({"kv_cache_type": "bmc"}, "cache type was paged.*bmc"),
        ({"quantization": "int8"}, "quantisation was none"),
        ({"backend": "torch"}, "backend was native"),
        ({"max_seq_len": 40}, "51 tokens, more than this model takes, 40.*max_seq_len=40"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_model_with_another_cache_refuses_it(saved: Path, options: dict, reason: str) -> None:
    with opened(**options) as model:
        with pytest.raises(ValueError, match=f"tiny.session cannot be loaded: .*{reason}"):
            model.load_session(saved)
        check_idle(model)


def test_another_instruction_set_is_refused(saved: Path, monkeypatch) -> None:
    monkeypatch.setattr(_C, "isa", lambda: "riscv")
    with opened() as model, pytest.raises(ValueError, match="the instruction set was .* is riscv here; set PACE_ISA="):
        model.load_session(saved)


def test_only_the_contents_of_a_checkpoint_count(saved: Path, tmp_path: Path) -> None:
    """A copy under another name loads it, also with other limits. One with another weight, config or tokenizer does
    not."""
    expected = bundled().session().append([*range(20, 70), 5, 6])
    copy = tmp_path / "other"
    shutil.copytree(TINY, copy)
    (copy / "generation_config.json").unlink(missing_ok=True)
    with opened(copy, num_threads=1, max_seq_len=64, prefix_cache_bytes=0) as model:
        with model.load_session(saved) as session:
            assert torch.equal(session.append([6]), expected)
    for name, change in {
        "model.safetensors": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        "config.json": lambda data: json.dumps(json.loads(data) | {"rope_theta": 12345.0}).encode(),
        "tokenizer.json": lambda data: data + b"\n",
    }.items():
        shutil.copytree(TINY, copy, dirs_exist_ok=True)
        (copy / name).write_bytes(change((copy / name).read_bytes()))
        with opened(copy) as model, pytest.raises(ValueError, match="another checkpoint"):
            model.load_session(saved)


def test_a_file_of_the_first_version_knows_its_checkpoint(saved: Path, tmp_path: Path) -> None:
    with opened() as model:
        identity = model.generator.driver.engine.identity
        before, after = identity.digest(2).encode(), identity.digest(1).encode()
        (tmp_path / "first").write_bytes(of_version_1(saved.read_bytes().replace(before, after)))
        with model.load_session(tmp_path / "first") as first, model.load_session(saved) as second:
            assert torch.equal(first.append([6]), second.append([6]))


def test_weights_that_change_after_loading_are_noticed(tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    with opened(tmp_path / "model") as model, model.session() as session:
        session.append([5])
        weights = tmp_path / "model" / "model.safetensors"
        data = weights.read_bytes()
        weights.unlink()
        weights.write_bytes(data)
        with pytest.raises(ValueError, match="have changed since they were loaded"):
            session.save(tmp_path / "saved")
        assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    "model_type", sample(["qwen3_5_text", "lfm2", "granitemoehybrid", "gemma3_text", "gemma4_text"], lambda _: False)
)
def test_models_with_states_and_windows_continue(tmp_path: Path, model_type: str) -> None:
    """In another process's place: a second model of the same checkpoint, which computes with other threads."""
    pytest.importorskip("transformers")
    from tests.llm.models.variants import save_tiny

    save_tiny(tmp_path / "model", model_type, {"sliding_window": 20} if "gemma" in model_type else {})
    tokens = [number % 60 + 2 for number in range(75)]
    with opened(tmp_path / "model", kv_cache_bytes="16MiB") as model, model.session() as session:
        session.append(tokens)
        session.save(tmp_path / "saved")
        expected = session.append([5, 6, 7], "all")
        session.truncate(70)
    with opened(tmp_path / "model", kv_cache_bytes="8MiB", num_threads=1) as model:
        with model.load_session(tmp_path / "saved") as session:
            assert torch.equal(session.append([5, 6, 7], "all"), expected)
        output = model.generate([[*tokens, 5, 6, 7]], max_new_tokens=1)
        assert output.metrics.num_reused_tokens >= 64
        check_idle(model)
