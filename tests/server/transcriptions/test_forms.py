"""Bodies of multipart/form-data: what clients send, what is refused, and any damage."""

from __future__ import annotations

import contextlib
import random
import tracemalloc

import httpx
import pytest

from pace.server.errors import ApiError
from pace.server.transcriptions.forms import MAX_FIELD_BYTES, MAX_HEADER_BYTES, MAX_NAME, MAX_PARTS, Form, read_form
from tests.waiting import cpu_limit

TYPE = "multipart/form-data; boundary=xyz"


def part(content: bytes, disposition: str = 'form-data; name="file"', *more: str) -> bytes:
    head = "\r\n".join([f"Content-Disposition: {disposition}", *more])
    return b"--xyz\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--xyz--\r\n"


def test_a_form_of_the_openai_client():
    """httpx writes the bodies of OpenAI's and Anthropic's clients."""
    sound = bytes(range(256)) * 50 + b"\r\n--boundary\r\n\r\n--"
    fields = {"model": "qwen3-asr", "language": "dé", "timestamp_granularities[]": ["word", "segment"]}
    request = httpx.Request("POST", "http://x", data=fields, files={"file": ('a "b"\r\n.wav', sound, "audio/wav")})
    form = read_form(request.read(), request.headers["content-type"])
    assert form.field("model") == "qwen3-asr" and form.field("language") == "dé" and form.field("prompt") is None
    assert form.file("file") == sound
    assert form.parts["file"][0].filename == 'a "b"\r\n.wav'
    assert [one.text() for one in form.parts["timestamp_granularities[]"]] == ["word", "segment"]


@pytest.mark.parametrize(
    "disposition",
    [
        'form-data; name="file"; filename="a.wav"',
        "form-data;name=file;filename=a.wav",
        'FORM-DATA; Name="file" ; FileName="a.wav"',
        'form-data; filename="a.wav"; filename*=UTF-8\'\'a.wav; name="file"',
        "form-data; name=\"file\"; filename*=UTF-8''a.wav",
        'form-data; name="fi\\le"; filename="\\"a;b\\".wav"',
    ],
)
@pytest.mark.parametrize("content", [b"", b"\r\n", b"a--xyz", b"\r\n--xy", b"a\r\n\r\nb"])
def test_ways_to_write_a_file(disposition, content):
    form = read_form(body(part(content, disposition, "Content-Type: audio/wav")), TYPE)
    [(name, [found])] = form.parts.items()
    assert name in ("file", "fi\\le") and found.content == content
    assert found.filename in ("a.wav", "UTF-8''a.wav", '"a;b".wav')


@pytest.mark.parametrize(
    "content_type",
    [TYPE, 'multipart/form-data; charset=utf-8; boundary="xyz"', "Multipart/Form-Data;boundary=xyz; charset=utf-8"],
)
def test_content_types(content_type):
    assert read_form(body(part(b"1")), content_type).field("file") == "1"
    assert read_form(body(), content_type).parts == {}
    assert read_form(b"--xyz \t\r\n" + part(b"1")[7:] + b"--xyz--", content_type).field("file") == "1"


