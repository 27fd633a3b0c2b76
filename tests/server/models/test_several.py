"""Several generating models in one server: each answers as it does alone, also while others come and go."""

from __future__ import annotations

import functools
import gc
import random
import threading
import time
import weakref
from pathlib import Path

import pytest

pytest.importorskip("starlette")
from pace.llm import LLMModel
from pace.memory import resident_bytes
from tests.server.models.serving import MODELS, SeveralServing, text_of
from tests.waiting import wait_until

PROMPTS = ("Once upon a time", "1, 2, 3,", "The capital of France is", "The fox")


@functools.cache
def expected() -> dict[str, list[str]]:
    """The texts of each model alone."""
    texts = {}
    for name, path in MODELS.items():
        with LLMModel(path, dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
            texts[name] = model.generate(list(PROMPTS), max_new_tokens=16, do_sample=False).texts
    assert texts["chat"] != texts["small"]
    return texts


@pytest.fixture(scope="module")
def several():
    with SeveralServing() as running:
        yield running


def test_each_name_has_its_answers(several):
    for name in MODELS:
        assert [several.tell(name, prompt) for prompt in PROMPTS] == expected()[name]
    assert several.tell(None, PROMPTS[0]) == expected()["chat"][0]
    reply = several.complete("x", model="other")
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    assert reply.error["message"] == "the model 'other' is not served here; available: chat, small"


def test_what_the_server_says_of_them(several):
    assert several.loaded() == {"chat": True, "small": True}
    assert [several.ask(path).status for path in ("/health", "/ready")] == [200, 200]
    assert several.ask("/v1/models/small").json["max_model_len"] > 0 and several.ask("/v1/models/other").status == 404
    assert [several.ask(f"/props{query}").json["model_alias"] for query in ("", "?model=chat", "?model=small")] == [
        "chat", "chat", "small"
    ]  # fmt: skip
    assert several.ask("/props?model=other").status == 404
    assert several.ask("/tokenizer_info?model=small").status == 200
    assert several.ask("/tokenize", {"model": "small", "prompt": "Hello"}).json["count"] > 0
    before = generated(several)
    several.tell("small", max_tokens=7, ignore_eos=True)
    several.check_idle()
    after = generated(several)
    assert after["small"] - before["small"] == 7 and after["chat"] == before["chat"]


def generated(several: SeveralServing) -> dict[str, float]:
    """Tokens that each model has generated, by `/metrics`."""
    name = "pace:generation_tokens_total"
    lines = several.ask("/metrics").body.decode().splitlines()
    assert sum(line.startswith("# TYPE pace:generation_tokens_total") for line in lines) == 1
    return {model: float(line.split()[1]) for model in MODELS for line in lines
            if line.startswith(f'{name}{{model_name="{model}"')}  # fmt: skip


def ask_at_once(several: SeveralServing, num_clients: int, num_requests: int, pause: float) -> int:
    """Sends requests of several clients and checks every text. Returns the number of requests."""
    wrong: list[str] = []

    def client(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(num_requests):
            name, index = choose.choice([*MODELS]), choose.randrange(len(PROMPTS))
            text = several.tell(name, PROMPTS[index])
            if text != expected()[name][index]:
                wrong.append(text)
            time.sleep(choose.random() * pause)

    clients = [threading.Thread(target=client, args=(seed,)) for seed in range(num_clients)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert wrong == []
    return num_clients * num_requests


def test_both_at_once_say_the_same_as_alone(several):
    expected()
    ask_at_once(several, 8, 6, 0.0)


def test_unloads_under_load_change_no_token():
    expected()
    with SeveralServing(idle_unload=0.05) as several:
        num_loads = count_loads(several)
        ask_at_once(several, 2, 12, 0.4)
        wait_until(lambda: several.loaded() == {"chat": False, "small": False})
        assert sum(num_loads.values()) > 4, num_loads
        assert several.ask("/health").status == several.ask("/ready").status == 200
        assert several.ask("/props?model=small").json["model_alias"] == "small"
        refused = several.ask("/tokenizer_info")
        assert refused.status == 503 and "the next request for it loads it" in refused.error["message"]


def count_loads(several: SeveralServing) -> dict[str, int]:
    """Counts the loads of each model from now on."""
    counts = dict.fromkeys(MODELS, 0)
    for service in several.pool.models:

        def load(name: str = service.names[0], own=service.load) -> None:
            counts[name] += 1
            own()

        service.load = load
    return counts


def test_an_unloaded_model_is_gone():
    """No cache, no closure and no thread holds its weights."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with SeveralServing(idle_unload=0.1) as several:
        reply = several.chat(model="chat", max_tokens=20, response_format={"type": "json_schema", "json_schema": {
            "name": "a", "schema": schema}})  # fmt: skip
        assert reply.status == 200, reply.body
        service = several.pool.find("chat")
        held = [weakref.ref(service.generator), weakref.ref(service.generator.engine),
                weakref.ref(service.generator.engine.model)]  # fmt: skip
        wait_until(lambda: not several.loaded()["chat"])
        wait_until(lambda: not several.pool.is_loading)
        gc.collect()
        assert [reference() for reference in held] == [None] * 3
        assert several.tell("chat") == expected()["chat"][0]


def test_a_model_that_cannot_be_loaded_disturbs_no_other(tmp_path: Path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    with SeveralServing({**MODELS, "broken": tmp_path / "broken"}) as several:
        reply = several.complete("x", model="broken")
        assert reply.status == 503 and int(reply.headers["retry-after"]) > 0
        assert "the model 'broken' could not be loaded: " in reply.error["message"]
        assert str(tmp_path) not in reply.error["message"]
        assert several.tell("small") == expected()["small"][0]
        assert several.loaded() == {"chat": True, "small": True, "broken": False}
        assert several.ask("/health").status == several.ask("/ready").status == 200


def test_kept_prefixes_survive_an_unload(tmp_path: Path):
    story = "Once upon a time there was a little fox who lived in a small house by the river. " * 4
    with SeveralServing(idle_unload=0.2, prefix_dir=tmp_path) as several:
        kept = several.ask("/prefixes", {"name": "fox", "model": "small", "prompt": story}).json
        assert several.ask("/prefixes?model=small").json["data"] == [kept] and not several.ask("/prefixes").json["data"]
        wait_until(lambda: not several.loaded()["small"])
        assert several.ask("/prefixes?model=small").json["data"] == [kept]
        reply = several.complete(story + "The fox", model="small", max_tokens=4)
        assert reply.json["usage"]["prompt_tokens_details"]["cached_tokens"] == kept["tokens"]
        wait_until(lambda: not several.loaded()["small"])
        assert several.ask("/prefixes/fox?model=small", method="DELETE").json["deleted"]
        assert text_of(several.complete(story, model="chat", max_tokens=4)) is not None


def test_a_key_has_one_bound_for_all_models():
    with SeveralServing(keys=("key",), max_per_key=1) as several:
        with several.pool.models[0].admission.request("name"):
            assert several.pool.shared.requests_of_key["name"] == 1
            with (
                pytest.raises(Exception, match="1 requests in progress"),
                several.pool.models[1].admission.request("name"),
            ):
                pass


@pytest.mark.thorough
def test_twenty_reloads_take_no_more_memory():
    """After the first few, in which pools of the C library and of workers fill."""
    with SeveralServing(idle_unload=0.02) as several:

        def reload() -> int:
            for name in MODELS:
                several.tell(name)
            wait_until(lambda: several.loaded() == {"chat": False, "small": False})
            wait_until(lambda: not several.pool.is_loading)
            return resident_bytes()

        sizes = [reload() for _ in range(20)]
        weights = sum((path / "model.safetensors").stat().st_size for path in MODELS.values())
        assert sizes[-1] - sizes[4] < weights, sizes  # less than one copy of the weights, in 15 reloads
