"""Headers of PNG, JPEG, WebP and GIF files: the size and orientation, read without decoding, and the decodable part.

Image files are untrusted data. Pillow's own readers also parse ICC profiles, EXIF, XMP, texts and further frames, whose
cost no pixel limit bounds. So a decoder here only gets the blocks that pixels depend on: `ImageHeader.data`."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from dataclasses import dataclass

from pace.media.media import MediaError

MAX_PIXELS = 40_000_000
MAX_SIDE = 16384
MAX_SCANS = 100
"""Every scan of a JPEG passes over all pixels, at 36 bytes or more in the file."""
MAX_BLOCKS = 1 << 16
"""Chunks, segments or sub-blocks of a file's structure. A PNG of 20 MiB in the usual chunks of 8 KiB has 2,560."""


@dataclass(frozen=True)
class ImageHeader:
    """What the header of an image file says, within the limits of this module."""

    format: str
    """"PNG", "JPEG", "WEBP" or "GIF"."""
    width: int
    height: int
    """Pixels as stored, before `orientation` is applied."""
    orientation: int
    """EXIF orientation, 1 (upright) to 8; from 5 on, width and height swap."""
    parts: list[bytes]

    @property
    def data(self) -> bytes:
        """A file of the same format with the first frame's pixels and nothing else."""
        return b"".join(self.parts)

    @property
    def upright_size(self) -> tuple[int, int]:
        """Height and width after `orientation` is applied."""
        return (self.width, self.height) if self.orientation >= 5 else (self.height, self.width)


def read_header(data: bytes) -> ImageHeader:
    """Reads the header of an image file.

    Raises MediaError for another format, a damaged header, or an image beyond the limits."""
    for name, magic, read in FORMATS:
        if re.match(magic, data, re.DOTALL):
            try:
                header = read(data)
            except (struct.error, IndexError):
                raise MediaError(f"the {name} image ends within its header; it is incomplete") from None
            check_size(header.height, header.width)
            return header
    raise MediaError("the data is not an image of a known format; PNG, JPEG, WebP and GIF are read")


def check_size(height: int, width: int) -> None:
    """Raises MediaError for an image without pixels or beyond the limits."""
    if height < 1 or width < 1:
        raise MediaError(f"the image has no pixels: its size is {width} x {height}")
    if max(height, width) > MAX_SIDE or height * width > MAX_PIXELS:
        raise MediaError(
            f"the image is too large: {width} x {height} pixels; allowed are {MAX_PIXELS:,} pixels and sides up to "
            f"{MAX_SIDE:,}"
        )


def read_png(data: bytes) -> ImageHeader:
    """Chunks of a PNG file. An APNG's default image counts; its frames are left out."""
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise MediaError("the PNG image does not begin with its header; the file is damaged")
    parts, orientation, position = [data[:33]], 1, 33
    for _ in range(MAX_BLOCKS):
        kind, length = data[position + 4 : position + 8], int.from_bytes(data[position : position + 4])
        end = position + 12 + length
        if kind in (b"PLTE", b"tRNS", b"IDAT", b"IEND"):
            parts.append(data[position:end])
        elif kind == b"eXIf":
            orientation = read_orientation(data[position + 8 : end - 4])
        position = end
        if position > len(data) or kind != b"IEND" and position == len(data):
            raise MediaError("the PNG image ends before its last block; it is incomplete")
        if kind == b"IEND":
            return ImageHeader("PNG", width, height, orientation, parts)
    raise too_many_blocks("PNG")


