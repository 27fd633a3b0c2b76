"""Images in the chat page: by drop, paste and the button, in the history, and refused."""

from __future__ import annotations

import base64
import io
import json

import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("starlette")

from PIL import Image

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


def red() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (120, 90), (220, 20, 30)).save(file, "PNG")
    return file.getvalue()


def num_red(screenshot: bytes) -> int:
    """Pixels of a screenshot with the color of `red`."""
    return Image.open(io.BytesIO(screenshot)).convert("RGB").tobytes().count(bytes((220, 20, 30)))


@pytest.fixture
def seeing(chat: Chat) -> Chat:
    """The page of a model that takes images."""
    chat.server.modalities["vision"] = True
    chat.load()
    chat.browser.wait("!document.querySelector('#attach').hidden")
    return chat


def test_a_real_model_sees_an_image(tmp_path):
    """A random Qwen3-VL answers in the page as it does from Python, and the image can be seen."""
    pytest.importorskip("transformers")
    from pace.llm import LLMModel
    from tests.llm.processors.chatting import save_chatting
    from tests.server.serving import Serving

    save_chatting(tmp_path / "model")
    (tmp_path / "red.png").write_bytes(red())
    content = [{"type": "image", "image": red()}, {"type": "text", "text": "w9"}]
    options = {"dtype": "float32", "kv_cache_bytes": "16MiB", "progress": False, "weights_cache": False}
    with LLMModel(str(tmp_path / "model"), **options) as model:
        answer = model.chat([{"role": "user", "content": content}], temperature=0, max_new_tokens=8).text
        with chromium(tmp_path / "profile") as browser, Serving(model.generator) as serving:
            browser.open(serving.url + "/")
            browser.wait("!document.querySelector('#attach').hidden")
            browser.evaluate("document.querySelector('[name=temperature]').value = '0'")
            browser.evaluate("document.querySelector('[name=max_tokens]').value = '8'")
            assert num_red(browser.screenshot()) == 0
            choose(browser, tmp_path / "red.png")
            wait_for_images(browser, 1)
            assert num_red(browser.screenshot()) > 5000
            browser.type("w9")
            browser.press("Enter")
            browser.wait("document.querySelector('.answer footer:not([hidden])') != null")
            browser.wait("document.querySelector('.question img').complete")
            browser.evaluate("document.querySelector('.question img').scrollIntoView({block: 'center'})")
            assert num_red(browser.screenshot()) > 5000, "the image stands in the conversation"
            text = browser.evaluate("document.querySelector('.answer .body').innerText")
            assert answer and text.split() == answer.split()
            assert (browser.errors, browser.violations) == ([], [])


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
