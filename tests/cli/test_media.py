"""Images and sound on the command line: `/image`, `/audio`, `--image` and `--audio`."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("PIL.Image")
pytest.importorskip("transformers")

from pace.cli.chat import Conversation
from pace.cli.chat.attachments import attach, from_saved, to_saved
from pace.cli.chat.commands import Commands
from pace.llm import LLMModel, SamplingConfig
from tests.cli.processes import TerminalProcess
from tests.llm.fake_media import MediaGenerator, png, wav
from tests.llm.processors.chatting import (
    ANSWER,
    PLACEHOLDER,
    QUESTION,
    picture,
    question,
    save_chatting,
    save_omni_chatting,
)
from tests.llm.processors.transcribing import save_transcribing
from tests.media.drawn import clips, write_all

GREEDY = ["--dtype", "float32", "--temperature", "0", "--ignore-eos", "--max-new-tokens", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that takes images, and images: a.png of 15 tokens, "a cat.png" of 4, and others that are wrong."""
    path = tmp_path_factory.mktemp("seeing")
    save_chatting(path / "model")
    picture(40, 24, 4).save(path / "a.png")
    picture(16, 16, 5).save(path / "a cat.png")
    (path / "cut.png").write_bytes((path / "a.png").read_bytes()[:2000])
    (path / "text.png").write_text("no image")
    (path / "large.png").write_bytes(png() + bytes(20 << 20))
    return path


@pytest.fixture(scope="module")
def model(folder):
    with LLMModel(str(folder / "model"), dtype="float32", progress=False) as model:
        yield model


@pytest.fixture(scope="module")
def answers(folder, model):
    """`answers(*questions)`: what the model answers, from Python. A question is a text after paths of images."""

    def ask(*questions: tuple[str, ...]) -> list[str]:
        messages, found = [], []
        for *images, text in questions:
            parts = [{"type": "image", "image": folder / image} for image in images]
            messages.append({"role": "user", "content": [*parts, {"type": "text", "text": text}]})
            output = model.chat(messages, temperature=0, ignore_eos=True, max_new_tokens=8)
            found.append(output.text)
            messages.append({"role": "assistant", "content": output.text})
        return found

    return ask


def test_questions_with_images(command, folder, answers):
    """The images of a question, of the options and of the command; the answers are those of Python."""
    lines = f"w1\n/image {folder}/a cat.png\n/image {folder}/a.png\nw2\nw3\n/regen\n"
    model = str(folder / "model")
    code, out, err = command("chat", model, *GREEDY, "--image", str(folder / "a.png"), stdin=lines)
    first, second, third = answers(("a.png", "w1"), ("a cat.png", "a.png", "w2"), ("w3",))
    assert (code, out) == (0, f"{first}\n{second}\n{third}\n{third}\n")
    notices = [line for line in err.splitlines() if "cut off" not in line]
    assert notices[:3] == [
        "(a.png, 15 tokens, is sent with the next question)",
        "(a cat.png, 4 tokens, is sent with the next question)",
        "(a.png, 15 tokens, is sent with the next question)",
    ]


@pytest.mark.thorough
def test_a_conversation_about_an_image_goes_on_in_the_next_run(command, folder, answers, tmp_path):
    """What the cache held of the image is in the file."""
    words = "chat", str(folder / "model"), *GREEDY, "--session", str(tmp_path / "kept")
    first, second = answers(("a.png", "w1"), ("w2",))
    assert command(*words, "--image", str(folder / "a.png"), stdin="w1\n")[:2] == (0, f"{first}\n")
    code, out, err = command(*words, stdin="w2\n/stats\n")
    assert (code, out) == (0, f"{second}\n")
    assert "(16 of them reused)" in err or "(32 of them reused)" in err


