"""The pool: who waits, who is refused, what is unloaded, and all races between a request, a load and an unload."""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("starlette")
from pace.server.errors import ApiError, NotWell
from pace.server.models import pool as pool_module
from pace.server.models.pool import ModelPool
from tests.server.models.fake_model import FakeModel, make_pool
from tests.waiting import PATIENCE, until


def on_a_loop(test: Callable[..., Any]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **fields: Any) -> None:
        asyncio.run(asyncio.wait_for(test(*arguments, **fields), PATIENCE))

    return run


async def used(pool: ModelPool, name: str | None = None) -> str:
    """Uses a model for a moment and returns its name."""
    async with pool.use(name) as model:
        assert model.is_loaded
        await asyncio.sleep(0)
        assert model.is_loaded
        return model.names[0]


async def refusal(pool: ModelPool, name: str | None = None) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await used(pool, name)
    return refused.value


@on_a_loop
async def test_a_request_gets_the_model_that_it_names():
    pool = make_pool("chat", "embed")
    await pool.load()
    assert [await used(pool, name) for name in ("chat", "embed", None)] == ["chat", "embed", "chat"]
    unknown = await refusal(pool, "other")
    assert (unknown.status, unknown.code, unknown.param) == (404, "model_not_found", "model")
    assert "'other' is not served here; available: chat, embed" in unknown.message
    assert (await refusal(pool, "x" * 1000)).status == 400
    assert pool.models[0].turns is pool.models[1].turns
    assert not hasattr(make_pool("alone").models[0], "turns")
    lenient = make_pool("chat", "embed", any_model_name=True)
    await lenient.load()
    assert await used(lenient, "gpt-4o") == "chat" and await used(lenient, "embed") == "embed"