_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""A marker: neither a stuffed byte (FF 00), a restart (FF D0 to D7) nor a fill byte (FF FF)."""
_JPEG_KEPT = frozenset(b"\xc4\xdb\xda\xdc\xdd\xe0\xee")
"""Huffman and quantisation tables, scans, lines, restarts, and the two segments that say which colours these are."""


def read_jpeg(data: bytes) -> ImageHeader:
    """Segments of a JPEG file. Huffman-coded baseline and progressive images are read, as browsers do."""
    parts, orientation, position, size, scans = [data[:2]], 1, 2, None, 0
    for _ in range(MAX_BLOCKS):
        match = _JPEG_MARKER.search(data, position)
        begin = match.start() if match else len(data)
        if scans:
            parts.append(data[position:begin])
        code = data[begin + 1] if match else 0xD9
        if code == 0xD9:
            parts.append(data[begin : begin + 2])
            break
        position = begin + 2
        if code in (0x01, 0xD8):  # markers without a segment
            continue
        position += max(2, int.from_bytes(data[position : position + 2]))
        if code in _JPEG_KEPT or code in (0xC0, 0xC1, 0xC2):
            parts.append(data[begin:position])
        if code == 0xDA:
            scans += 1
        elif code == 0xE1 and data[begin + 4 : begin + 10] == b"Exif\0\0" and orientation == 1:
            orientation = read_orientation(data[begin + 10 : position])
        elif 0xC0 <= code <= 0xCF and code not in (0xC4, 0xC8, 0xCC):
            if code > 0xC2 or size:
                raise MediaError("the JPEG image is coded in a way that is not supported; save it as a usual JPEG")
            size = struct.unpack_from(">HH", data, begin + 5)
    else:
        raise too_many_blocks("JPEG")
    if size is None or not scans:
        raise MediaError("the JPEG image ends within its header; it is incomplete")
    if scans > MAX_SCANS:
        raise MediaError(f"the JPEG image has {scans:,} scans; up to {MAX_SCANS} are read")
    # Each block of 8 x 8 pixels takes a bit or more.
    check_length("JPEG", sum(map(len, parts)) * 8 * 64, *size)
    return ImageHeader("JPEG", size[1], size[0], orientation, parts)


def read_webp(data: bytes) -> ImageHeader:
    """Chunks of a WebP file: the still image, or the canvas and first frame of an animation."""
    if int.from_bytes(data[4:8], "little") + 8 > len(data):
        raise MediaError("the WebP image ends before its last block; it is incomplete")
    parts: list[bytes] = []
    orientation, position, size = 1, 12, None
    for _ in range(MAX_BLOCKS):
        kind, length = data[position : position + 4], int.from_bytes(data[position + 4 : position + 8], "little")
        end, chunk = position + 8 + length + length % 2, data[position + 8 : position + 8 + length]
        if kind == b"EXIF":
            orientation = read_orientation(chunk)
        elif kind in (b"ALPH", b"ANIM") or kind == b"ANMF" and not any(part[:4] == kind for part in parts):
            parts.append(data[position:end])
        elif kind == b"VP8X" and not parts:
            size = int.from_bytes(chunk[4:7], "little") + 1, int.from_bytes(chunk[7:10], "little") + 1
            # Transparency and animation stay of the flags; the other chunks they announce are left out.
            parts.append(data[position : position + 8] + bytes([chunk[0] & 0x12]) + chunk[1:])
        elif kind in (b"VP8 ", b"VP8L") and not any(part[:4] in (b"VP8 ", b"VP8L") for part in parts):
            frame_size = read_vp8_size(chunk) if kind == b"VP8 " else read_vp8l_size(chunk)
            size = size or frame_size
            parts.append(data[position:end])
        position = end
        if position >= len(data):
            break
    else:
        raise too_many_blocks("WebP")
    if size is None:
        raise MediaError("the WebP image holds no pixels; the file is damaged or incomplete")
    length = sum(map(len, parts)) + 4
    return ImageHeader("WEBP", *size, orientation, [b"RIFF", length.to_bytes(4, "little"), b"WEBP", *parts])


def read_vp8_size(chunk: bytes) -> tuple[int, int]:
    start, width, height = struct.unpack_from("<3x3sHH", chunk)
    if start != b"\x9d\x01\x2a":
        raise MediaError("the WebP image does not begin with a key frame; the file is damaged")
    width, height = width & 0x3FFF, height & 0x3FFF
    # The modes of each block of 16 x 16 pixels take a bit or more.
    check_length("WebP", len(chunk) * 8 * 256, height, width)
    return width, height


def read_vp8l_size(chunk: bytes) -> tuple[int, int]:
    signature, bits = struct.unpack_from("<BI", chunk)
    if signature != 0x2F:
        raise MediaError("the WebP image does not begin with its signature; the file is damaged")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1


def read_gif(data: bytes) -> ImageHeader:
    """Blocks of a GIF file up to its first frame. A frame beyond the screen enlarges it, as Pillow does."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    position = 13 + (6 << (flags & 7) if flags & 0x80 else 0)
    parts = [data[:position]]
    blocks = 0
    while blocks < MAX_BLOCKS:
        blocks += 1
        kind = data[position]
        if kind == 0x2C:  # an image
            x, y, frame_width, frame_height = struct.unpack_from("<4H", data, position + 1)
            parts.append(data[position:])
            return ImageHeader("GIF", max(width, x + frame_width), max(height, y + frame_height), 1, parts)
        if kind == 0x3B:  # the trailer
            raise MediaError("the GIF file holds no image")
        if kind == 0x21:  # an extension, of sub-blocks
            begin, position = position, position + 2
            while data[position] and blocks < MAX_BLOCKS:
                position += 1 + data[position]
                blocks += 1
            if data[begin + 1] == 0xF9:  # transparency
                parts.append(data[begin : position + 1])
        position += 1
    raise too_many_blocks("GIF")


FORMATS: list[tuple[str, bytes, Callable[[bytes], ImageHeader]]] = [
    ("PNG", rb"\x89PNG\r\n\x1a\n", read_png),
    ("JPEG", rb"\xff\xd8\xff", read_jpeg),
    ("WebP", rb"RIFF....WEBP", read_webp),
    ("GIF", rb"GIF8[79]a", read_gif),
]
"""Name, first bytes as a pattern, and reader of each format."""


def check_length(name: str, max_pixels: int, height: int, width: int) -> None:
    """Raises MediaError if a file is too short for its size in pixels, before memory for them is taken."""
    if height * width > max_pixels:
        raise MediaError(f"the {name} image is too short for {width} x {height} pixels; it is incomplete or damaged")


def too_many_blocks(name: str) -> MediaError:
    return MediaError(
        f"the {name} image is made of more than {MAX_BLOCKS:,} blocks; save it again with another program"
    )


def read_orientation(exif: bytes) -> int:
    """Orientation in a block of EXIF, 1 to 8; 1 (upright) if the block has none or is damaged."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    try:
        if order is not None:
            (offset,) = struct.unpack_from(order + "I", tiff, 4)
            (count,) = struct.unpack_from(order + "H", tiff, offset)
            for index in range(min(count, 512)):
                tag, kind, number, value = struct.unpack_from(order + "HHIH", tiff, offset + 2 + 12 * index)
                if (tag, kind, number) == (0x0112, 3, 1):
                    return value if 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1
