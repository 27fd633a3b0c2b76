"""Request bodies of multipart/form-data (RFC 7578): fields and files of bounded number, names and sizes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from pace.server.errors import ApiError, invalid

MAX_PARTS = 64
MAX_HEADER_BYTES = 4096
"""Maximum bytes of the headers of one part."""
MAX_NAME = 256
"""Maximum characters of a field's name, and of a file's name."""
MAX_FIELD_BYTES = 64 << 10
"""Maximum bytes of a field that is not a file; the body's limit bounds a file."""
BOUNDARY = re.compile(r"""(?:^|;)\s*boundary=(?:"([^"\\]*)"|([^\s;"]*))\s*(?=;|$)""", re.IGNORECASE)
BOUNDARY_CHARACTERS = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
PARAMETER = re.compile(r"""\s*;\s*([A-Za-z0-9*_-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"\\]+))""")
ESCAPES = {"%22": '"', "%0D": "\r", "%0A": "\n"}
"""What browsers write for characters that would end a name."""


@dataclass(frozen=True)
class FormPart:
    """A field or a file of a form."""

    name: str
    content: bytes
    filename: str | None = None
    """The client's name of a file; None for a field."""

    def text(self) -> str:
        """Returns the value of a field. Raises ApiError 400 for a file, a long value, and invalid UTF-8."""
        if self.filename is not None:
            raise invalid(self.name, "must be a field, not a file")
        if len(self.content) > MAX_FIELD_BYTES:
            raise invalid(self.name, f"must have at most {MAX_FIELD_BYTES} bytes; got {len(self.content)}")
        try:
            return self.content.decode("utf-8")
        except UnicodeDecodeError:
            raise invalid(self.name, "must be UTF-8") from None


class Form:
    """The parts of a body, found by their names. A name that ends in `[]` may occur several times."""

    def __init__(self, parts: list[FormPart]):
        """Raises ApiError 400 for a name that occurs twice."""
        self.parts: dict[str, list[FormPart]] = {}
        for part in parts:
            same = self.parts.setdefault(part.name, [])
            if same and not part.name.endswith("[]"):
                raise invalid(part.name, "occurs twice in the form")
            same.append(part)

    def field(self, name: str) -> str | None:
        """Returns the text of a field, or None if the form lacks it."""
        return self.parts[name][0].text() if name in self.parts else None

    def file(self, name: str) -> bytes:
        """Returns the bytes of a file. Raises ApiError 400 if the form lacks it or has a field of that name."""
        if name not in self.parts:
            raise invalid(name, "is missing: it must be a file of the form")
        part = self.parts[name][0]
        if part.filename is None:
            raise invalid(name, 'must be a file: its part needs a "filename"')
        return part.content

    def values(self, file: str) -> dict[str, Any]:
        """Returns the fields by name, and the bytes of the file named `file`. What is in brackets belongs to the name
        before it, which then has a list. Raises ApiError 400."""
        values: dict[str, Any] = {}
        for name, parts in self.parts.items():
            base, bracket, _ = name.partition("[")
            found = self.file(name) if name == file else parts[0].text()
            if bracket:
                found = [part.text() for part in parts]
            if base not in values:
                values[base] = found
            elif bracket and isinstance(values[base], list):
                values[base] += found
            else:
                raise invalid(base, "occurs twice in the form")
        return values