@on_a_loop
async def test_requests_wait_for_a_load_and_no_longer_than_max_wait():
    pool = make_pool("chat", "embed")
    chat, embed = pool.models
    embed.may_load.clear()
    loading = asyncio.ensure_future(pool.load())
    await until(lambda: chat.is_loaded)
    assert await used(pool, "chat") == "chat"  # others are not held up
    pool.limits = replace(pool.limits, max_wait=0.05)
    late = await refusal(pool, "embed")
    assert late.status == 503 and "the model is loading: 'embed' was not ready after 0.05 s" in late.message
    assert int(late.headers["retry-after"]) >= 1
    with pytest.raises(NotWell, match="the model is loading"):
        pool.check_well()
    pool.limits = replace(pool.limits, max_wait=PATIENCE)
    waiting = [asyncio.ensure_future(used(pool, "embed")) for _ in range(5)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()  # its client leaves
    embed.may_load.set()
    assert await asyncio.gather(*waiting[1:]) == ["embed"] * 4
    await loading
    pool.check_well(), pool.check_ready()
    assert embed.done == ["load"]


@on_a_loop
async def test_a_failed_load_is_the_answer_of_its_model_only(monkeypatch):
    pool = make_pool("chat", "embed")
    chat, embed = pool.models
    embed.failures = [FileNotFoundError("/secret/folder/model.gguf does not exist"), MemoryError("no memory")]
    await pool.load()
    assert await used(pool, "chat") == "chat"
    refused = await refusal(pool, "embed")
    assert refused.status == 503 and int(refused.headers["retry-after"]) <= pool_module.RETRY_SECONDS
    assert refused.message == "the model 'embed' could not be loaded: model.gguf does not exist"
    pool.check_well(), pool.check_ready()
    assert embed.done == ["load"]
    monkeypatch.setattr(pool_module, "RETRY_SECONDS", 0.0)
    assert "no memory" in (await refusal(pool, "embed")).message
    assert await used(pool, "embed") == "embed" and embed.done == ["load"] * 3


@on_a_loop
async def test_without_any_model_the_server_ends():
    pool = make_pool("only")
    pool.models[0].failures = [FileNotFoundError("none")]
    with pytest.raises(FileNotFoundError):
        await pool.load()
    pool = make_pool("one", "other")
    for model in pool.models:
        model.failures = [ValueError("broken")]
    with pytest.raises(RuntimeError, match="one: broken; other: broken"):
        await pool.load()
    with pytest.raises(NotWell):
        pool.check_well()


@on_a_loop
async def test_an_idle_model_is_unloaded_and_comes_back():
    pool = make_pool("chat", "embed", idle_unload=0.05)
    chat, embed = pool.models
    await pool.load()
    async with pool.use("chat"):
        await until(lambda: not embed.is_loaded)  # it was not used since the start
        await asyncio.sleep(0.1)
        assert chat.is_loaded
        assert [pool.described(model.names[0], model)["loaded"] for model in pool.models] == [True, False]
        pool.check_well(), pool.check_ready()
        assert (await pool.properties("embed"))["model_alias"] == "embed"
    await until(lambda: not chat.is_loaded)
    assert await used(pool, "embed") == "embed" and not chat.is_loaded
    assert embed.done == ["load", "unload", "load"]


@on_a_loop
async def test_a_model_that_is_unloaded_while_it_describes_itself_gives_its_last_answer():
    pool = make_pool("chat", idle_unload=60)
    await pool.load()
    model = pool.models[0]

    def properties() -> dict:
        model.status = status
        raise ApiError(503, "the model is not loaded")

    model.properties = properties
    status = "unloaded"
    assert (await pool.properties("chat"))["model_alias"] == "chat"
    model.status = status = "ready"
    with pytest.raises(ApiError):
        await pool.properties("chat")


@on_a_loop
async def test_a_model_may_wait_for_its_first_request():
    pool = make_pool("chat", load_on_startup=False)
    await pool.load()
    pool.check_ready()
    assert pool.models[0].done == []
    with pytest.raises(AssertionError):
        await pool.properties(None)
    assert await used(pool) == "chat"


@on_a_loop
async def test_a_request_while_the_model_is_unloaded_waits_for_the_new_load():
    pool = make_pool("chat", idle_unload=0.01)
    (chat,) = pool.models
    await pool.load()
    chat.may_unload.clear()
    await until(lambda: chat.status == "unloaded")
    assert chat.is_loaded  # its memory is being freed
    waiting = asyncio.ensure_future(used(pool))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    chat.may_unload.set()
    assert await waiting == "chat" and chat.done == ["load", "unload", "load"]


@on_a_loop
async def test_no_order_of_requests_loads_and_unloads_goes_wrong():
    """`FakeModel` asserts that a load follows an unload, and `used` that the model stays loaded."""
    pool = make_pool("a", "b", "c", idle_unload=0.0005)
    choose = random.Random(15)
    await pool.load()

    async def client() -> None:
        for _ in range(60):
            name = choose.choice("abc")
            if choose.random() < 0.2:
                task = asyncio.ensure_future(used(pool, name))
                await asyncio.sleep(choose.random() / 1000)
                task.cancel()
            else:
                assert await used(pool, name) == name
            await asyncio.sleep(choose.choice((0, 0, 0.002)))

    await asyncio.gather(*(client() for _ in range(6)))
    await until(lambda: not any(model.is_loaded for model in pool.models))
    assert all(slot.num_users == 0 and slot.loading is None for slot in pool._slots)
    assert min(model.done.count("unload") for model in pool.models) > 1


@on_a_loop
async def test_a_drain_ends_waits_and_does_not_wait_for_a_load():
    pool = make_pool("chat", "embed", idle_unload=0.01)
    chat, embed = pool.models
    await pool.load()
    await until(lambda: not (chat.is_loaded or embed.is_loaded))
    chat.may_load.clear()
    waiting = [asyncio.ensure_future(refusal(pool, name)) for name in ("chat", "embed")]
    await until(lambda: pool.is_loading)
    await pool.drain(1)
    assert [(await one).message for one in waiting] == ["the server is shutting down"] * 2
    assert (await refusal(pool, "chat")).status == 503
    assert pool.is_loading and embed.done == ["load", "unload"]
    pool.check_well()
    with pytest.raises(ApiError, match="shutting down"):
        pool.check_ready()
    chat.may_load.set()


def test_fake_models_are_what_a_pool_needs():
    """The members of `HostedModel`, for fakes and for the service."""
    from pace.server.models.hosted import HostedModel
    from pace.server.service import Service

    num_threads = threading.active_count()
    members = {*HostedModel.__annotations__, *(name for name in vars(HostedModel) if not name.startswith("_"))}
    assert members <= {*dir(FakeModel("a"))}
    service = Service(make_pool("a").options, None)
    assert members <= {*dir(service)}
    service.close()
    assert threading.active_count() <= num_threads, "closing ends the threads of a service"
