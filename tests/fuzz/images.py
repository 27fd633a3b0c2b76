"""Decodes mutated images and bombs. Each must give pixels or a MediaError, in bounded time and memory.

    python -m tests.fuzz.images --cases 2000 [--first 0]

A case fails if its error is another one or quotes the data, or if it takes more than the limits below. The last line is
one JSON object; the exit code is 1 if any case failed.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pace.media.containers import MAX_BLOCKS
from pace.media.images import image_size, load_rgb, open_source
from pace.media.media import MediaError
from pace.memory import resident_bytes
from tests.media.samples import draw, encode, files

MAX_SECONDS = 0.5
"""Seconds of CPU time, which other processes do not change."""
MAX_GROWTH_BYTES = 64 << 20
ADDRESS_SPACE_BYTES = 4 << 30
Case = tuple[str, bytes, set[str]]
"""A name, a file, and the outcomes that are right."""


def read(data: bytes) -> str:
    """Reads an image; "image" if it is one."""
    opened = open_source(data)
    size, image = image_size(opened), load_rgb(opened)
    return "image" if image.mode == "RGB" and (image.height, image.width) == size else "FAIL: another size"


def outcome_of(data: bytes, read: Callable[[bytes], str] = read) -> str:
    """The result of `read` or "MediaError"; else "FAIL: ...".

    A case beyond a limit is tried three times, because a busy machine makes processor time longer, too."""
    for _ in range(3):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before, begin = resident_bytes(), time.process_time()
        try:
            outcome = read(data)
        except MediaError as error:
            text = str(error)
            outcome = "MediaError" if len(text) < 200 and text.isprintable() and text.isascii() else f"FAIL: {text!r}"
        except BaseException as error:
            outcome = f"FAIL: {type(error).__name__}: {error}"
        seconds, growth = time.process_time() - begin, resident_bytes(peak=True) - before
        if seconds <= MAX_SECONDS and growth <= MAX_GROWTH_BYTES:
            return outcome
    cost = f"{seconds:.2f} s" if seconds > MAX_SECONDS else f"{growth >> 20} MB of memory"
    return f"FAIL: {cost} ({outcome})"


# -- mutations


def mutated(seed: int) -> tuple[str, bytes]:
    """Name of a sample, and its file after one to three mutations."""
    rng = random.Random(seed)
    name = rng.choice(sorted(files()))
    data = mutate(rng, files()[name])
    if name.startswith("png") and rng.random() < 0.7:
        repair_checksums(data)
    return name, bytes(data)


def mutate(rng: random.Random, file: bytes) -> bytearray:
    """A file after one to three mutations."""
    data = bytearray(file)
    for _ in range(rng.choice([1, 1, 2, 3])):
        rng.choice([flip, flip, cut, put_number, put_number, repeat, drop, fill])(rng, data)
    return data


def place(rng: random.Random, data: bytearray) -> int:
    """An index, mostly within the header."""
    return rng.randrange(min(len(data), rng.choice([32, 64, 700, len(data)])) or 1)


def flip(rng: random.Random, data: bytearray) -> None:
    for _ in range(rng.choice([1, 1, 8])):
        if data:
            data[place(rng, data)] ^= 1 << rng.randrange(8)


def cut(rng: random.Random, data: bytearray) -> None:
    del data[rng.randrange(len(data) + 1) :]


def put_number(rng: random.Random, data: bytearray) -> None:
    """Writes a number of 1 to 4 bytes over others: a size, a length or a count."""
    index = place(rng, data)
    value = rng.choice([0, 1, 2, 255, 256, 4096, 0x7FFF, 0xFFFF, 0xFFFFFF, 0x7FFFFFFF, 2**32 - 1])
    number = struct.pack(rng.choice("<>") + "I", value)[: rng.choice([1, 2, 3, 4])]
    data[index : index + len(number)] = number


def repeat(rng: random.Random, data: bytearray) -> None:
    begin = place(rng, data)
    end = begin + rng.choice([1, 4, 12, 40, 300])
    data[end:end] = data[begin:end] * rng.choice([1, 1, 3, 200])


def drop(rng: random.Random, data: bytearray) -> None:
    begin = place(rng, data)
    del data[begin : begin + rng.choice([1, 4, 12, 40, 300])]


def fill(rng: random.Random, data: bytearray) -> None:
    begin, length = place(rng, data), rng.choice([1, 8, 100])
    data[begin : begin + length] = rng.choice([bytes(length), b"\xff" * length, rng.randbytes(length)])


def repair_checksums(data: bytearray) -> None:
    """Sets the checksums of a PNG's chunks, so that their contents are read."""
    position = 8
    while position + 12 <= len(data):
        end = position + 8 + int.from_bytes(data[position : position + 4])
        if end + 4 > len(data):
            break
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[position + 4 : end]))
        position = end + 4