@clips
def test_drawn_pictures_and_a_clip(command, tmp_path, clip):
    """Both commands give the answer of Python about all of them."""
    save_omni_chatting(tmp_path)
    with LLMModel(tmp_path, dtype="float32", progress=False) as model:
        answer = model.chat(question(clip()), **ANSWER).text
    images, sound = write_all(tmp_path, clip())
    model = [str(tmp_path), "--dtype", "float32", "--temperature", "0", "--max-new-tokens", "12"]
    attached = "".join(f"/image {image}\n" for image in images) + f"/audio {sound}\n"
    code, out, err = command("chat", *model, stdin=f"{attached}{QUESTION}\n")
    assert (code, out) == (0, f"{answer}\n") and "pace: error" not in err
    options = [f"--image={image}" for image in images]
    code, out, err = command("generate", "--chat", *model[:1], QUESTION, *model[1:], *options, f"--audio={sound}")
    assert (code, out) == (0, f"{answer}\n"), err


@clips
def test_the_words_of_a_clip(command, tmp_path, clip):
    save_transcribing(tmp_path)
    (tmp_path / "clip.wav").write_bytes(clip())
    with LLMModel(tmp_path, dtype="float32", progress=False) as model:
        words = model.transcribe(tmp_path / "clip.wav").text
    code, out, err = command("transcribe", str(tmp_path), str(tmp_path / "clip.wav"), "--dtype", "float32")
    assert words and (code, out) == (0, f"{words}\n"), err


def test_at_a_terminal(folder, tmp_path, answers):
    """A path as terminals paste it; what was attached stays with the conversation if the file goes."""
    (tmp_path / "a cat.png").write_bytes((folder / "a cat.png").read_bytes())
    first, second = answers(("a cat.png", "w4"), ("w5",))
    with TerminalProcess("chat", str(folder / "model"), *GREEDY, environment={"XDG_STATE_HOME": str(tmp_path)}) as chat:
        chat.read_until("/help for the commands", "> ")
        chat.type("/help\r")
        chat.read_until("/image FILE", "/audio FILE", "> ")
        chat.type("/image nothing.png\r")
        chat.read_until("pace: error: nothing.png does not exist", "> ")
        for typed in (f"/image '{tmp_path}/a cat.png'\r", f"/image {tmp_path}/a\\ cat.png\r"):
            chat.type(typed)
            chat.read_until("(a cat.png, 4 tokens, is sent with the next question)", "> ")
            chat.type("/image\r")
            chat.read_until("(no images with the next question)", "> ")
        chat.type(f"/image {tmp_path}/a cat.png\r")
        chat.read_until("is sent with the next question)", "> ")
        (tmp_path / "a cat.png").unlink()
        chat.type("w4\r")
        chat.read_until(first, "> ")
        chat.type("w5\r")
        chat.read_until(second, "> ")
        chat.type("/exit\r")
        assert chat.wait() == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [("/image {}/none.png", "none.png does not exist"), ("/image {}", "is a directory"),
     ("/image {}/text.png", "text.png has no images in a known format; these are png, jpeg, gif, webp"),
     ("/image {}/cut.png", "cut.png: the PNG image ends before its last block; it is incomplete"),
     ("/image {}/large.png", "large.png is larger than 20,971,520 bytes"),
     ("/audio {}/a.png", "this model takes no sound")],
)  # fmt: skip
def test_files_that_are_refused(command, folder, answers, line, message):
    """The error names the file, and the conversation goes on without it."""
    code, out, err = command("chat", str(folder / "model"), *GREEDY, stdin=f"{line.format(folder)}\nw9\n")
    assert (code, out) == (0, answers(("w9",))[0] + "\n")
    assert err.startswith("pace: error: ") and message in err


def test_a_model_for_text(command, folder):
    code, out, err = command("chat", stdin=f"/image {folder}/a.png\nWhat is the capital of Spain?\n")
    assert (code, out) == (0, "The capital of Spain is Madrid.\n")
    assert err == "pace: error: this model takes no images\n"
    code, out, err = command("chat", "--image", str(folder / "a.png"), stdin="What?\n")
    assert (code, out, err) == (1, "", "pace: error: this model takes no images\n")
    code, out, err = command("chat", "--image", "none.png", stdin="What?\n")
    assert (code, out) == (2, "") and "argument --image: there is no file none.png" in err


