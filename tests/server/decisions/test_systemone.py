"""`POST /v1/systemone`: answers, usage, and bad requests."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tests.server.serving import Serving, read_reply, request_bytes
from tests.waiting import PATIENCE, wait_until

PATH = "/v1/systemone"
CHOICE = {"type": "choice", "instructions": "Which?", "criteria": {"fox": "An animal", "oak": None}}
BODY = {"model": "tiny", "state": {"text": "A fox ran."}, "questions": {"what": CHOICE, "again": CHOICE}}


def test_the_answers_of_the_model(serving):
    reply = serving.ask(PATH, BODY)
    assert reply.status == 200, reply.body
    found = reply.json
    assert found["model"] == "tiny" and list(found["answers"]) == ["what", "again"]
    assert found["answers"]["what"] == found["answers"]["again"]
    assert found["answers"] == serving.generator.decide(BODY["state"], BODY["questions"])
    prompts = serving.generator.decider.prompts().read(BODY["state"], BODY["questions"])
    assert found["usage"] == {"input_tokens": sum(len(one.tokens) for one in prompts), "output_tokens": 0}
    assert serving.ask("/systemone", {**BODY, "model": "alias", "assets": {}}).json["model"] == "alias"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"state": 5}, "state"),
        ({"state": None}, "state"),
        ({"questions": {}}, "questions"),
        ({"questions": [CHOICE]}, "questions"),
        ({"questions": {"q": "text"}}, "questions.q"),
        ({"questions": {"q": {"type": "rank"}}}, "questions"),
        ({"questions": {"q": {"type": "noul"}}}, "questions"),
        ({"questions": {str(number): CHOICE for number in range(65)}}, "questions"),
        ({"questions": {"q": {**CHOICE, "criteria": {str(number): None for number in range(27)}}}}, "questions"),
        ({"assets": {"image": {"type": "image"}}}, "assets"),
        ({"stream": True}, "stream"),
        ({"state": "A fox ran. " * 400}, "state"),
        ({"state": "x" * 40000}, "state"),
    ],
)
def test_bad_requests(serving, fields, param):
    reply = serving.ask(PATH, {**BODY, **fields})
    assert reply.status == 400, reply.body
    assert reply.json["error"]["param"] == param and reply.json["error"]["message"]


def test_a_missing_state_and_an_unknown_model(serving):
    reply = serving.ask(PATH, {"questions": BODY["questions"]})
    assert reply.status == 400 and "state" in reply.json["error"]["message"]
    assert serving.ask(PATH, {**BODY, "model": "other"}).status == 404


def test_a_client_that_leaves_frees_the_engine(serving):
    with serving.connect() as connection:
        connection.sendall(request_bytes(PATH, {**BODY, "state": "A fox ran over the hill. " * 60}, "POST"))
    serving.check_idle()


def test_a_decision_that_outlasts_the_drain_gets_an_answer():
    gate = threading.Event()
    with Serving() as own:
        held = own.generator.driver.call(lambda engine: gate.wait(PATIENCE))
        connection = own.connect()
        connection.sendall(request_bytes(PATH, BODY, "POST"))
        wait_until(lambda: own.service.admission.num_requests == 1)
        asyncio.run_coroutine_threadsafe(own.service.drain(0.05), own.loop).result(PATIENCE)
        reply = read_reply(connection)
        assert reply.status == 503 and "shutting down" in reply.error["message"]
        assert own.service.admission.num_requests == 0
        gate.set()
        held.result(PATIENCE)