# -- bombs


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, middle: bytes = b"", num_zeros: int = 0) -> bytes:
    """A PNG of 1 bit for each pixel."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    packer = zlib.compressobj(1)
    rows = b"".join(packer.compress(bytes(1 << 20)) for _ in range(-(-num_zeros >> 20))) + packer.flush()
    return b"\x89PNG\r\n\x1a\n" + header + middle + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def webp(*chunks: tuple[bytes, bytes]) -> bytes:
    body = b"".join(kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2) for kind, data in chunks)
    return b"RIFF" + struct.pack("<I", len(body) + 4) + b"WEBP" + body


def exif_bomb() -> bytes:
    """EXIF of 5,000 entries that all share one large value."""
    entries = b"".join(struct.pack("<HHII", tag, 1, 60_000, 8) for tag in range(1, 5001))
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", 5000) + entries + bytes(4)


def bombs() -> dict[str, bytes]:
    """Name -> file that is larger than a limit, or would cost much to decode, or contradicts itself."""
    jpeg, vp8, vp8l, gif = (files()[name] for name in ("jpeg progressive", "webp", "webp lossless", "gif"))
    last, frame = jpeg.rindex(b"\xff\xda"), jpeg.index(b"\xff\xc2")
    end_of_frame = frame + 2 + int.from_bytes(jpeg[frame + 2 : frame + 4])
    extended = (b"VP8X", bytes([2, 0, 0, 0]) + b"\xfe\x3f\x00" * 2)
    large = (b"VP8X", bytes([0, 0, 0, 0]) + b"\xff\x0f\x00" * 2)
    return {
        "png of zeros": png(30_000, 30_000, num_zeros=30_000 * 3751),
        "png with too many pixels": png(16_000, 16_000, num_zeros=16_000 * 2001),
        "png that is too wide": png(16_385, 1, num_zeros=3000),
        "png without pixels": png(0, 5),
        "png with the largest sides": png(2**31 - 1, 2**31 - 1),
        "png with too few pixels": png(6000, 6000, num_zeros=1000),
        "png of many chunks": png(30, 30, chunk(b"teXt", b"") * (MAX_BLOCKS + 1)),
        "gif with a lying screen": gif[:6] + b"\xff\xff\xff\xff" + gif[10:],
        "gif with a lying frame": gif[:10] + b"\0\0\0\x2c\0\0\0\0\xff\xff\xff\xff\0\x08\x01\0\0;",
        "gif with a frame too far": gif[:10] + b"\0\0\0\x2c\xff\xff\0\0\1\0\1\0\0\x08\x01\0\0;",
        "gif of many blocks": gif[:10] + bytes(MAX_BLOCKS + 9),
        "gif of many sub-blocks": gif[:10] + b"\0\0\0\x21\xfe" + b"\x01x" * (9 << 20),
        "gif without an image": gif[:10] + b"\0\0\0;",
        "webp with a lying canvas": webp(extended, (b"VP8 ", vp8[20:])),
        "webp with a canvas for a smaller frame": webp(large, (b"VP8 ", vp8[20:])),
        "webp with a canvas for a smaller lossless frame": webp(large, (b"VP8L", vp8l[20:])),
        "webp with a lying frame": vp8[:26] + b"\xff\x3f\xff\x3f" + vp8[30:],
        "webp with too few bytes": vp8[:26] + b"\x00\x10\x00\x10" + vp8[30:],
        "webp with a lying lossless frame": vp8l[:21] + b"\xff\xff\xff\x0f" + vp8l[25:],
        "webp of many chunks": webp(extended, *[(b"abcd", b"")] * (MAX_BLOCKS + 1)),
        "jpeg of many scans": jpeg[:last] + jpeg[last:-2] * 10_000 + b"\xff\xd9",
        "jpeg of 101 scans": jpeg[:last] + jpeg[last:-2] * (102 - jpeg.count(b"\xff\xda")) + b"\xff\xd9",
        "jpeg with a lying size": jpeg[: frame + 5] + b"\xff\xff\xff\xff" + jpeg[frame + 9 :],
        "jpeg with too few bytes": jpeg[: frame + 5] + b"\x10\x00\x10\x00" + jpeg[frame + 9 :],
        "jpeg of many segments": jpeg[:2] + b"\xff\xfe\0\x02" * (MAX_BLOCKS + 1) + jpeg[2:],
        "jpeg of two frames": jpeg[:frame] + jpeg[frame:end_of_frame] * 2 + jpeg[end_of_frame:],
        "jpeg without scans": jpeg[: jpeg.index(b"\xff\xda")],
        "jpeg coded arithmetically": jpeg.replace(b"\xff\xc2", b"\xff\xca", 1),
        "jpeg of stuffed bytes": jpeg[:last] + b"\xff\x00" * (9 << 20),
    }


def costly() -> dict[str, bytes]:
    """Name -> valid file with a part that would cost much, if anything but pixels were read."""
    image = draw(30, 20)
    exif = exif_bomb()
    texts = chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1 << 20))) * 63
    data = encode(image, "PNG")
    return {
        "jpeg with an exif bomb": encode(image, "JPEG", exif=exif),
        "png with an exif bomb": data[:33] + chunk(b"eXIf", exif[6:]) + data[33:],
        "webp with an exif bomb": encode(image, "WEBP", exif=exif),
        "png with texts of 63 MB": data[:33] + texts + data[33:],
        "jpeg with fill bytes": encode(image, "JPEG").replace(b"\xff\xda", b"\xff" * (19 << 20) + b"\xff\xda", 1),
        "jpeg with a long tail": encode(image, "JPEG") + b"\xff\xd8\xff\xda" * (4 << 20),
    }


def cuts() -> dict[str, bytes]:
    """Name -> a file of each kind, cut at every hundredth of its length."""
    image = draw(320, 240)
    whole = {
        "png": encode(image, "PNG"),
        "jpeg": encode(image, "JPEG"),
        "jpeg progressive": encode(image, "JPEG", progressive=True),
        "webp": encode(image, "WEBP"),
        "webp lossless": encode(image, "WEBP", lossless=True),
        "gif": encode(image, "GIF"),
    }
    return {
        f"{name} cut at {percent} %": data[: len(data) * percent // 100]
        for name, data in whole.items()
        for percent in range(100)
    }


# -- a run


def cases(num_cases: int, first: int) -> Iterator[Case]:
    for name, data in (bombs() | cuts()).items():
        yield name, data, {"MediaError"}
    for name, data in costly().items():
        yield name, data, {"image"}
    for seed in range(first, first + num_cases):
        name, data = mutated(seed)
        yield f"seed {seed}, {name}", data, {"image", "MediaError"}


def main(
    description: str, cases: Callable[[int, int], Iterable[Case]], files: Iterable[bytes], read: Callable[[bytes], str]
) -> int:
    """Runs the cases that the command line asks for. `files` are healthy ones, which load the decoders."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="mutated files, besides the others")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    for data in files:
        read(data)
    outcomes: Counter = Counter()
    for name, data, expected in cases(options.cases, options.first):
        outcome = outcome_of(data, read)
        outcomes[outcome if outcome in expected else "failed"] += 1
        if outcome not in expected:
            print(f"{name}: {outcome}", file=sys.stderr)
    print(json.dumps(dict(sorted(outcomes.items()))))
    return 1 if outcomes["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(__doc__, cases, files().values(), read))
