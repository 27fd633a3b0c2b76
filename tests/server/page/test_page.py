"""The chat page in a real browser, against a server with scripted answers."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.server.page.browser import Browser
from tests.server.page.chat import Chat
from tests.server.page.scripted_server import Answer
from tests.waiting import PATIENCE

pytestmark = pytest.mark.thorough  # test_real.py covers one question and its answer in every run

MARKDOWN = """A **bold** and an *oblique* word, `code`, and a line
that goes on.

## A heading

1. one
2. two with `x < 1`
   - deeper

```python
def f(x):
    return "**no bold**" if x < 1 else "`"
```

---
See [the guide](https://example.com/a_b?c=d) or http://example.org/x, not [this](javascript:alert(1)).
2 * 3 * 4 stays. 🙂 ends"""


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


HOSTILE = """<script>alert(1)</script><img src=x onerror=alert(2)>
<svg onload=alert(3)> [a](javascript:alert(4)) [b](data:text/html,x) [c](JaVaScRiPt:alert(5)) [d](//evil.example)
**<b onclick=alert(6)>** `</code><script>alert(7)</script>` [e](https://x.example"onclick="alert(8))
```<img/onerror=alert(9)>
</code></pre><script>alert(10)</script>
```
# <iframe srcdoc='<script>alert(11)</script>'>
| <img src=x onerror=alert(12)> | b |
|---|---|
| <script>alert(13)</script> | [x](javascript:alert(14)) |

```html
<script>alert(15)</script><img src="x" onerror='alert(16)'>
```
- <style>*{display:none}</style>"""


def test_hostile_text_is_only_text(chat: Chat):
    text = chat.ask(HOSTILE, Answer([HOSTILE]))
    for part in ("<script>alert(1)</script>", "onload=alert(3)", "[a](javascript:alert(4))", "<iframe srcdoc="):
        assert part in text
    assert chat.count("#log :is(script, img, svg, iframe, style, b)") == 0
    assert chat.count("#log [onclick], #log [onerror]") == 0
    links = chat.browser.evaluate("[...document.querySelectorAll('#log a')].map(a => [a.protocol, a.rel])")
    assert all(link == ["https:", "noopener noreferrer"] for link in links)
    assert chat.text(".question .text") == HOSTILE
    chat.load()
    assert chat.count("#log :is(script, img, svg, iframe, style, b)") == 0


@pytest.mark.parametrize(
    ("unit", "num_pieces"),
    [
        ("a", 256),
        ("a\n\n", 64),
        ("**a** ", 32),
        ("- a\n", 32),
        ("```\n", 32),
        ("[a](", 32),
        ("|a|b|\n|-|-|\n|a|b|\n\n", 32),
        ("```py\na = 1 # a\n```\n", 32),
        ("|a", 64),
    ],
)
def test_a_megabyte_leaves_the_page_usable(chat: Chat, unit: str, num_pieces: int):
    """Texts of one long line, or with a maximum of elements, streamed in pieces of 4 KB."""
    piece = unit * (4096 // len(unit))
    chat.ask("Go", Answer([piece] * num_pieces))
    text = chat.browser.evaluate("document.querySelector('.answer .body').textContent")
    assert text.count("a") == (piece * num_pieces).count("a")
    assert chat.count("#log *") < 6000
    assert chat.browser.evaluate("document.querySelector('#scroller').scrollWidth <= innerWidth")
    assert chat.ask("Next", Answer(["Still here."])) == "Still here."


def test_what_is_drawn_does_not_depend_on_how_the_text_came(chat: Chat):
    drawn = []
    for size in (len(MARKDOWN), 1, 2, 3, 5, 8, 13):
        pieces = [MARKDOWN[i : i + size] for i in range(0, len(MARKDOWN), size)]
        chat.ask("Go", Answer(pieces, pause=0.017 if size == 8 else 0))
        drawn.append(_tree(chat))
    assert all(tree == drawn[0] for tree in drawn)
    assert chat.browser.evaluate(
        "['strong','em','p code','h3','ol li','ul li','pre code','hr','a'].map("
        "s => document.querySelector('.answer:last-child .body ' + s).innerText)"
    ) == [
        "bold",
        "oblique",
        "code",
        "A heading",
        "one",
        "deeper",
        'def f(x):\n    return "**no bold**" if x < 1 else "`"\n',
        "",
        "the guide",
    ]
    assert chat.count(".answer:last-child a") == 2
    assert "2 * 3 * 4 stays. 🙂 ends" in chat.text(".answer:last-child .body")


TABLES = """Before the table | no head
Name | `a\\|b` | Sum
:--|:-:|--:
**one** | `x` | 1
| two \\| three | <b>2</b> |
four | 5 | 6 | 7
no row any more

| single |
|--------|
| [a](https://example.com/) |

| a | b |
|---|
still | text

```text
| a |
|---|
```
- item | x
|---|---|
end"""


def test_tables_are_drawn_however_the_text_comes(chat: Chat):
    drawn = []
    for size in (len(TABLES), 1, 2, 3, 7):
        chat.ask("Go", Answer([TABLES[i : i + size] for i in range(0, len(TABLES), size)]))
        drawn.append(_tree(chat))
    assert all(tree == drawn[0] for tree in drawn)
    tables = chat.browser.evaluate(
        "[...document.querySelectorAll('.answer:last-child .body table')].map(table => [...table.rows].map(row =>"
        "[...row.cells].map(cell => [cell.localName, cell.innerText, cell.className].join(' ').trim())))"
    )
    assert tables == [
        [
            ["th Name", "th a|b center", "th Sum right"],
            ["td one", "td x center", "td 1 right"],
            ["td two | three", "td <b>2</b> center", "td  right"],
            ["td four", "td 5 center", "td 6 | 7 right"],
        ],
        [["th single"], ["td a"]],
    ]
    text = chat.text(".answer:last-child .body")
    for line in ("Before the table | no head", "no row any more", "| a | b |", "still | text", "item | x", "end"):
        assert line in text.split("\n")
    assert chat.count(".answer:last-child :is(td code, th code, td strong, td a)") == 4
    assert chat.count(".answer:last-child b") == 0


CODE = {
    "python": '''@wraps
def f(x: int = 0x1F) -> str:  # a "comment"
    """Text
    of def two lines"""
    return f"a # {x}" if x < 1.5e3 else 'it\\\'s' + name2''',
    "js": """const a = `one ${x}
return two`; // it's
/* for
   while */ let r = 7 / 2;""",
    "sh": "echo $# 'a b' # done\nfor x in 1 2; do",
    "json": '{"a": [true, -1.5], "b": "</code>"}',
    "html": '<!-- <p>\n--> <a href="x">if 5</a>',
    "rust": "fn f<'a>(x: &'a str) -> u8 { 0 }",
    "unknown": "if 5 'x'",
}
COLOURED = {
    "python": ["def", "0x1F", '# a "comment"', '"""Text', '    of def two lines"""', "return", '"a # {x}"', "if",
    "1.5e3",
               "else", "'it\\'s'"],
    "js": ["const", "`one ${x}", "return two`", "// it's", "/* for", "   while */", "let", "7", "2"],
    "sh": ["echo", "'a b'", "# done", "for", "in", "1", "2", "do"],
    "json": ['"a"', "true", "1.5", '"b"', '"</code>"'],
    "html": ["<!-- <p>", "-->", "<a", '"x"', ">", "5", "</a", ">"],
    "rust": ["fn", "0"],
    "unknown": [],
}  # fmt: skip


def test_code_is_coloured_however_it_comes_and_stays_the_same_text(chat: Chat):
    text = "\n".join(f"```{language}\n{code}\n```" for language, code in CODE.items())
    drawn = []
    for size in (len(text), 1, 5):
        chat.ask("Go", Answer([text[i : i + size] for i in range(0, len(text), size)]))
        drawn.append(_tree(chat))
    assert all(tree == drawn[0] for tree in drawn)
    blocks = chat.browser.evaluate(
        "[...document.querySelectorAll('.answer:last-child pre')].map(pre => [pre.querySelector('div').firstChild.data,"
        "pre.querySelector('code').textContent, [...pre.querySelectorAll('i')].map(i => i.textContent)])"
    )
    assert blocks == [[language, code + "\n", COLOURED[language]] for language, code in CODE.items()]
    kinds = "[...new Set([...document.querySelectorAll('.answer:last-child pre i')].map(i => i.className))].sort()"
    assert chat.browser.evaluate(kinds) == ["comment", "number", "string", "word"]
    shades = chat.browser.evaluate(
        "['comment', 'number', 'string', 'word'].map(kind =>"
        "getComputedStyle(document.querySelector('.answer:last-child i.' + kind)).color)"
    )
    assert len(set(shades)) == 4


def _tree(chat: Chat) -> Any:
    """The last answer's elements and texts."""
    return chat.browser.evaluate(
        "(function tree(node) { return node.nodeType == 3 ? node.data :"
        "[node.localName, node.className, node.value, ...[...node.childNodes].map(tree)] })"
        "(document.querySelector('.answer:last-child .body'))"
    )


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


def test_a_phone_needs_no_sideways_scrolling(chat: Chat):
    chat.browser.resize(320, 640, is_phone=True)
    chat.ask("q" * 200, Answer(["w" * 300 + "\n```\n" + "c" * 300 + "\n```\n" + MARKDOWN]))
    assert chat.browser.evaluate("document.documentElement.scrollWidth") == 320
    assert chat.browser.evaluate("document.querySelector('#scroller').scrollWidth") == 320
    small = chat.browser.evaluate(
        "[...document.querySelectorAll('main button')].filter(b => b.checkVisibility() && b.offsetHeight < 44)"
        ".map(b => b.outerHTML)"
    )
    assert small == [], "a finger needs 44 pixels"
    chat.click("#menu")
    chat.browser.wait("document.querySelector('aside').getBoundingClientRect().left == 0")
    assert chat.browser.evaluate("document.querySelector('main').inert")
    chat.browser.press("Escape")
    chat.browser.wait("!document.querySelector('aside').checkVisibility({visibilityProperty: true})")
    assert chat.browser.evaluate("document.activeElement.id") == "menu"


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


def test_the_page_can_be_seen_in_both_themes(chat: Chat, tmp_path):
    image = pytest.importorskip("matplotlib.image")
    chat.ask("How does it look?", Answer([MARKDOWN]))
    brightness = {}
    for theme in ("light", "dark"):
        chat.browser.prefer(prefers_color_scheme=theme)
        path = tmp_path / f"{theme}.png"
        path.write_bytes(chat.browser.screenshot())
        pixels = image.imread(io.BytesIO(path.read_bytes()))[:, :, :3]
        assert pixels.shape == (800, 1100, 3)
        assert len({tuple(color) for row in pixels[::4] for color in row[::2].tolist()}) > 30, "text has many shades"
        brightness[theme] = float(pixels.mean())
    assert brightness["light"] > 0.85 and brightness["dark"] < 0.2


def test_motion_can_be_refused(chat: Chat):
    chat.browser.prefer(prefers_reduced_motion="reduce")
    chat.begin("Hi", Answer(["x"], pause=0.3))
    chat.browser.wait("document.querySelector('.waiting')?.checkVisibility()")
    assert chat.browser.evaluate("document.getAnimations().length") == 0
    chat.answer()
