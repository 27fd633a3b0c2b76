"""`benchmarks/served.py` sends the same bursts to all servers in turn, and compares what their clients measured."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import served
from benchmarks.serving_costs.bursts import Burst, Sample, send
from tests.bench.serving.scripted_server import serving, stream, whole

VOCAB_SIZE = 5000


def test_prompts_are_new_in_each_round_and_share_what_they_should():
    alone, together = Burst(3, 40, 4), Burst(3, 40, 4, has_prefix=True)
    assert alone.prompts(VOCAB_SIZE, 1) == alone.prompts(VOCAB_SIZE, 1)
    rows = [row for burst in (alone, together) for seed in (1, 2) for row in burst.prompts(VOCAB_SIZE, seed)]
    assert {len(row) for row in rows} == {40} and 1000 <= min(map(min, rows)) and max(map(max, rows)) < VOCAB_SIZE
    for length, expected in ((30, 4 + 4 + 1 + 1), (31, 4 * 4)):  # three quarters are shared by the rows of a round
        assert len({tuple(row[:length]) for row in rows}) == expected


def talk(burst: Burst, answer) -> tuple[list[dict], Sample]:
    """Returns the bodies of the requests, and what the clients measured."""

    async def exchange():
        def reply(index, body):
            return answer(body) if body else [(0, whole(200, {"data": [{"id": "m"}]}))]

        async with serving(reply) as server:
            sample = await send(server.url, burst, burst.prompts(VOCAB_SIZE, 1))
            return [body for body in server.bodies if body], sample

    return asyncio.run(exchange())


@pytest.mark.parametrize("has_prefix", [False, True])
def test_a_burst_is_sent_and_measured(has_prefix):
    burst = Burst(2, 20, 4, has_prefix)
    bodies, sample = talk(burst, lambda body: stream(body["max_tokens"], 0.02, 0.01, prompt=len(body["prompt"])))
    first, *others = burst.prompts(VOCAB_SIZE, 1)
    assert [body["max_tokens"] for body in bodies] == [1] * has_prefix + [4, 4]
    assert sorted(body["prompt"] for body in bodies[-2:]) == sorted(others)
    assert not has_prefix or bodies[0]["prompt"] == first
    assert all(body["ignore_eos"] and body["stream"] and body["temperature"] == 0 for body in bodies)
    assert 1 < sample.tokens_per_s <= 2 * 4 / 0.049
    assert min(sample.first_s) >= 0.019 and min(sample.step_s) >= 0.009 and len(sample.first_s) == 2


def test_an_answer_that_is_not_the_wanted_one_is_no_measurement():
    burst = Burst(2, 20, 4)
    with pytest.raises(RuntimeError, match=r"counts 20 \+ 3 tokens of a request of 20 \+ 4"):
        talk(burst, lambda body: stream(3, 0.0, 0.0, prompt=20))
    with pytest.raises(RuntimeError, match=r"counts 21 \+ 4 tokens"):
        talk(burst, lambda body: stream(4, 0.0, 0.0, prompt=21))
    with pytest.raises(RuntimeError, match=r"a request failed \(HTTP 429\): full"):
        talk(burst, lambda body: [(0, whole(429, {"error": {"message": "full"}}))])


class FakeServer:
    def __init__(self, name: str, events: list[str]) -> None:
        self.url, self.events = name, events

    def thaw(self) -> None:
        self.events.append(self.url)

    def freeze(self) -> None:
        self.events.append("frozen")


def test_servers_take_turns_and_a_failed_one_is_left_out(monkeypatch, capsys):
    events: list[str] = []
    sent: list[list] = []
    contenders = [served.Contender(name, FakeServer(name, events)) for name in ("pace", "it")]
    speed = {"pace": 30.0, "it": 20.0}

    async def fake_send(url, burst, prompts):
        sent.append(prompts)
        if url == "it" and burst.clients == 2 and len(contenders[1].samples[burst]) == 1:
            raise RuntimeError("it fell over")
        return Sample(speed[url], [6 / speed[url]] * burst.clients, [0.05] * burst.clients)

    monkeypatch.setattr(served, "send", fake_send)
    bursts = [Burst(1, 20, 4), Burst(2, 20, 4, has_prefix=True)]
    contenders[1].samples[bursts[1]] = []
    served.measure(contenders, bursts, VOCAB_SIZE, rounds=2)
    assert events == ["pace", "frozen", "it", "frozen"] * 5  # one burst to warm up, then two in each round
    assert sent[0::2] == sent[1::2] and len({str(prompts) for prompts in sent}) == 5
    assert contenders[1].failure == "2 x 20 + 4, shared prefix: it fell over"
    served.measure(contenders, bursts[:1], VOCAB_SIZE, rounds=1)
    assert events[20:] == ["pace", "frozen"] * 2
    assert [len(contender.samples[bursts[0]]) for contender in contenders] == [3, 2]

    rows = served.table(contenders, bursts)
    assert rows[2:6] == [
        "| 20 | none | 1 | pace | 30.0 |  | 0.20, 0.20 s |  | 50 ms |",
        "| 20 | none | 1 | it | 20.0 | 1.50 | 0.30, 0.30 s | 1.50 | 50 ms |",
        "| 20 | shared | 2 | pace | 30.0 |  | 0.20, 0.20 s |  | 50 ms |",
        "| 20 | shared | 2 | it | 20.0 | 1.50 | 0.30, 0.30 s | 1.50 | 50 ms |",
    ]
    assert rows[6:] == ["\nit was not measured to the end: 2 x 20 + 4, shared prefix: it fell over"]
    assert "it failed: 2 x 20 + 4, shared prefix: it fell over" in capsys.readouterr().out


def test_options(capsys):
    options = served.parse(["--quick", "--llama-server", "PATH"])
    assert (options.clients, options.rounds, options.llama_server) == ([1, 2], 1, "PATH")
    assert served.parse([]).clients == [1, 8, 32, 64] and served.parse([]).prompts == [128, 1024]
    with pytest.raises(SystemExit):
        served.parse(["--clients", "0"])
    assert "must be at least 1" in capsys.readouterr().err
