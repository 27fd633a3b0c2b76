"""The chat page in a real browser, against a server with scripted answers."""

from __future__ import annotations

import json

import pytest

from tests.server.page.browser import Browser
from tests.server.page.chat import Chat
from tests.server.page.scripted_server import Answer
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough  # test_real.py covers one question and its answer in every run


def test_an_answer_appears_while_it_comes(chat: Chat):
    chat.begin("Hi", Answer(["First", " second", " third"], pause=0.15))
    chat.browser.wait("document.querySelector('.answer .body')?.innerText == 'First'")
    assert chat.count("#stop:not([hidden])") == 1
    assert chat.answer() == "First second third"
    stats = chat.text(".answer .stats")
    assert "3 tokens ·" in stats and "tokens/s" in stats and "first token 0." in stats and "13 of 1,024" in stats
    request = chat.server.requests[0]
    assert request == {
        "model": "scripted",
        "messages": [{"role": "user", "content": "Hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_escape_stops_and_the_part_that_came_is_kept(chat: Chat):
    chat.begin("Hi", Answer(["word "] * 500, pause=0.02))
    chat.browser.wait("document.querySelector('.answer .body')?.innerText.startsWith('word word')")
    chat.browser.press("Escape")
    text = chat.answer()
    assert "stopped" in chat.text(".answer .stats")
    assert chat.server.client_gone.wait(PATIENCE), "the server must see the connection close"
    assert chat.ask("Go on") == "Hello."
    roles, contents = zip(*chat.said())
    assert roles == ("user", "assistant", "user") and contents[1].strip() == text.strip()


def test_retry_replaces_the_answer(chat: Chat):
    chat.ask("Hi", Answer(["Bad."]))
    chat.server.answers.append(Answer(["Good."]))
    chat.click(".answer:last-child .retry")
    chat.browser.wait("document.querySelector('.answer .body').innerText == 'Good.'")
    assert chat.count(".turn") == 2
    assert chat.said(0) == chat.said(1) == [("user", "Hi")]


def test_an_edited_question_goes_on_from_there(chat: Chat):
    chat.ask("One", Answer(["1"]))
    chat.ask("Two", Answer(["2"]))
    chat.ask("Three", Answer(["3"]))
    chat.click(".question:nth-child(3) .edit")
    chat.fill(".question:nth-child(3) textarea", "Deux")
    chat.server.answers.append(Answer(["II"]))
    chat.browser.press("Enter")
    assert chat.answer() == "II"
    assert chat.count(".turn") == 4
    assert chat.said() == [("user", "One"), ("assistant", "1"), ("user", "Deux")]


def test_parameters_the_system_prompt_and_the_key_are_sent(chat: Chat):
    chat.click("header .settings")
    values = {"temperature": "0.5", "top_p": "0.9", "top_k": "40", "max_tokens": "7", "seed": "-3"}
    for name, value in {**values, "system": "Be brief.", "key": "secret-key"}.items():
        chat.fill(f"[name={name}]", value)
    chat.browser.press("Enter")
    chat.browser.wait("document.activeElement.id == 'question'")
    chat.ask("Hi")
    request = chat.server.requests[0]
    assert {name: request[name] for name in values} == {name: json.loads(value) for name, value in values.items()}
    assert chat.said() == [("system", "Be brief."), ("user", "Hi")]
    assert chat.server.keys == ["Bearer secret-key"]
    assert "secret-key" not in chat.browser.evaluate("JSON.stringify(localStorage)")
    chat.load()
    chat.ask("Again")
    assert chat.server.requests[1]["top_k"] == 40 and chat.server.keys[1] == "Bearer secret-key"


TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]


def give_tools(chat: Chat, text: str) -> None:
    chat.click("header .settings")
    chat.fill("[name=tools]", text)
    chat.click("dialog .end button")


def test_a_call_is_shown_and_the_next_message_is_its_result(chat: Chat):
    give_tools(chat, json.dumps(TOOLS))
    arguments = '{"city": "<img src=x onerror=alert(1)>**Rome**"}'
    chat.ask("Weather?", Answer(["Let me see."], call=("get_weather", arguments), finish="tool_calls", pause=0.02))
    assert chat.text(".answer .call") == f"get_weather {arguments}" and chat.count(".call *") == 2
    assert "your next message is the result" in chat.text(".answer .stats")
    request = chat.server.requests[0]
    assert request["tools"] == TOOLS and request["parallel_tool_calls"] is False
    chat.load()
    assert chat.text(".answer .call") == f"get_weather {arguments}", "it is kept"
    assert chat.ask("sunny", Answer(["Sunny, then."])) == "Sunny, then."
    called = {"name": "get_weather", "arguments": arguments}
    assert chat.server.requests[1]["messages"] == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "call_1", "type": "function", "function": called}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]


