"""Adapters of several models in one server: each has its own, also after its model was unloaded and came back."""

from __future__ import annotations

from argparse import Namespace

import pytest

pytest.importorskip("starlette")
pytest.importorskip("peft")
from pace.assets import TINY, TINY_DRAFT
from pace.llm.clients.adapters import Adapters
from pace.server.models.pool import ModelPool
from pace.server.options import ModelEntry, ServeOptions
from tests.llm.adapters.saved import save_adapter
from tests.server.models.serving import SeveralServing
from tests.waiting import wait_until


class Adapted(SeveralServing):
    """Two models. One has an adapter, and is unloaded when idle."""

    def __init__(self, folder, is_first: bool = True) -> None:
        super().__init__()
        chat = ModelEntry(("chat",), str(TINY), Namespace(lora=[("poet", folder / "one")]), idle_unload=0.2)
        small = ModelEntry(("small",), str(TINY_DRAFT))
        entries = (chat, small) if is_first else (small, chat)
        self.options = ServeOptions(str(TINY), models=entries, lora_dir=folder)
        self.pool = ModelPool.make(self.options, self._make)


def test_a_model_comes_back_with_its_adapters(tmp_path):
    for seed, name in enumerate(("one", "two"), 1):
        save_adapter(tmp_path / name, seed)
    with Adapted(tmp_path) as serving:
        assert serving.ask("/lora-adapters", {"model": "chat", "name": "second", "path": "two"}).status == 200
        for name in ("small", "chat", "poet", "second"):
            assert serving.ask("/lora-adapters", {"model": "small", "name": name, "path": "one"}).status == 409
        names = ("chat", "poet", "second")
        before = [serving.tell(name) for name in names]
        assert len(set(before)) == 3
        listed = serving.ask("/v1/models").json["data"]
        assert [one.get("parent") for one in listed] == [None, "chat", "chat", None]
        for name in names:
            wait_until(lambda: not serving.loaded()["chat"])
            assert [serving.tell(name) for name in (name, *names)] == [before[names.index(name)], *before]
        assert [one["name"] for one in serving.ask("/lora-adapters").json] == ["poet", "second"]
        assert serving.ask("/lora-adapters?model=small").json == []


def test_a_model_comes_back_without_an_adapter_whose_folder_is_gone(tmp_path, caplog):
    for seed, name in enumerate(("one", "two"), 1):
        save_adapter(tmp_path / name, seed)
    with Adapted(tmp_path) as serving:
        assert serving.ask("/lora-adapters", {"model": "chat", "name": "second", "path": "two"}).status == 200
        poet = serving.tell("poet")
        wait_until(lambda: not serving.loaded()["chat"])
        (tmp_path / "two").rename(tmp_path / "gone")
        assert serving.tell("poet") == poet and "'second' could not be loaded again" in caplog.text
        body = {"model": "second", "prompt": "Once upon a time"}
        reply = serving.ask("/v1/completions", body)
        assert reply.status == 404 and "second" in reply.json["error"]["message"]
        assert [one["name"] for one in serving.ask("/lora-adapters").json] == ["poet"]
        wait_until(lambda: not serving.loaded()["chat"])
        (tmp_path / "gone").rename(tmp_path / "two")
        assert serving.ask("/v1/completions", body).status == 200


def test_two_models_load_adapters_of_one_name_at_once(tmp_path, monkeypatch):
    for seed, name in enumerate(("one", "two"), 1):
        save_adapter(tmp_path / name, seed)
    with Adapted(tmp_path) as serving:
        load, statuses = Adapters.load, []

        def load_slowly(adapters, path, name):
            if name == "second" and not statuses:
                statuses.append(0)
                body = {"model": "small", "name": "second", "path": "two"}
                statuses.append(serving.ask("/lora-adapters", body).status)
            return load(adapters, path, name)

        monkeypatch.setattr(Adapters, "load", load_slowly)
        assert serving.ask("/lora-adapters", {"model": "chat", "name": "second", "path": "two"}).status == 200
        assert statuses == [0, 409]


def test_an_adapter_is_unloaded_while_its_model_comes_back(tmp_path, monkeypatch):
    for seed, name in enumerate(("one", "two"), 1):
        save_adapter(tmp_path / name, seed)
    with Adapted(tmp_path) as serving:
        assert serving.ask("/lora-adapters", {"model": "chat", "name": "second", "path": "two"}).status == 200
        wait_until(lambda: not serving.loaded()["chat"])
        load, deleted = Adapters.load, []

        def load_and_delete(adapters, path, name):
            loaded = load(adapters, path, name)
            if name == "poet":
                deleted.extend(
                    serving.ask(f"/lora-adapters/{one}", None, "DELETE").status for one in ("poet", "second")
                )
            return loaded

        monkeypatch.setattr(Adapters, "load", load_and_delete)
        assert serving.tell("chat") and deleted == [200, 200]
        monkeypatch.undo()
        assert serving.ask("/lora-adapters").json == [] and serving.pool.find("chat").generator.adapters.loaded == []
        assert serving.ask("/lora-adapters", {"model": "chat", "name": "poet", "path": "two"}).status == 200


def test_an_adapter_is_unloaded_by_its_name_alone(tmp_path):
    save_adapter(tmp_path / "one", 1)
    with Adapted(tmp_path, is_first=False) as serving:
        assert serving.ask("/lora-adapters/poet?model=small", None, "DELETE").status == 404
        assert serving.ask("/lora-adapters/chat", None, "DELETE").status == 404
        assert serving.ask("/lora-adapters/poet", None, "DELETE").status == 200
        assert serving.ask("/lora-adapters?model=chat").json == []


def test_adapters_of_the_command_line_need_one_model(tmp_path):
    entries = tuple(ModelEntry((name,), str(TINY)) for name in ("one", "two"))
    with pytest.raises(ValueError, match="lora is for one model"):
        ServeOptions(str(TINY), models=entries, lora=(("poet", tmp_path),))
    named = ModelEntry(("one",), str(TINY), Namespace(lora=[("two", tmp_path)]))
    with pytest.raises(ValueError, match="two of them have the name 'two'"):
        ServeOptions(str(TINY), models=(named, entries[1]))