def test_save_and_load(command, folder, tmp_path, answers):
    """The file has the images, in the form of OpenAI's API."""
    path, model = tmp_path / "talk.json", str(folder / "model")
    first, second = answers(("a.png", "w6"), ("w7",))
    command("chat", model, *GREEDY, stdin=f"/image {folder}/a.png\nw6\n/save {path}\n")
    content = json.loads(path.read_text())[0]["content"]
    assert content[0]["image_url"]["url"].startswith("data:image/png;base64,") and content[1]["text"] == "w6"
    code, out, err = command("chat", model, *GREEDY, stdin=f"/load {path}\nw7\n/save {path}\n")
    assert (code, out) == (0, second + "\n") and "2 messages from" in err
    assert json.loads(path.read_text())[0]["content"] == content
    path.write_text(path.read_text().replace("base64,iVBOR", "base64,AAAAA"))
    code, out, err = command("chat", model, *GREEDY, stdin=f"/load {path}\n")
    assert (code, out) == (0, "") and "messages[0].content[0] is not image/png, as its first bytes show" in err


def test_sound(tmp_path):
    """A clip is attached, saved and read again like an image. Only its own command takes it."""
    generator = MediaGenerator()
    (tmp_path / "a.wav").write_bytes(wav(0.5))
    part, size = attach("audio", str(tmp_path / "a.wav"), generator.encoder, generator.tokenizer)
    assert (part.kind, part.where, size) == ("audio", "a.wav", "5 tokens")
    with pytest.raises(ValueError, match="has no images in a known format"):
        attach("image", str(tmp_path / "a.wav"), generator.encoder, generator.tokenizer)
    saved = json.loads(json.dumps(to_saved([{"role": "user", "content": [part, {"type": "text", "text": "x"}]}])))
    (message,) = from_saved(saved)
    assert message["content"][0].source == part.source and message["content"][0].kind == "audio"
    generator.driver.close()


def test_images_of_a_question_that_fails_stay_attached(folder, model):
    """The context is counted with them."""
    notices = []
    conversation = Conversation(model, SamplingConfig(max_new_tokens=8), None, None, notices.append)
    commands = Commands(conversation, notices.append)
    for _ in range(40):
        commands.attach("image", str(folder / "a.png"))
    with pytest.raises(ValueError, match=r"has 6\d\d tokens, but the context holds 600"):
        list(conversation.answer("w1"))
    assert len(conversation.attached) == 40 and conversation.messages == []
    list(commands.obey("/image"))
    assert conversation.attached == [] and notices[-1] == "(no images with the next question)"
    commands.attach("image", str(folder / "a.png"))
    list(commands.obey("/reset"))
    assert conversation.attached == []


@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_generate(command, folder, model, chat):
    images = [str(folder / "a.png"), str(folder / "a cat.png")]
    text = "w1 w2" if chat else f"{PLACEHOLDER} w1 {PLACEHOLDER} w2"
    options = [option for image in images for option in ("--image", image)]
    code, out, err = command("generate", str(folder / "model"), text, *GREEDY, *chat, *options, "--json")
    if chat:
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        message = [{"role": "user", "content": parts}]
        expected = model.chat(message, temperature=0, ignore_eos=True, max_new_tokens=8, logprobs=0).logprobs
        expected = [entry.token for entry in expected]
    else:
        given = {"prompt": text, "images": images}
        expected = model.generate(given, temperature=0, ignore_eos=True, max_new_tokens=8).generated_token_ids[0]
    assert code == 0 and json.loads(out)["generated_token_ids"] == [expected]
    code, out, err = command("generate", str(folder / "model"), "w1", *GREEDY, *options)
    assert (code, out) == (1, "") and "0 placeholders <|image_pad|> for 2 images" in err
    code, out, err = command("generate", "The capital", *GREEDY, *options)
    assert (code, out) == (1, "") and "this model takes no images" in err
    code, out, err = command("generate", "w1", "--suffix", "w2", *options)
    assert (code, out) == (2, "") and "--suffix does not work with --image" in err