@pytest.mark.parametrize(
    ("content_type", "status", "problem"),
    [
        ("application/json", 415, "'application/json'"),
        ("", 415, "multipart/form-data; got ''"),
        ("multipart/mixed; boundary=xyz", 415, "'multipart/mixed'"),
        ("multipart/form-data", 400, "one boundary"),
        ("multipart/form-data; boundary=", 400, "one boundary"),
        ("multipart/form-data; boundary=xyz; boundary=abc", 400, "one boundary"),
        ("multipart/form-data; xboundary=xyz", 400, "one boundary"),
        (f"multipart/form-data; boundary={'x' * 71}", 400, "1 to 70 characters"),
        ('multipart/form-data; boundary="xyz "', 400, "one boundary"),
        ("multipart/form-data; boundary=\u00e9", 400, "one boundary"),
        ("multipart/form-data; boundary=other", 400, "does not begin with the boundary"),
    ],
)
def test_content_types_that_are_refused(content_type, status, problem):
    with pytest.raises(ApiError, match=problem) as caught:
        read_form(body(part(b"1")), content_type)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "does not begin with the boundary"),
        (b"preamble\r\n" + body(part(b"1")), "does not begin"),
        (b"--xyz", "before part 1 of the form is not a line"),
        (b"--xyzabc\r\n", "before part 1 of the form is not a line"),
        (part(b"1"), "before part 2|boundary after it"),
        (body(part(b"1"))[:-4], "before part 2"),
        (part(b"1")[:-2], "part 1 of the form has no boundary"),
        (body(part(b"1")) + b"epilogue", "goes on after the last boundary"),
        (b"--xyz\r\nContent-Disposition: form-data", "part 1 of the form has no headers"),
        (body(part(b"1", "form-data; name=a", "X: " + "y" * MAX_HEADER_BYTES)), "no headers of at most 4096 bytes"),
        (body(part(b"1", "attachment; name=a")), "needs the header Content-Disposition"),
        (body(b"--xyz\r\nContent-Type: text/plain\r\n\r\n1\r\n"), "needs the header Content-Disposition"),
        (body(b"--xyz\r\n\r\n1\r\n"), "malformed header|no boundary"),
        (body(part(b"1", "form-data; name=a", "no colon")), "malformed header"),
        (body(part(b"1", "form-data; name=a", " folded: x")), "malformed header"),
        (body(part(b"1", "form-data; name=a\0")), "malformed header"),
        (body(part(b"1", "form-data; name=a", "content-disposition: form-data; name=b")), "twice"),
        (body(part(b"1", "form-data")), "has no name"),
        (body(part(b"1", 'form-data; name=""')), "has no name"),
        (body(part(b"1", 'form-data; name="a')), "malformed Content-Disposition"),
        (body(part(b"1", "form-data; name=a b")), "malformed Content-Disposition"),
        (body(part(b"1", "form-data; name=a; name=b")), "malformed Content-Disposition"),
        (body(part(b"1", f"form-data; name={'a' * (MAX_NAME + 1)}")), "a name of 257 characters"),
        (body(part(b"1", f"form-data; name=a; filename={'a' * (MAX_NAME + 1)}")), "a name of 257 characters"),
        (body(part(b"1", "form-data; name=a", "Content-Transfer-Encoding: base64")), "'base64'"),
        (body(part(b"1", "form-data; name=a"), part(b"2", "form-data; name=a")), "a occurs twice"),
        (body(*[part(b"1", "form-data; name=a[]")] * (MAX_PARTS + 1)), f"more than {MAX_PARTS} parts"),
        (b"--xyz\r\nContent-Disposition: form-data; name=\xff\r\n\r\n1\r\n--xyz--", "not UTF-8"),
    ],
)
def test_bodies_that_are_refused(data, problem):
    with pytest.raises(ApiError, match=problem) as caught:
        read_form(data, TYPE)
    assert caught.value.status == 400


def test_fields_and_files_are_not_mistaken():
    form = read_form(
        body(
            part(b"1", "form-data; name=field"),
            part(b"2", "form-data; name=file; filename=x"),
            part(b"\xff", "form-data; name=bytes"),
            part(b"x" * (MAX_FIELD_BYTES + 1), "form-data; name=long"),
        ),
        TYPE,
    )
    for call, problem in (
        (lambda: form.file("field"), "field must be a file"),
        (lambda: form.file("other"), "other is missing"),
        (lambda: form.field("file"), "file must be a field, not a file"),
        (lambda: form.field("bytes"), "bytes must be UTF-8"),
        (lambda: form.field("long"), "long must have at most 65536 bytes; got 65537"),
    ):
        with pytest.raises(ApiError, match=problem) as caught:
            call()
        assert caught.value.status == 400 and caught.value.param


def damaged(seed: int) -> bytes:
    """A form with bytes changed, removed, repeated or inserted, mostly next to boundaries and headers."""
    rng = random.Random(seed)
    parts = [
        part(rng.randbytes(rng.choice([0, 3, 200])), f'form-data; name="f{i}"{rng.choice(["", "; filename=a"])}')
        for i in range(rng.randrange(4))
    ]
    data = bytearray(body(*parts))
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at = rng.randrange(len(data))
        pieces = [b"\r\n", b"--xyz", b"--", b"\r\n\r\n", b'"', b";", b"\\", b"\0", rng.randbytes(1), b""]
        data[at : at + rng.choice([0, 0, 1, 2, 8])] = rng.choice(pieces)
    return bytes(data)


def test_damaged_forms_are_read_or_refused():
    refused = 0
    for seed in range(3000):
        try:
            form = read_form(damaged(seed), TYPE)
        except ApiError as error:
            assert error.status == 400 and len(error.message) < 200
            refused += 1
        else:
            assert isinstance(form, Form)
    assert 500 < refused < 2900


@pytest.mark.parametrize(
    "data",
    [
        body(part(b"\r\n--xy" * (4 << 20), "form-data; name=a; filename=b")),
        body(part(b"\r\n" * (8 << 20), "form-data; name=a; filename=b")),
        b"--xyz\r\n" + b"\r" * (16 << 20),
        b"--xyz" + b" " * (16 << 20),
        b"--xyz\r\nContent-Disposition: form-data; name=" + b'"\\' * (8 << 20),
        b"--xyz\r\n" * (2 << 20),
        body(part(b"1", 'form-data; name="' + '\\"' * 1900 + '"')),
        body(part(b"1", "form-data" + " " * 3900 + "x")),
    ],
    ids=range(8),
)
@pytest.mark.alone
def test_large_forms_take_bounded_time_and_memory(data):
    tracemalloc.start()
    with cpu_limit(0.5), contextlib.suppress(ApiError):
        read_form(data, TYPE)
    assert tracemalloc.get_traced_memory()[1] < len(data) + (1 << 20)
    tracemalloc.stop()
