"""Images in the chat page: by drop, paste and the button, in the history, and refused."""

from __future__ import annotations

import base64
import io
import json

import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("starlette")

from PIL import Image, ImageOps

from tests.llm.fake_media import png
from tests.server.page.browser import chromium
from tests.server.page.chat import Chat
from tests.server.page.scripted_server import Answer

FILES = """(() => {
  const files = new DataTransfer();
  for (const [name, type, data] of FILES) {
    files.items.add(new File([Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0))], name, { type }));
  }
  return files;
})()"""
DROP = "dispatchEvent(new DragEvent('{}', {{ dataTransfer: {}, bubbles: true, cancelable: true }}))"
PASTE = "const files = {}; {}; document.querySelector('#question').dispatchEvent(new ClipboardEvent('paste', \
    {{ clipboardData: files, bubbles: true, cancelable: true }}))"


def files_of(*files: tuple[str, str, bytes]) -> str:
    """JavaScript of a DataTransfer with files: their names, types and bytes."""
    given = [(name, media_type, base64.b64encode(data).decode()) for name, media_type, data in files]
    return FILES.replace("FILES", json.dumps(given))


def drop(browser, *files: tuple[str, str, bytes]) -> None:
    browser.evaluate("document.body." + DROP.format("drop", files_of(*files)))


def paste(browser, *files: tuple[str, str, bytes], text: str = "") -> None:
    add = f"files.setData('text/plain', {json.dumps(text)})" if text else ""
    browser.evaluate("(() => { " + PASTE.format(files_of(*files), add) + " })()")


def choose(browser, *paths) -> None:
    found = browser.call("Runtime.evaluate", expression="document.querySelector('#files')")["result"]["objectId"]
    browser.call("DOM.setFileInputFiles", objectId=found, files=[str(path) for path in paths])


def wait_for_images(browser, number: int) -> None:
    browser.wait(f"document.querySelectorAll('#attached img').length == {number}")


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def shown(data: bytes) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": uri(data)}}


def num_red(screenshot: bytes) -> int:
    """Pixels of a screenshot with the color of the disc among the drawn pictures."""
    return Image.open(io.BytesIO(screenshot)).convert("RGB").tobytes().count(bytes((220, 20, 30)))


def upright_size(data: bytes) -> tuple[int, int]:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).size


@pytest.fixture
def seeing(chat: Chat) -> Chat:
    """The page of a model that takes images."""
    chat.server.modalities["vision"] = True
    chat.load()
    chat.browser.wait("!document.querySelector('#attach').hidden")
    return chat


