"""Sessions with images: appended in any turn, cut, forked, saved and loaded, with the same logits."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("PIL")

from pace.llm.cache import saved_file
from pace.llm.clients.saved_media import FIELDS, describe, feature_bytes, read_media, whole_media
from pace.llm.clients.session import _extents
from pace.media.media import Media, MediaSpan
from tests.llm.media.talking import PLACEHOLDER, load, num_encoded, page, save_talking
from tests.plugins.tiers import sample

TEXTS = [f"This is {PLACEHOLDER}, and what does it say?", f" Compare {PLACEHOLDER} with {PLACEHOLDER}, line by line."]
IMAGES = [[page(0)], [page(1), page(0)]]


def turn(number: int) -> dict:
    return {"prompt": TEXTS[number], "images": IMAGES[number]}


@pytest.fixture(scope="module", params=sample(["qwen3_5", "qwen3_vl", "qwen3_5_moe"], lambda name: name == "qwen3_5"))
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("talking")
    save_talking(folder, request.param)
    return folder


@pytest.fixture(scope="module")
def model(folder):
    with load(folder) as model:
        yield model


def test_turns_have_the_logits_of_the_whole(model) -> None:
    whole = {"prompt": "".join(TEXTS), "images": [*IMAGES[0], *IMAGES[1]]}
    with model.session() as session, model.session() as other:
        session.append(turn(0))
        length = len(session)
        parts = session.append(turn(1), "all")
        assert torch.equal(other.append(whole, "all")[length:], parts)
        assert other.tokens == session.tokens and len(session.media) == 3
        assert [span.start for span in other.media] == [span.start for span in session.media]
        assert num_encoded(model) == 2, "an image is encoded once"
        greedy = model.generate(whole, do_sample=False, max_new_tokens=1).generated_token_ids
        assert int(parts[-1].argmax()) == greedy[0][0]


def test_cut_and_forked(model) -> None:
    with model.session() as session, model.session() as other:
        session.append(turn(0))
        start, length = session.media[0].start, len(session)
        expected = session.append(turn(1))
        for inside in (start + 1, session.media[0].end - 1):
            with pytest.raises(ValueError, match=f"the tokens {start} to {session.media[0].end - 1} are an image"):
                session.truncate(inside)
        session.truncate(session.media[1].end)
        assert len(session.media) == 2
        session.truncate(length)
        fork = session.fork()
        assert torch.equal(fork.append(turn(1)), expected) and torch.equal(session.append(turn(1)), expected)
        session.truncate(start - 1)  # before <|vision_start|>
        assert session.media == ()
        session.append({"prompt": TEXTS[0][len("This is ") :], "images": [page(5)]})
        changed = {"prompt": TEXTS[0], "images": [page(5)]}
        other.append(changed)
        assert torch.equal(session.append([40, 41]), other.append([40, 41]))
        fork.close()


def test_arrays_of_a_processor_are_appended(model) -> None:
    with model.session() as session, model.session() as other:
        session.append(turn(0))
        arrays = model.processor(images=IMAGES[0])
        other.append({"input_ids": torch.tensor([session.tokens]), **arrays})
        assert torch.equal(session.append([50]), other.append([50]))
        with pytest.raises(ValueError, match="1 token"):
            other.append({"input_ids": torch.tensor([[5, session.tokens[session.media[0].start]]])})
        with pytest.raises(ValueError, match="takes one sequence"):
            other.append({"input_ids": torch.tensor([[5], [6]])})


def test_saved_and_loaded(folder, model, tmp_path) -> None:
    path = tmp_path / "images.session"
    with model.session() as session:
        session.append(turn(0))
        session.append(turn(1))
        session.save(path)
        expected = session.append([40, 41, 42], "all")
        again = session.append(turn(0))
    with load(folder) as other:
        with other.load_session(path) as session:
            assert len(session.media) == 3
            assert torch.equal(session.append([40, 41, 42], "all"), expected)
            assert num_encoded(other) == 0, "the tower does not run"
            assert torch.equal(session.append(turn(0)), again) and num_encoded(other) == 1
            other.generator.driver.call(lambda engine: engine.cache.reset([session._sequence])).result()
            session.truncate(len(session) - 1)
            session.append([7])  # computes all of it again, with the features in the file
            assert num_encoded(other) >= 1
        other.generator.engine.identity._mmproj = "of another file"
        with pytest.raises(ValueError, match="its images were encoded with another mmproj file"):
            other.load_session(path)
    with load(folder, media=False) as other, pytest.raises(ValueError, match="it has images.*without a tower"):
        other.load_session(path)


def test_a_file_whose_media_are_elsewhere_is_refused(folder, model, tmp_path, monkeypatch) -> None:
    path, write = tmp_path / "images.session", saved_file.write_file
    changes = [
        ({"starts": [0]}, "not at their placeholders"),
        ({"starts": [10**6]}, "not at their placeholders"),
        ({"starts": []}, "another form"),
        ({"starts": [1.5]}, "another form"),
        ({"kind": "audio"}, "it has sound"),
        ({"shape": [3, 5]}, "another form"),
        ({"digest": "xy"}, "another form"),
        ({"grid": [1, -4, 2]}, "another form"),
        ({"grid": 1.5}, "another form"),
        ({"grid": 4}, "another form"),
        ({"grid": None}, "another form"),
        ({"grid": [1, 2, 2]}, "other sizes than their tokens"),
        ({"thumbnail": "small"}, "another form"),
        ({"runs": [1, 1]}, "another form"),
        ({"num_tokens": 5}, "another form"),
        ({"other": 1}, "another form"),
    ]
    for change, message in changes:
        with monkeypatch.context() as patch, model.session() as session:
            session.append(turn(0))

            def changed(target, head, sizes, pieces, change=change):
                head = json.loads(json.dumps(head))
                head["media"][0] |= change
                return write(target, head, sizes, pieces)

            patch.setattr("pace.llm.clients.saved_session.write_file", changed)
            session.save(path)
        with pytest.raises(ValueError, match=f"images.session cannot be loaded: .*{message}"):
            model.load_session(path)


def test_media_of_several_runs() -> None:
    """Tiles and rows of an image with other tokens between them."""
    features = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    media = Media("image", features, (2, 1, 3), 5, b"\1\2", (2, 3), (1, 3))
    one = Media("image", features[:1], (1, 1, 3), 1, b"\3")
    spans = (MediaSpan(1, media, length=2), MediaSpan(5, media, 2, length=3), MediaSpan(9, one))
    tokens = [7, 9, 9, 7, 7, 9, 9, 9, 7, 9]
    assert list(_extents(spans)) == [(1, 8), (9, 10)]
    entries = json.loads(json.dumps(describe(spans)))
    pieces = [bytearray(feature_bytes(medium)) for medium in whole_media(spans)]
    found = read_media(entries, pieces, tokens, {"image": 9})
    assert [(span.start, span.first, span.length) for span in found] == [(1, 0, 2), (5, 2, 3), (9, 0, 1)]
    for ours, given in zip(whole_media(found), (media, one), strict=True):
        assert np.array_equal(ours.features, given.features) and ours.features.shape == given.features.shape
        assert all(getattr(ours, name) == getattr(given, name) for name in ("digest", *FIELDS))
    assert found[0].media is found[1].media
    entries[0]["starts"] = [1, 4]
    with pytest.raises(ValueError, match="not at their placeholders"):
        read_media(entries, pieces, tokens, {"image": 9})
    with pytest.raises(ValueError, match="other media"):
        read_media(entries, pieces[:1], tokens, {"image": 9})
