"""Adapters over HTTP: named by `model` or by llama.cpp's `lora`, listed, loaded from a folder, and unloaded."""

from __future__ import annotations

import pytest

pytest.importorskip("peft")
from tests.llm.adapters.saved import CONFIG, pair, save_adapter, write
from tests.server.serving import QUESTION, Serving, make_generator

PROMPT = "Once upon a time there was"
PATH = "/lora-adapters"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora")
    for seed, name in enumerate(("one", "two"), 1):
        save_adapter(folder / name, seed)
    write(folder / "bad", CONFIG | {"use_dora": True}, pair())
    return folder


@pytest.fixture(scope="module")
def serving(folder):
    generator = make_generator(kv_cache_bytes="32MiB", max_adapters=3)
    with Serving(generator, lora=(("poet", folder / "one"),), lora_dir=folder) as running:
        yield running


def text(serving, **fields) -> str:
    reply = serving.complete(PROMPT, max_tokens=12, ignore_eos=True, **fields)
    assert reply.status == 200, reply.body
    return reply.json["choices"][0]["text"]


def test_the_model_names_an_adapter(serving):
    base, poet = text(serving), text(serving, model="poet")
    assert (
        base == text(serving, model="tiny") == text(serving, lora=[{"id": 0, "scale": 0.0}]) == text(serving, lora=[])
    )
    assert poet == text(serving, lora=[{"id": 0, "scale": 1}]) != base
    reply = serving.chat(model="poet", max_tokens=8)
    assert reply.json["model"] == "poet" and reply.json["choices"]
    asked = {"state": "A fox.", "questions": {"q": {"type": "choice", "criteria": {"fox": None, "oak": None}}}}
    answers = [serving.ask("/v1/systemone", asked | {"model": name}).json for name in ("tiny", "poet")]
    assert answers[1]["model"] == "poet" and answers[0]["answers"] != answers[1]["answers"]
    assert serving.ask("/tokenize", {"content": "x", "model": "poet"}).status == 200


def test_lists(serving):
    listed = serving.ask("/v1/models").json["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [("tiny", None), ("alias", None), ("poet", "tiny")]
    assert serving.ask("/v1/models/poet").json["parent"] == "tiny"
    [one] = serving.ask(PATH).json
    assert one == {"id": 0, "name": "poet", "path": "one", "scale": 0.0, "rank": 4}


def test_loading_and_unloading(serving):
    reply = serving.ask(PATH, {"name": "second", "path": "two"})
    assert reply.status == 200 and reply.json["name"] == "second" and reply.json["id"] == 1
    assert text(serving, model="second") not in (text(serving), text(serving, model="poet"))
    both = [{"id": 0, "scale": 0.5}, {"id": 1, "scale": 0.5}]
    assert text(serving, lora=both) == text(serving, lora=both[::-1])
    for name in ("second", "poet", "tiny", "alias"):
        assert serving.ask(PATH, {"name": name, "path": "two"}).status == 409
    assert serving.ask(f"{PATH}/second", method="DELETE").json["deleted"]
    assert serving.ask(f"{PATH}/second", method="DELETE").status == 404
    assert serving.complete(PROMPT, model="second").status == 404
    assert serving.ask(PATH, {"name": "second", "path": "two"}).json["id"] == 2  # numbers are not used again
    serving.ask(f"{PATH}/second", method="DELETE")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"name": "x"}, 400, "path"),
        ({"name": "", "path": "two"}, 400, "name"),
        ({"name": "x" * 200, "path": "two"}, 400, "name"),
        ({"name": " x", "path": "two"}, 400, "printable"),
        ({"name": "x", "path": "none"}, 404, "no adapter at 'none'"),
        ({"name": "x", "path": "../"}, 400, "inside"),
        ({"name": "x", "path": "/etc"}, 400, "inside"),
        ({"name": "x", "path": "a\0b"}, 400, "inside"),
        ({"name": "x", "path": "."}, 400, "inside"),
        ({"name": "x", "path": "bad"}, 400, "DoRA"),
        ([{"id": 0, "scale": 1.0}], 400, "not set for everybody"),
        ([], 400, "not set for everybody"),
    ],
)
def test_loads_that_are_refused(serving, folder, body, status, message):
    reply = serving.ask(PATH, body)
    assert reply.status == status and message in reply.json["error"]["message"], reply.body
    assert str(folder) not in reply.body.decode()
    assert len(serving.ask(PATH).json) == 1


def test_links_out_of_the_folder_are_refused(serving, folder, tmp_path):
    save_adapter(tmp_path / "outside", 3)
    (folder / "link").symlink_to(tmp_path / "outside")
    assert serving.ask(PATH, {"name": "x", "path": "link"}).status == 400


@pytest.mark.parametrize(
    "lora",
    [5, [5], [{"id": 0}], [{"id": "0", "scale": 1}], [{"id": 0, "scale": "1"}], [{"id": 7, "scale": 1}],
     [{"id": 0, "scale": 1}, {"id": 0, "scale": 2}], [{"id": True, "scale": 1}], [{"id": 0, "scale": 1}] * 17],
)  # fmt: skip
def test_forms_of_lora_that_are_refused(serving, lora):
    reply = serving.complete(PROMPT, lora=lora)
    assert reply.status == 400 and reply.json["error"]["param"].startswith("lora"), reply.body


def test_one_way_of_naming_at_once(serving):
    assert serving.complete(PROMPT, model="poet", lora=[{"id": 0, "scale": 1}]).status == 400
    assert serving.complete(PROMPT, lora_request={"lora_name": "poet"}).status == 400


def test_without_a_folder_nothing_is_loaded():
    with Serving() as running:
        reply = running.ask(PATH, {"name": "x", "path": "two"})
        assert reply.status == 400 and "--lora-dir" in reply.json["error"]["message"]
        assert running.ask(PATH).json == []
        assert running.ask("/v1/chat/completions", {"messages": QUESTION, "model": "x"}).status == 404
