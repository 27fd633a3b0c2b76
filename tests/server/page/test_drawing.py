"""How the chat page draws answers in a browser: text as elements, the same for any pieces, and nothing that runs."""

from __future__ import annotations

import io
from typing import Any

import pytest

from tests.server.page.chat import Chat
from tests.server.page.scripted_server import Answer

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


def _tree(chat: Chat) -> Any:
    """The last answer's elements and texts."""
    return chat.browser.evaluate(
        "(function tree(node) { return node.nodeType == 3 ? node.data :"
        "[node.localName, node.className, node.value, ...[...node.childNodes].map(tree)] })"
        "(document.querySelector('.answer:last-child .body'))"
    )