def test_a_call_that_is_cut_off_is_shown_and_not_sent(chat: Chat):
    give_tools(chat, json.dumps(TOOLS))
    chat.ask("Weather?", Answer([], call=("get_weather", '{"ci'), finish="length"))
    assert chat.text(".answer .call") == 'get_weather {"ci'
    chat.ask("Again")
    assert chat.said() == [("user", "Again")]


@pytest.mark.parametrize(("field", "value"), [("temperature", "99"), ("tools", '{"name": "f"}')])
def test_a_setting_that_is_wrong_is_not_sent(chat: Chat, field: str, value: str):
    chat.click("header .settings")
    chat.fill(f"[name={field}]", value)
    chat.click("dialog .end button")
    assert chat.browser.evaluate("document.querySelector('dialog').open"), "the field must be shown to be wrong"
    chat.browser.press("Escape")
    chat.browser.wait("document.activeElement.id == 'question'")
    chat.ask("Hi")
    assert field not in chat.server.requests[0]


def test_a_busy_server_is_asked_again_when_it_said(chat: Chat):
    busy = Answer(status=429, error={"message": "8 requests wait."}, headers={"Retry-After": "1"})
    chat.begin("Hi", busy, Answer(["Now."]))
    chat.browser.wait("document.querySelector('.trouble')?.checkVisibility()")
    assert "busy" in chat.text(".trouble p") and "8 requests wait." in chat.text(".trouble p")
    assert chat.browser.evaluate("document.querySelector('.again').disabled")
    assert chat.text(".again") == "Retry in 1 s"
    chat.browser.wait("!document.querySelector('.again').disabled")
    chat.click(".again")
    chat.browser.wait("document.querySelector('.answer .body').innerText == 'Now.'")
    assert chat.count(".turn") == 2 and chat.count(".trouble:not([hidden])") == 0


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (
            Answer(
                status=400,
                error={"message": "-", "code": "context_length_exceeded", "n_prompt_tokens": 1100, "n_ctx": 1024},
            ),
            "1,100 tokens, the model reads 1,024",
        ),
        (Answer(status=503, error={"message": "It is loading."}), "no questions now. It is loading."),
        (Answer(status=401, error={"message": "-"}), "asks for an API key"),
        (Answer(status=400, error={"message": "roles must alternate"}), "roles must alternate"),
        (Answer(["Some "], error={"message": "It broke."}), "It broke."),
        (Answer(["Some "], finish=None), "closed before the answer was complete"),
    ],
    ids=["context", "loading", "key", "refused", "in-stream", "cut"],
)
def test_errors_are_sentences_with_a_way_on(chat: Chat, answer: Answer, sentence: str):
    text = chat.ask("Hi", answer)
    assert sentence in chat.text(".trouble p")
    assert text.strip() == "".join(answer.pieces).strip(), "what came must stay"
    chat.click(".again")
    chat.browser.wait("document.querySelector('.answer .body').innerText == 'Hello.'")


def test_a_question_without_an_answer_is_not_sent_again(chat: Chat):
    chat.ask("Lost", Answer(status=503, error={"message": "-"}))
    chat.ask("Found")
    assert chat.said() == [("user", "Found")]


