"""Kept prefixes: they are used by requests that begin with them, also by a later server, and only by their clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from pace.llm.generator import Generator
from tests.server.serving import Serving, make_generator

STORY = "Once upon a time there was a little fox who lived in a small house by the river. " * 4
SYSTEM = [{"role": "system", "content": STORY}]
QUESTION = {"role": "user", "content": "What is the capital of France?"}
KEYS = ("first-key", "second-key")


@pytest.fixture
def generator() -> Generator:
    made = make_generator(kv_cache_bytes="16MiB")
    yield made
    made.driver.close()


def served(generator: Generator, folder: Path, **options) -> Serving:
    return Serving(generator, prefix_dir=folder, **options)


def authorised(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def cached(serving: Serving, messages: list[dict], key: str | None = None, **fields) -> tuple[int, str]:
    """Number of cached tokens of a request, and its answer."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 6, "temperature": 0, **fields}
    reply = serving.ask("/v1/chat/completions", body, **(authorised(key) if key else {}))
    assert reply.status == 200, reply.json
    return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"], reply.json["choices"][0]["message"]["content"]


def test_a_later_server_answers_from_a_kept_prefix(tmp_path: Path, generator: Generator) -> None:
    """For any next question, with the answer of a server without it. The cache loads it again after it was evicted."""
    with served(generator, tmp_path) as serving:
        _, expected = cached(serving, [*SYSTEM, QUESTION])
        kept = serving.ask("/prefixes", {"name": "fox", "messages": SYSTEM}).json
        assert kept["name"] == "fox" and kept["tokens"] % 16 == 0 and kept["tokens"] > 60
        assert kept["bytes"] == next(tmp_path.iterdir()).stat().st_size
        assert serving.ask("/v1/prefixes").json == {"object": "list", "data": [kept]}
    other = make_generator(kv_cache_bytes="16MiB", num_threads=1)
    with served(other, tmp_path) as serving:
        assert serving.ask("/prefixes").json["data"] == [kept]
        assert cached(serving, [*SYSTEM, QUESTION]) == (kept["tokens"], expected)
        other.driver.call(lambda engine: engine._start_afresh()).result()
        assert cached(serving, [*SYSTEM, QUESTION]) == (kept["tokens"], expected)
        assert cached(serving, [QUESTION])[0] == 0
    other.driver.close()


def test_a_prefix_that_the_prefix_cache_cannot_keep_is_used_whole(tmp_path: Path, generator: Generator) -> None:
    """Each request loads it, and all of it is in the cache until the answer ends."""
    with served(generator, tmp_path) as serving:
        kept = serving.ask("/prefixes", {"name": "fox", "messages": SYSTEM}).json["tokens"]
    two_blocks = 2 * generator.engine.cache.spec.block_bytes
    small = make_generator(kv_cache_bytes="16MiB", prefix_cache_bytes=two_blocks)
    with served(small, tmp_path) as serving:
        for _ in range(2):
            assert cached(serving, [*SYSTEM, QUESTION])[0] == kept > 32
    small.driver.close()


def test_a_document_at_the_start_of_a_question(tmp_path: Path, generator: Generator) -> None:
    with served(generator, tmp_path) as serving:
        messages = [{"role": "user", "content": STORY}]
        kept = serving.ask("/prefixes", {"name": "fox", "messages": messages}).json["tokens"]
        generator.driver.call(lambda engine: engine._start_afresh()).result()
        assert cached(serving, [{"role": "user", "content": STORY + "Who lived there?"}])[0] == kept
        text = serving.ask("/prefixes", {"name": "text", "prompt": STORY}).json["tokens"]
        generator.driver.call(lambda engine: engine._start_afresh()).result()
        reply = serving.ask("/v1/completions", {"prompt": STORY + "One day", "max_tokens": 2}).json
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == text