def test_a_real_model_sees_drawn_pictures(tmp_path):
    """A random Qwen3-Omni gets them by drop, paste and the button. It answers as it does from Python, and they can be
    seen."""
    pytest.importorskip("transformers")
    from pace.llm import LLMModel
    from tests.llm.processors.chatting import ANSWER, QUESTION, question, save_omni_chatting
    from tests.media.drawn import glide, media_type, pictures, write_all
    from tests.server.serving import Serving

    save_omni_chatting(tmp_path)
    write_all(tmp_path, glide())
    names = list(pictures())
    files = [(name, media_type(name), data) for name, data in pictures().items()]
    with LLMModel(tmp_path, dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
        answer = model.chat(question(), **ANSWER).text
        num_encoded = model.generator.engine.media.num_encoded
        with chromium(tmp_path / "profile") as browser, Serving(model.generator) as serving:
            browser.forget()
            browser.open(serving.url + "/")
            browser.wait("!document.querySelector('#attach').hidden")
            browser.evaluate("document.querySelector('[name=temperature]').value = '0'")
            browser.evaluate("document.querySelector('[name=max_tokens]').value = '12'")
            assert num_red(browser.screenshot()) == 0
            drop(browser, *files[:3])
            wait_for_images(browser, 3)
            assert num_red(browser.screenshot()) > 500
            paste(browser, files[3])
            wait_for_images(browser, 4)
            choose(browser, *(tmp_path / name for name in names[4:]))
            wait_for_images(browser, len(names))
            browser.type(QUESTION)
            browser.press("Enter")
            browser.wait("document.querySelector('.answer footer:not([hidden])') != null")
            shown = "[...document.querySelectorAll('.question img')]"
            browser.wait(f"{shown}.every((image) => image.complete)")
            assert browser.evaluate(f"{shown}.map((image) => image.alt)") == names
            sizes = browser.evaluate(f"{shown}.map((image) => [image.naturalWidth, image.naturalHeight])")
            assert sizes == [list(upright_size(data)) for data in pictures().values()], "the browser can read them"
            browser.evaluate("document.querySelector('.question img').scrollIntoView({block: 'center'})")
            (tmp_path / "page.png").write_bytes(browser.screenshot())
            assert num_red(browser.screenshot()) > 500, "the pictures stand in the conversation"
            text = browser.evaluate("document.querySelector('.answer .body').innerText")
            assert answer and text.split() == answer.split()
            assert (browser.errors, browser.violations) == ([], [])
        assert model.generator.engine.media.num_encoded == num_encoded, "the rows are those of Python's pictures"


@pytest.mark.thorough
def test_by_drop_paste_and_button(seeing: Chat, tmp_path):
    """They are sent in order before the text, and once: later requests have them in their place."""
    (tmp_path / "c.png").write_bytes(png(8, 8, 3))
    drop(seeing.browser, ("a.png", "image/png", png(8, 8, 1)), ("b.png", "image/png", png(8, 8, 2)))
    wait_for_images(seeing.browser, 2)
    paste(seeing.browser, ("p.png", "image/png", png(8, 8, 4)))
    wait_for_images(seeing.browser, 3)
    paste(seeing.browser, ("cells.png", "image/png", png()), text="a text that an office program copied as both")
    choose(seeing.browser, tmp_path / "c.png")
    wait_for_images(seeing.browser, 4)
    assert seeing.ask("What?") == "Hello."
    images = [shown(png(8, 8, level)) for level in (1, 2, 4, 3)]
    first = [*images, {"type": "text", "text": "What?"}]
    assert seeing.said() == [("user", first)] and seeing.count("#attached li") == 0
    assert seeing.count(".question img") == 4 and seeing.count(".question .images button") == 0
    seeing.ask("And?")
    assert seeing.said() == [("user", first), ("assistant", "Hello."), ("user", "And?")]


@pytest.mark.thorough
def test_they_can_be_removed_by_the_keyboard(seeing: Chat):
    drop(seeing.browser, ("a.png", "image/png", png(8, 8, 1)), ("b.png", "image/png", png(8, 8, 2)))
    wait_for_images(seeing.browser, 2)
    labels = "[...document.querySelectorAll('#attached button')].map(b => b.ariaLabel)"
    assert seeing.browser.evaluate(labels) == ["Remove a.png", "Remove b.png"]
    assert seeing.browser.evaluate("document.querySelector('#attached img').alt") == "a.png"
    assert seeing.browser.evaluate("document.activeElement.id") == "question"
    for _ in range(3):  # the file button, and the two images
        seeing.browser.press("Tab", "Shift")
    assert seeing.browser.evaluate("document.activeElement.ariaLabel") == "Remove a.png"
    seeing.browser.press(" ")
    wait_for_images(seeing.browser, 1)
    assert seeing.browser.evaluate("document.activeElement.id") == "question"
    seeing.browser.press("Enter")
    seeing.answer()
    assert seeing.said() == [("user", [shown(png(8, 8, 2))])], "a question may be an image alone"
    assert seeing.text("#history .open span") == "b.png"


@pytest.mark.thorough
def test_files_that_are_refused(seeing: Chat):
    for name, media_type, data, message in (
        ("a.heic", "image/heic", b"x", "a.heic is not a PNG, JPEG, WebP or GIF image."),
        ("a.txt", "text/plain", b"x", "a.txt is not a PNG"),
    ):
        drop(seeing.browser, (name, media_type, data))
        seeing.browser.wait(f"document.querySelector('#notice p').textContent.startsWith({message!r})")
    large = (
        "(() => { const files = new DataTransfer(); files.items.add(new File([new Uint8Array(22 << 20)], 'large.png', \
        { type: 'image/png' })); return files; })()"
    )
    seeing.browser.evaluate("document.body." + DROP.format("drop", large))
    message = "large.png has 22.0 MB, and an image may have 20 MB."
    seeing.browser.wait(f"document.querySelector('#notice p').textContent == {message!r}")
    assert seeing.count("#attached li") == 0


@pytest.mark.thorough
def test_a_model_for_text(chat: Chat):
    for _ in range(2):  # afterwards the page has its own answer, too
        chat.browser.evaluate("fetch('props').then((answer) => answer.json())")
    assert chat.browser.evaluate("document.querySelector('#attach').hidden")
    drop(chat.browser, ("a.png", "image/png", png()))
    chat.browser.wait("document.querySelector('#notice p').textContent == 'scripted takes no images.'")
    assert chat.count("#attached li") == 0 and chat.browser.evaluate("document.title") == "pace"
    over = DROP.format("dragover", files_of(("a.png", "image/png", png())))
    assert not chat.browser.evaluate(f"document.body.{over}"), "else the browser would open the file"


@pytest.mark.thorough
def test_images_are_kept_with_the_conversation(seeing: Chat):
    drop(seeing.browser, ("a.png", "image/png", png(8, 8, 1)))
    wait_for_images(seeing.browser, 1)
    seeing.ask("What?")
    seeing.load()
    assert seeing.browser.evaluate("document.querySelector('.question img').alt") == "a.png"
    seeing.ask("And?")
    assert seeing.said()[0] == ("user", [shown(png(8, 8, 1)), {"type": "text", "text": "What?"}])
    seeing.click(".question .edit")
    seeing.fill(".question textarea", "Where?")
    seeing.server.answers.append(Answer(["There."]))
    seeing.browser.press("Enter")
    seeing.browser.wait("document.querySelector('.answer .body')?.innerText == 'There.'")
    assert seeing.said() == [("user", [shown(png(8, 8, 1)), {"type": "text", "text": "Where?"}])]


@pytest.mark.thorough
def test_images_without_room_are_told(seeing: Chat):
    """A browser's storage has about 5 MB. The text is kept, and the page says what is lost, then and later."""
    large = png() + bytes(6 << 20)
    drop(seeing.browser, ("large.png", "image/png", large))
    wait_for_images(seeing.browser, 1)
    seeing.ask("What?")
    assert seeing.said()[0][1][0] == shown(large)
    assert "no room for the images" in seeing.text("#notice p")
    seeing.ask("And?")
    assert seeing.said()[0][1][0] == shown(large), "it is still there until the page is left"
    seeing.load()
    assert seeing.text(".question .images") == "large.png was not kept"
    seeing.ask("Now?")
    assert seeing.said()[0] == ("user", "What?")
