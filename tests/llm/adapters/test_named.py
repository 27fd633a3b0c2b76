"""Adapters by name in Python: every call that takes one, unloading in use, and merging at load."""

from __future__ import annotations

import threading

import pytest
import torch

from pace.assets import TINY
from pace.llm import CallbackStreamer, LLMModel
from pace.llm.clients.adapters import NameTaken
from tests.llm.generators import by_hand, check_idle

peft = pytest.importorskip("peft")
from tests.llm.adapters.saved import CONFIG, bundled_network, pair, save_adapter, write  # noqa: E402

PROMPT = "Once upon a time there was"
LENGTH = 12


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Two adapters on disk, and their models in peft."""
    folder = tmp_path_factory.mktemp("adapters")
    return {name: (folder / name, save_adapter(folder / name, seed)) for seed, name in enumerate(("one", "two"), 1)}


@pytest.fixture(scope="module")
def model(saved) -> LLMModel:
    model = LLMModel(TINY, dtype="float32", progress=False, max_adapters=3, max_lora_rank=8, kv_cache_bytes="64MiB")
    for name, (path, _) in saved.items():
        assert model.load_adapter(path, name).rank == 4
    return model


@torch.no_grad()
def greedy(network, tokens: list[int]) -> list[int]:
    row = torch.tensor([tokens])
    out = network.generate(input_ids=row, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None, pad_token_id=0)
    return out[0, len(tokens) :].tolist()


def generate(model: LLMModel, adapter=None, **fields) -> list[int]:
    fields = {"max_new_tokens": LENGTH, "ignore_eos": True, "do_sample": False} | fields
    return model.generate(PROMPT, adapter=adapter, **fields).generated_token_ids[0]


def test_texts_are_those_of_peft(model, saved):
    tokens = model.tokenizer(PROMPT)["input_ids"]
    texts = {None: greedy(bundled_network(), tokens)}
    texts |= {name: greedy(network, tokens) for name, (_, network) in saved.items()}
    assert len({tuple(text) for text in texts.values()}) == 3
    for _ in range(2):  # the second time from the prefix cache
        for name, text in texts.items():
            assert generate(model, name) == text, name
    assert generate(model, [("one", 1.0)]) == texts["one"] and generate(model, [("two", 0.0)]) == texts[None]
    assert generate(model, []) == texts[None]


def test_every_call_takes_one(model):
    for name in (None, "one", [("two", 0.5), ("one", 1.0)]):
        expected, fields = generate(model, name), {"max_new_tokens": LENGTH, "ignore_eos": True, "do_sample": False}
        text = model.tokenizer.decode(expected)
        assert model.add_request(PROMPT, adapter=name, **fields).result().generated_token_ids == [expected]
        assert (
            "".join(model.stream(PROMPT, adapter=name, **fields))
            == model.generate(PROMPT, adapter=name, **fields).texts[0]
        )
        assert text
        with model.session(adapter=name) as session, session.fork() as fork:
            tokens = model.tokenizer(PROMPT)["input_ids"]
            for one in (session, fork):
                assert int(one.append(tokens).argmax()) == expected[0]
            with session.fork() as later:
                assert int(later.append(expected[:1]).argmax()) == expected[1]
        beams = model.generate(PROMPT, adapter=name, num_beams=2, **fields).generated_token_ids
        assert beams == model.generate(PROMPT, adapter=name, num_beams=2, **fields).generated_token_ids
    answers = [model.chat("Hello", adapter=name, temperature=0, max_new_tokens=8).text for name in (None, "one", "two")]
    assert len(set(answers)) > 1
    question = {"q": {"type": "choice", "criteria": {"fox": None, "oak": None}}}
    assert model.decide("A fox.", question, adapter="one") != model.decide("A fox.", question)
    check_idle(model, used_bytes=None)


def test_rows_of_a_batch_are_as_alone(model):
    """In one step with other adapters and without, rows have the same tokens as alone."""
    names = [None, "one", "two", [("one", 0.5), ("two", 0.5)]] * 3
    expected = [generate(model, name) for name in names]
    requests = [
        model.add_request(PROMPT, adapter=name, max_new_tokens=LENGTH, ignore_eos=True, do_sample=False)
        for name in names
    ]
    assert [request.result().generated_token_ids[0] for request in requests] == expected


def test_names_that_are_refused(model, saved, tmp_path):
    path = saved["one"][0]
    with pytest.raises(NameTaken, match="'one' is loaded"):
        model.load_adapter(path, "one")
    for name, error in (
        ("", ValueError),
        (" x", ValueError),
        ("x" * 129, ValueError),
        ("a\nb", ValueError),
        (5, TypeError),
    ):
        with pytest.raises(error, match="name"):
            model.load_adapter(path, name)
    for choice in ("three", [("three", 1.0)]):
        with pytest.raises(ValueError, match="no adapter 'three'; loaded are one, two"):
            generate(model, choice)
    for choice in (5, ["one"], [("one", "1")], [("one", float("nan"))], [("one", 1.0), ("one", 2.0)]):
        with pytest.raises((TypeError, ValueError), match="adapter"):
            generate(model, choice)
    with pytest.raises(ValueError, match="no adapter 'three'"):
        model.unload_adapter("three")
    with pytest.raises(ValueError, match="does not fit this model"):
        model.load_adapter(write(tmp_path / "wide", CONFIG, pair(k=128)), "wide")
    with pytest.raises(ValueError, match="rank 9, more than .* max_lora_rank=9"):
        model.load_adapter(write(tmp_path / "high", CONFIG, pair(r=9)), "high")
    assert [loaded.name for loaded in model.adapters] == ["one", "two"]


def test_a_third_place_and_no_fourth(model, saved, tmp_path):
    third = write(tmp_path / "third", CONFIG, pair())
    assert model.load_adapter(third).name == "third"
    with pytest.raises(ValueError, match="3 adapters are loaded"):
        model.load_adapter(write(tmp_path / "fourth", CONFIG, pair()), "fourth")
    assert model.load_adapter(third, "same").digest == model.adapters[2].digest  # equal contents share a slot
    assert generate(model, [("third", 1.0), ("same", 1.0)]) == generate(model, [("third", 2.0)])
    for name in ("third", "same"):
        model.unload_adapter(name)
    assert model.load_adapter(third.rename(tmp_path / "third-v1.5")).name == "third-v1.5"
    model.unload_adapter("third-v1.5")
    check_idle(model, used_bytes=None)


def test_ctrl_c_while_loading_leaves_no_slot_taken(model, tmp_path, monkeypatch):
    driver, slots = model.generator.driver, model.generator.engine.model.adapters
    call, num_free = driver.call, slots.num_free

    def interrupted(function):
        loading = call(function)
        monkeypatch.setattr(loading, "result", lambda: (_ for _ in ()).throw(KeyboardInterrupt), raising=False)
        return loading

    monkeypatch.setattr(driver, "call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.load_adapter(write(tmp_path / "late", CONFIG, pair()))
    monkeypatch.undo()
    driver.call(lambda engine: None).result()
    assert slots.num_free == num_free and [loaded.name for loaded in model.adapters] == ["one", "two"]


def test_an_adapter_in_use_is_unloaded_with_its_last_request(model, saved, tmp_path):
    path = write(tmp_path, CONFIG, pair())
    model.load_adapter(path, "third")
    expected = generate(model, "third")
    with by_hand(model) as hand:
        request = model.add_request(PROMPT, adapter="third", max_new_tokens=LENGTH, ignore_eos=True, do_sample=False)
        for _ in range(3):
            hand.step()
        model.unload_adapter("third")
        hand.step()
        assert hand.engine.model.adapters.num_free == 0
        with pytest.raises(ValueError, match="no adapter 'third'"):
            model.add_request(PROMPT, adapter="third")
    assert request.result().generated_token_ids == [expected]
    check_idle(model, used_bytes=None)
    assert model._engine.model.adapters.num_free == 1
    model.load_adapter(saved["two"][0], "third")  # the name is free, and keeps nothing of the old one
    assert generate(model, "third") == generate(model, "two")
    model.unload_adapter("third")


def test_a_call_with_many_prompts_keeps_its_adapter(model, tmp_path):
    model.load_adapter(write(tmp_path, CONFIG, pair()), "third")
    prompts, began = [f"{PROMPT} {number}" for number in range(200)], threading.Event()
    expected = model.generate(prompts, adapter="third", max_new_tokens=2).generated_token_ids

    def unload(event) -> None:
        if not began.is_set():
            began.set()
            model.unload_adapter("third")

    found = model.generate(prompts, adapter="third", max_new_tokens=2, streamer=CallbackStreamer(unload))
    assert found.generated_token_ids == expected
    assert began.is_set()
    check_idle(model, used_bytes=None)
    assert [loaded.name for loaded in model.adapters] == ["one", "two"]


def test_merged_at_load(model, saved, tmp_path):
    path, network = saved["one"]
    with LLMModel(TINY, dtype="float32", progress=False, adapter=path, merge=True, kv_cache_bytes="16MiB") as merged:
        assert generate(merged) == generate(model, "one")
        assert merged.adapters == []
        with merged.session() as session:
            session.append([5, 6, 7])
            session.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="another checkpoint"):
        model.load_session(tmp_path / "saved")
    for options, message in (({"adapter": path}, "needs merge=True"), ({"merge": True}, "needs adapter=")):
        with pytest.raises(ValueError, match=message):
            LLMModel(TINY, progress=False, **options)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        LLMModel(TINY, progress=False, adapter=tmp_path / "none", merge=True)


def test_saved_sessions_keep_their_adapter(model, tmp_path):
    tokens = model.tokenizer(PROMPT)["input_ids"]
    with model.session(adapter="one") as session:
        session.append(tokens)
        expected = session.append([5])
        session.truncate(len(tokens))
        session.save(tmp_path / "saved")
    with model.load_session(tmp_path / "saved", adapter="one") as again:
        assert torch.equal(again.append([5]), expected)
    with pytest.raises(ValueError, match="adapter"):
        model.load_session(tmp_path / "saved")