def read_form(body: bytes, content_type: str) -> Form:
    """Returns the form of a body. `content_type` is the request's header. Takes memory of the body once more. Raises
    ApiError 415 for another type, and 400 for a body that breaks the format or is beyond the limits."""
    delimiter = b"--" + _boundary(content_type)
    if not body.startswith(delimiter):
        raise ApiError(400, "the body does not begin with the boundary of its content type")
    parts: list[FormPart] = []
    position = len(delimiter)
    while body[position : position + 2] != b"--":
        if len(parts) == MAX_PARTS:
            raise ApiError(400, f"the form has more than {MAX_PARTS} parts")
        # After a boundary, the line may have spaces.
        head = position + len(body[position : position + 80]) - len(body[position : position + 80].lstrip(b" \t"))
        if body[head : head + 2] != b"\r\n":
            raise ApiError(400, f"the boundary before part {len(parts) + 1} of the form is not a line of its own")
        begin = body.find(b"\r\n\r\n", head, head + 2 + MAX_HEADER_BYTES + 4)
        end = body.find(b"\r\n" + delimiter, begin + 2) if begin >= 0 else -1
        if begin < 0 or end < 0:
            what = f"headers of at most {MAX_HEADER_BYTES} bytes" if begin < 0 else "boundary after it"
            raise ApiError(400, f"part {len(parts) + 1} of the form has no {what}")
        name, filename = _read_headers(body[head + 2 : begin], len(parts) + 1)
        parts.append(FormPart(name, body[begin + 4 : end], filename))
        position = end + 2 + len(delimiter)
    if body[position + 2 :].strip(b" \t\r\n"):
        raise ApiError(400, "the body goes on after the last boundary of the form")
    return Form(parts)


def _boundary(content_type: str) -> bytes:
    kind, _, parameters = content_type.partition(";")
    if kind.strip().lower() != "multipart/form-data":
        raise ApiError(415, f"the content type must be multipart/form-data; got {kind.strip()[:60]!r}")
    found = BOUNDARY.findall(parameters)
    boundary = found[0][0] or found[0][1] if len(found) == 1 else ""
    if not BOUNDARY_CHARACTERS.fullmatch(boundary):
        raise ApiError(400, "the content type needs one boundary of 1 to 70 characters")
    return boundary.encode()


def _read_headers(head: bytes, number: int) -> tuple[str, str | None]:
    """Returns the name of a part, and the name of its file or None."""
    where = f"part {number} of the form"
    try:
        lines = head.decode("utf-8").split("\r\n")
    except UnicodeDecodeError:
        raise ApiError(400, f"the headers of {where} are not UTF-8") from None
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not re.fullmatch(r"[!-9;-~]+", name) or not value.isprintable():
            raise ApiError(400, f"{where} has a malformed header")
        if name.lower() in headers:
            raise ApiError(400, f"{where} has the header {name[:40]} twice")
        headers[name.lower()] = value.strip()
    encoding = headers.get("content-transfer-encoding", "binary").lower()
    if encoding not in ("binary", "8bit", "7bit"):
        raise ApiError(400, f"{where} has the transfer encoding {encoding[:40]!r}; only binary is supported")
    disposition, _, _ = headers.get("content-disposition", "").partition(";")
    if disposition.strip().lower() != "form-data":
        raise ApiError(400, f"{where} needs the header Content-Disposition: form-data")
    parameters = _parameters(headers["content-disposition"], len(disposition), where)
    if not parameters.get("name"):
        raise ApiError(400, f"{where} has no name")
    filename = parameters.get("filename")
    for text in (parameters["name"], filename or ""):
        if len(text) > MAX_NAME:
            raise ApiError(400, f"{where} has a name of {len(text)} characters; at most {MAX_NAME} are allowed")
    return parameters["name"], filename


def _parameters(value: str, position: int, where: str) -> dict[str, str]:
    """Returns the parameters of a Content-Disposition from a position on, each `; name="value"`."""
    found: dict[str, str] = {}
    while position < len(value):
        match = PARAMETER.match(value, position)
        if not match or match[1].lower() in found:
            raise ApiError(400, f"{where} has a malformed Content-Disposition")
        text = match[3] if match[2] is None else re.sub(r"\\([\"\\])", r"\1", match[2])
        found[match[1].lower()] = re.sub("%22|%0[AaDd]", lambda escape: ESCAPES[escape[0].upper()], text)
        position = match.end()
    if "filename*" in found:  # an old form of names outside of ASCII; pace has no use for the name
        found.setdefault("filename", found["filename*"])
    return found
