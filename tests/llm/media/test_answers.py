"""Answers about images: questions about one page, schemas, tools, drafts, and images across turns."""

from __future__ import annotations

import json

import pytest

from pace.llm import LLMModel, PromptLookupConfig

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from tests.llm.media.talking import GREEDY, load, num_encoded, page, save_talking, user

SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["apples", "pears"]}},
    "required": ["total", "unit"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "type": "object",
            "properties": {"kind": {"enum": ["invoice", "letter"]}},
            "required": ["kind"],
            "additionalProperties": False,
        },
    },
}
QUESTIONS = [f"What is in row {number} of this page, and how many of them?" for number in range(10)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("talking")
    save_talking(folder)
    return folder


@pytest.fixture(scope="module")
def fresh(folder):
    """A model that reuses nothing."""
    with load(folder, prefix_cache_bytes=0, media_cache_bytes=0) as model:
        yield model


def text_of(model: LLMModel, *turns, **options) -> str:
    return model.chat(list(turns), **{**GREEDY, **options}).text


def test_ten_questions_about_a_page_run_the_tower_once(folder, fresh) -> None:
    """In a row and at once. From the third on, the page is not read again, either."""
    expected = [text_of(fresh, user(page(), question)) for question in QUESTIONS]
    assert len(set(expected)) > 1
    with load(folder) as model:
        reused = []
        for question, wanted in zip(QUESTIONS, expected):
            answer = model.chat([user(page(), question)], **GREEDY)
            assert answer.text == wanted
            reused.append(answer.metrics.num_reused_tokens)
        assert num_encoded(model) == 1
        assert min(reused[2:]) >= 32 and not reused[0]
        requests = [model.add_request(prompt, **GREEDY) for prompt in prompts(model)]
        assert [request.result().texts[0] for request in requests] == expected and num_encoded(model) == 1
    with load(folder) as model:
        requests = [model.add_request(prompt, **GREEDY) for prompt in prompts(model)]
        assert [request.result().texts[0] for request in requests] == expected and num_encoded(model) == 1


def prompts(model: LLMModel) -> list[dict]:
    """The prompts of the questions, as text with its image."""
    from tests.llm.media.talking import PLACEHOLDER

    return [
        {
            "prompt": model.tokenizer.apply_chat_template(
                [{"role": "user", "content": PLACEHOLDER + question}], tokenize=False, add_generation_prompt=True
            ).removeprefix("<|bos|>"),
            "images": [page()],
        }
        for question in QUESTIONS
    ]


@pytest.mark.parametrize(
    "drafts", [None, pytest.param(PromptLookupConfig(), marks=pytest.mark.thorough)], ids=["plain", "drafts"]
)
def test_schemas_and_tools(folder, fresh, drafts) -> None:
    asked = user(page(), "How much is it? Answer as JSON."), user(page(1), "File this page.")
    with load(folder, spec_config=drafts) as model:
        for _ in range(3):  # computed, with the image's rows, and with cached blocks
            found = text_of(model, asked[0], json_schema=SCHEMA, max_new_tokens=60)
            assert found == text_of(fresh, asked[0], json_schema=SCHEMA, max_new_tokens=60)
            answer = json.loads(found)
            assert answer.keys() == {"total", "unit"} and 0 <= answer["total"] <= 99
        calling = {"tools": [TOOL], "tool_choice": "required", **GREEDY, "max_new_tokens": 60}
        reply = model.chat([asked[1]], **calling)
        (call,) = reply.tool_calls
        assert call.name == "book" and json.loads(call.arguments)["kind"] in ("invoice", "letter")
        (again,) = fresh.chat([asked[1]], **calling).tool_calls
        assert call.arguments == again.arguments
        result = {"role": "tool", "content": user(page(2))["content"]}
        turns = [asked[1], reply.message, result, user("And this one?")]
        assert text_of(model, *turns, tools=[TOOL]) == text_of(fresh, *turns, tools=[TOOL])
        assert num_encoded(model) == 3


def test_several_images_across_turns(folder, fresh) -> None:
    turns: list = []
    with load(folder) as model:
        for number in range(4):
            images = [page(10 * number + place) for place in range(number % 2 + 1)]
            turns.append(user(*images, f"What changed since page {number}?"))
            answer = model.chat(turns, **GREEDY)
            assert answer.text == text_of(fresh, *turns)
            assert num_encoded(model) == sum(index % 2 + 1 for index in range(number + 1)), "only new ones"
            turns.append({"role": "assistant", "content": answer.text})
        assert answer.metrics.num_reused_tokens > 100
        swapped = [*turns]
        swapped[0], swapped[2] = user(page(10), "What changed since page 0?"), user(page(0), page(11), "And now?")
        assert text_of(model, *swapped) == text_of(fresh, *swapped) != turns[-1]["content"]