def test_the_keyboard_is_enough(chat: Chat):
    browser = chat.browser
    browser.evaluate("document.querySelector('#question').focus()")
    browser.type("one")
    browser.press("Enter", "Shift")
    browser.type("two")
    assert chat.server.requests == []
    browser.press("Enter", "Control")
    chat.answer()
    assert chat.said() == [("user", "one\ntwo")]

    seen = {}
    for _ in range(20):
        browser.press("Tab")
        name, is_visible = browser.evaluate(
            "[document.activeElement.ariaLabel || document.activeElement.innerText || document.activeElement.id,"
            "getComputedStyle(document.activeElement).outlineStyle != 'none']"
        )
        seen[name] = is_visible
    for name in ("New conversation", "Delete one two", "Export all", "Settings", "Edit", "Retry", "Send"):
        assert seen.get(name), f"{name} must be reached by Tab, and seen to have the focus: {seen}"

    _tab_to(browser, "Edit")
    browser.press(" ")
    browser.type(" three")
    browser.press("Escape")
    assert browser.evaluate("document.activeElement.innerText") == "Edit"
    assert chat.text(".question .text") == "one\ntwo"
    _tab_to(browser, "Settings")
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.name") == "system"
    browser.press("Escape")
    browser.wait("document.activeElement.id == 'question'")


def _tab_to(browser: Browser, name: str) -> None:
    for _ in range(30):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.innerText") == name:
            return
    raise AssertionError(f"Tab does not come to {name}")


def test_everything_that_can_be_used_has_a_name(chat: Chat):
    chat.ask("Hi", Answer(["```\nx\n```"]))
    nameless = chat.browser.evaluate(
        "[...document.querySelectorAll('button, input, textarea, select')].filter(e =>"
        "!(e.ariaLabel || e.innerText.trim() || e.textContent.trim() || e.labels?.length || e.hidden)).map(e => "
        "e.outerHTML)"
    )
    assert nameless == []
    assert chat.browser.evaluate("document.querySelector('#log').ariaLive") == "polite"


def test_history_survives_a_reload_and_is_only_here(chat: Chat):
    chat.ask("First question", Answer(["A **bold** answer."]))
    chat.click("aside .new")
    chat.ask("Second question")
    chat.load()
    assert chat.text(".question .text") == "Second question"
    titles = "[...document.querySelectorAll('#history .open')].map(item => item.innerText)"
    assert chat.browser.evaluate(titles) == ["Second question", "First question"]
    chat.click("#history li:nth-child(2) .open")
    assert chat.text(".answer strong") == "bold"
    chat.ask("More")
    assert chat.said() == [("user", "First question"), ("assistant", "A **bold** answer."), ("user", "More")]

    chat.click("#history li.current .delete")
    assert chat.browser.evaluate(titles) == ["Second question"]
    assert chat.count(".turn") == 0
    chat.click("#notice button")
    assert chat.browser.evaluate(titles) == ["First question", "Second question"]


def test_a_deleted_conversation_stays_deleted_though_its_answer_still_came(chat: Chat):
    chat.begin("Hi", Answer(["word "] * 500, pause=0.02))
    chat.browser.wait("document.querySelector('.answer .body')?.innerText.startsWith('word word')")
    chat.click("#history .delete")
    assert chat.server.client_gone.wait(PATIENCE)
    chat.load()
    assert chat.count("#history .open") == 0


def test_the_export_is_json_with_all_conversations(chat: Chat):
    chat.ask("First question")
    chat.click("aside .new")
    chat.ask("Second question")
    chat.browser.evaluate("URL.createObjectURL = (blob) => { window.exported = blob.text(); return '#'; }")
    chat.click("#export")
    conversations = json.loads(chat.browser.evaluate("window.exported"))["conversations"]
    assert [chat["messages"][0]["content"] for chat in conversations] == ["Second question", "First question"]
    assert conversations[0]["messages"][1]["content"] == "Hello."


def test_the_policy_blocks_what_the_page_did_not_bring(chat: Chat):
    browser = chat.browser
    browser.open(chat.server.url + "injected")
    assert browser.evaluate("window.wasRun === undefined")
    assert any("inline script" in text for text in browser.violations), browser.violations
    refused = "try { document.body.innerHTML = '<p>'; 'parsed' } catch (error) { error.name }"
    assert browser.evaluate(refused) == "TypeError"
    browser.violations.clear()
    outside = "fetch('http://127.0.0.1:1/').then(() => 'sent', (error) => error.name)"
    assert browser.evaluate(outside) == "TypeError"
    assert any("connect-src" in text for text in browser.violations), browser.violations
    browser.violations.clear()
    browser.errors.clear()