def test_each_key_has_its_own(tmp_path: Path, generator: Generator) -> None:
    """No file has a key, a salt or a part of one."""
    first, second = map(authorised, KEYS)
    with served(generator, tmp_path, keys=KEYS) as serving:
        kept = serving.ask("/prefixes", {"name": "fox", "messages": SYSTEM}, **first).json["tokens"]
        salted = {"name": "salted", "messages": [{"role": "system", "content": "x" + STORY}], "cache_salt": "my-salt"}
        assert serving.ask("/prefixes", salted, **first).status == 200
        assert serving.ask("/prefixes", **second).json["data"] == []
        assert serving.ask("/prefixes/fox", method="DELETE", **second).status == 404
        generator.driver.call(lambda engine: engine._start_afresh()).result()
        assert cached(serving, [*SYSTEM, QUESTION], KEYS[1])[0] == 0
        assert cached(serving, [*SYSTEM, QUESTION], KEYS[0])[0] == kept
        assert cached(serving, [*salted["messages"], QUESTION], KEYS[0])[0] == 0
        assert cached(serving, [*salted["messages"], QUESTION], KEYS[0], cache_salt="my-salt")[0] > 60
        assert serving.ask("/prefixes", {"name": "fox", "messages": SYSTEM}, **second).status == 200
        files = sorted(tmp_path.iterdir())
        assert len(files) == 3
        for secret in (*KEYS, "my-salt", *(client.salt for client in serving_clients(serving))):
            assert all(secret.encode() not in path.read_bytes() and secret not in path.name for path in files)
        assert serving.ask("/prefixes/fox", method="DELETE", **first).json["deleted"]
        assert [one["name"] for one in serving.ask("/prefixes", **first).json["data"]] == ["salted"]
        assert len(list(tmp_path.iterdir())) == 2


def serving_clients(serving: Serving) -> list:
    from pace.server.network.security import Client

    return [Client.of(key) for key in serving.options.keys]


@pytest.mark.parametrize(
    "body, message",
    [
        ({"name": "../fox", "messages": SYSTEM}, "name must be"),
        ({"name": ".fox", "messages": SYSTEM}, "name must be"),
        ({"name": "a/b", "messages": SYSTEM}, "name must be"),
        ({"name": "", "messages": SYSTEM}, "name must be"),
        ({"name": "fox\n", "messages": SYSTEM}, "name must be"),
        ({"name": "f" * 101, "messages": SYSTEM}, "name must be"),
        ({"messages": SYSTEM}, "name: is missing"),
        ({"name": "fox"}, "exactly one of prompt and messages"),
        ({"name": "fox", "prompt": "a", "messages": SYSTEM}, "exactly one of prompt and messages"),
        ({"name": "fox", "prompt": "Once"}, "must have more than 16 tokens"),
        ({"name": "fox", "prompt": STORY * 40}, "maximum context length"),
        ({"name": "fox", "messages": [{"role": "user", "content": [{"type": "video"}]}]}, "video is not supported"),
        ({"name": "fox", "messages": SYSTEM, "cache_salt": ""}, "cache_salt must have"),
    ],
)
def test_requests_that_are_refused(tmp_path_factory, body: dict, message: str) -> None:
    folder = tmp_path_factory.getbasetemp() / "refused"
    from tests.server.serving import shared_generator

    with served(shared_generator(), folder) as serving:
        reply = serving.ask("/prefixes", body)
        assert reply.status == 400 and message in reply.json["error"]["message"]
        assert list(folder.iterdir()) == []


def test_without_a_folder_none_are_kept(serving: Serving) -> None:
    reply = serving.ask("/prefixes", {"name": "fox", "messages": SYSTEM})
    assert reply.status == 400 and "--prefix-dir" in reply.json["error"]["message"]
    assert serving.ask("/prefixes/fox", method="DELETE").status == 400
    assert serving.ask("/prefixes").json["data"] == []


def test_limits_and_damaged_files(tmp_path: Path, generator: Generator, caplog) -> None:
    """What is kept stays within its limits. A damaged file is reported, not used, and may be replaced."""
    with served(generator, tmp_path, prefixes=1) as serving:
        assert serving.ask("/prefixes", {"name": "fox", "messages": SYSTEM}).status == 200
        reply = serving.ask("/prefixes", {"name": "other", "messages": SYSTEM})
        assert reply.status == 400 and "delete one (DELETE /prefixes/NAME)" in reply.json["error"]["message"]
        assert serving.ask("/prefixes", {"name": "fox", "messages": SYSTEM}).status == 200
    with served(generator, tmp_path, prefix_bytes=1000) as serving:
        reply = serving.ask("/prefixes", {"name": "other", "messages": SYSTEM})
        assert reply.status == 400 and "0 bytes of 1000 bytes are left" in reply.json["error"]["message"]
    [path] = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with served(generator, tmp_path) as serving:
        generator.driver.call(lambda engine: engine._start_afresh()).result()
        assert cached(serving, [*SYSTEM, QUESTION])[0] == 0 and "contents are damaged" in caplog.text
    path.write_bytes(data[:-1])
    with served(generator, tmp_path) as serving:
        assert "truncated" in caplog.text and serving.ask("/prefixes").json["data"] == []
        assert serving.ask("/prefixes", {"name": "fox", "messages": SYSTEM}).status == 200
        assert len(serving.ask("/prefixes").json["data"]) == 1
    with pytest.raises(ValueError, match="prefix_dir="):
        served(generator, path)
