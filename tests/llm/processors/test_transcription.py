"""Transcriptions of Qwen3-ASR: the prompt, the answer, `LLMModel.transcribe` and `pace transcribe`."""

from __future__ import annotations

import io
import json
import random

import pytest

pytest.importorskip("transformers")

import torch

from pace.llm import LLMModel
from pace.llm.processors.transcription import (
    LANGUAGES,
    MARKER,
    TranscriptReader,
    language_name,
    transcription_prompt,
)
from tests.llm.processors.transcribing import SOUND, save_transcribing

TEMPLATE = (
    "<|im_start|>system\n{% for m in messages if m.role == 'system' %}{{ m.content[0].text }}{% endfor %}<|im_end|>\n"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{% for p in m.content %}"
    "{% if p.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% if m.role == 'user' %}<|im_end|>\n{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("transcribing")
    return path, *save_transcribing(path)


@pytest.fixture(scope="module")
def model(saved):
    with LLMModel(saved[0], dtype="float32", progress=False, kv_cache_bytes="16MiB") as model:
        yield model


def test_languages():
    from transformers.models.qwen3_asr.processing_qwen3_asr import LANGUAGE_CODE_TO_NAME

    assert LANGUAGES == LANGUAGE_CODE_TO_NAME
    for code, name in LANGUAGES.items():
        assert {language_name(word) for word in (code, code.upper(), name, f" {name.lower()} ")} == {name}
    assert language_name(None) is None and language_name("") is None
    with pytest.raises(ValueError, match=r"language must be one of ar \(Arabic\).*; got 'Klingon'"):
        language_name("Klingon")


def test_the_prompt_is_that_of_transformers(model):
    """The processor's own messages, in a template of the published form."""
    from transformers import Qwen3ASRFeatureExtractor, Qwen3ASRProcessor

    tokenizer = model.tokenizer
    tokenizer.audio_token, tokenizer.audio_bos_token, tokenizer.audio_eos_token = (
        "<|audio_pad|>", "<|audio_start|>", "<|audio_end|>"
    )  # fmt: skip
    processor = Qwen3ASRProcessor(Qwen3ASRFeatureExtractor(), tokenizer, chat_template=TEMPLATE)
    for language, prompt in ((None, None), ("en", None), ("Chinese", "Ada {x} Lovelace"), (None, "a\nb")):
        (theirs,) = processor.apply_transcription_request("a.wav", language, prompt, tokenize=False)
        assert transcription_prompt(language_name(language), prompt or "") == theirs


def test_answers_in_any_pieces():
    """The parts of an answer, however it is cut, are the transcript that transformers reads in the whole."""
    from transformers.models.qwen3_asr.processing_qwen3_asr import _parse_single_output

    random.seed(3)
    for _ in range(500):
        head = random.choice(["language English", "language None", "", " language Chinese "])
        body = "".join(random.choices([" ", "a", "b. ", "\n", "<", "language ", "<asr_text", MARKER], k=8))
        text = random.choice([head + MARKER, ""]) + body
        expected = _parse_single_output(text)
        reader, found, rest = TranscriptReader(None), "", text
        while rest:
            size = random.randint(1, 6)
            found += reader.read(rest[:size])
            rest = rest[size:]
            assert found == "" or MARKER in text
        found += reader.read("", is_last=True)
        assert found == expected["transcription"], text
        if text.startswith(head + MARKER):
            assert reader.language == expected["language"], text
    reader = TranscriptReader("French")
    assert [reader.read(part) for part in (" ", "un ", " deux", "\n")] == ["", "un", "  deux", ""]


def test_the_words_are_those_of_transformers(model, saved, tmp_path):
    _, oracle, said = saved
    text = transcription_prompt()
    text = text.replace("<|audio_pad|>", "<|audio_pad|>" * 17)
    ids = torch.tensor([model.tokenizer(text)["input_ids"]])
    given = {name: torch.from_numpy(array) for name, array in model.processor(audio=[SOUND]).items()}
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        found = oracle.generate(**given, max_new_tokens=60, do_sample=False, eos_token_id=said[-1])
    assert found[0, ids.shape[1] :].tolist() == said
    words = model.tokenizer.decode(said[3:-1])
    (tmp_path / "a.wav").write_bytes(SOUND)
    for source in (SOUND, tmp_path / "a.wav", str(tmp_path / "a.wav")):
        transcript = model.transcribe(source)
        assert (transcript.text, transcript.language, transcript.finish_reason) == (words, "English", "stop")
    assert transcript.metrics.num_prompt_tokens == ids.shape[1]
    forced = model.transcribe(SOUND, language="de", max_new_tokens=5)
    prompt = {"prompt": transcription_prompt("German"), "audio": [SOUND]}
    expected = model.generate(prompt, do_sample=False, max_new_tokens=5).texts[0]
    assert (forced.text, forced.language) == (TranscriptReader("German").read(expected, True), "German")
    assert forced.finish_reason == "length" and forced.text != words[: len(forced.text)]
    hinted = model.transcribe(SOUND, prompt="w3 w4")
    assert hinted.metrics.num_prompt_tokens == transcript.metrics.num_prompt_tokens + 2


def test_what_is_refused(model):
    with pytest.raises(ValueError, match="language must be one of"):
        model.transcribe(SOUND, language="xx")
    with pytest.raises(ValueError, match="not a WAV, FLAC, MP3 or Ogg file"):
        model.transcribe(b"no sound")
    with pytest.raises(ValueError, match="2 placeholders"):
        model.transcribe(SOUND, prompt="<|audio_pad|>")
    with pytest.raises(ValueError, match="transcribe"):
        model.transcribe(SOUND, num_return_sequences=2, temperature=1.0)


def test_the_command(saved, tmp_path, capsys, model, monkeypatch):
    from pace.cli import main

    (tmp_path / "a.wav").write_bytes(SOUND)
    file, options = str(tmp_path / "a.wav"), ["-m", str(saved[0]), "--dtype", "float32"]
    expected = model.transcribe(SOUND)
    assert main(["transcribe", file, *options]) == 0
    assert capsys.readouterr().out == f"{expected.text}\n"
    assert main(["transcribe", file, *options, "--json", "--prompt", "w3"]) == 0
    told, hinted = json.loads(capsys.readouterr().out), model.transcribe(SOUND, prompt="w3")
    assert (told["text"], told["language"]) == (hinted.text, hinted.language)
    assert main(["transcribe", file, *options, "--language", "fr"]) == 0
    assert capsys.readouterr().out == f"{model.transcribe(SOUND, 'French').text}\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(SOUND)))
    assert main(["transcribe", str(saved[0]), "-", *options[2:]]) == 0
    assert capsys.readouterr().out == f"{expected.text}\n"
    assert main(["transcribe", file]) == 1
    assert capsys.readouterr().err == "pace: error: this model takes no sound\n"
    for wrong in ([str(tmp_path / "none.wav")], [file, "--language", "xx"]):
        with pytest.raises(SystemExit) as stop:
            main(["transcribe", *wrong, *options])
        assert stop.value.code == 2
        assert ("there is no file" in (said := capsys.readouterr().err)) or "language must be one of" in said
