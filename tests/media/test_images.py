"""Images of all kinds become the RGB pixels of Pillow, upright and on white, or one clear error."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import PIL.Image
import PIL.ImageOps
import pytest
from transformers.image_transforms import convert_to_rgb

from pace.media.containers import read_header
from pace.media.images import MAX_ENCODED_BYTES, image_size, load_rgb
from pace.media.media import MediaError
from tests.media.samples import ORIENTATION, draw, encode, files, modes


def reference(data: bytes) -> np.ndarray:
    """Pixels of an image file as transformers reads them: turned by EXIF, on white."""
    return convert_to_rgb(PIL.ImageOps.exif_transpose(PIL.Image.open(io.BytesIO(data))), return_numpy=True)


def test_files_of_every_kind_have_the_pixels_of_pillow(tmp_path):
    for name, data in files().items():
        pixels = np.asarray(load_rgb(data))
        assert np.array_equal(pixels, reference(data)), name
        assert pixels.shape == (*image_size(data), 3), name
    (tmp_path / "a.png").write_bytes(files()["png"])
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), bytearray(files()["png"]), memoryview(files()["png"])):
        assert np.array_equal(load_rgb(source), draw(61, 43)) and image_size(source) == (43, 61)


def test_pil_images_of_every_mode_have_the_pixels_of_transformers():
    refused = []
    for name, image in modes().items():
        try:
            expected = convert_to_rgb(image, return_numpy=True)
        except ValueError:
            with pytest.raises(MediaError, match=f"mode {name} has no RGB form"):
                load_rgb(image)
            refused.append(name)
            continue
        assert np.array_equal(load_rgb(image), expected), name
        assert image_size(image) == (53, 37)
    assert "La" in refused and len(refused) < 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_files_are_turned_as_exif_says_and_pil_images_are_not(orientation):
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = orientation
    for format in ("JPEG", "PNG", "WEBP"):
        data = encode(draw(31, 20), format, exif=exif)
        assert np.array_equal(load_rgb(data), reference(data)), format
        assert image_size(data) == ((31, 20) if orientation >= 5 else (20, 31)), format
        opened = PIL.Image.open(io.BytesIO(data))
        assert np.asarray(load_rgb(opened)).shape == (20, 31, 3) and image_size(opened) == (20, 31)


def test_exif_of_either_byte_order_and_damaged_exif():
    entry = struct.pack(">HHIHH", ORIENTATION, 3, 1, 6, 0)
    big = b"MM\0*\0\0\0\x08\0\x01" + entry + bytes(4)
    little = b"II*\0\x08\0\0\0\x01\0" + struct.pack("<HHIHH", ORIENTATION, 3, 1, 6, 0) + bytes(4)
    for block in (big, little):
        assert image_size(encode(draw(8, 5), "JPEG", exif=b"Exif\0\0" + block)) == (8, 5)
    for block in (b"", big[:12], big[:8], big.replace(b"\0\x06", b"\0\x09"), b"XX" + big[2:], b"MM\0*\xff\xff\xff\xff"):
        assert image_size(encode(draw(8, 5), "JPEG", exif=b"Exif\0\0" + block)) == (5, 8)


def test_files_that_are_cut_off_are_refused():
    """Pillow takes a PNG without its end, and llama.cpp takes any JPEG. The frame that counts of a GIF is whole."""
    for name, data in files().items():
        if name.startswith("gif") or name == "jpeg of two images":
            continue
        for cut in (5, 13, 30) if name.startswith("jpeg") else (1, 5, 13, 30):
            with pytest.raises(MediaError, match="incomplete"):
                load_rgb(data[:-cut])


def test_transparency_is_composited_on_white():
    image = PIL.Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    image.putpixel((1, 0), (10, 20, 30, 255))
    for source in (image, encode(image, "PNG"), encode(image, "WEBP", lossless=True, exact=True)):
        assert np.asarray(load_rgb(source)).tolist() == [[[255, 255, 255], [10, 20, 30]]]


def test_a_gif_frame_beyond_the_screen_enlarges_it():
    data = bytearray(files()["gif"])
    data[6:10] = struct.pack("<HH", 20, 20)
    assert image_size(bytes(data)) == (43, 61)
    assert np.array_equal(load_rgb(bytes(data)), reference(bytes(data)))


def test_only_what_pixels_depend_on_reaches_the_decoder():
    for name, data in files().items():
        clean = read_header(data).data
        for word in (
            b"Exif",
            b"eXIf",
            b"EXIF",
            b"iCCP",
            b"ICC",
            b"a comment",
            b"a description",
            b"MPF",
            b"fcTL",
            b"NETSCAPE",
        ):
            assert word not in clean, f"{name}: {word}"
        assert clean.count(b"ANMF") <= 1


def test_files_with_16_bits_a_channel():
    rows = np.random.default_rng(0).integers(0, 256, (5, 1 + 7 * 8), np.uint8)
    rows[:, 0] = 0  # unfiltered
    header = struct.pack(">IIBBBBB", 7, 5, 16, 6, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for kind, block in ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes())), (b"IEND", b"")):
        data += struct.pack(">I", len(block)) + kind + block + struct.pack(">I", zlib.crc32(kind + block))
    assert np.array_equal(load_rgb(data), reference(data)) and len(np.unique(load_rgb(data))) > 50
    assert set(np.unique(load_rgb(modes()["I;16"]))) == {255}, "cut off, as Pillow and transformers do"


def test_without_pillow_sizes_are_known_and_pixels_name_the_extra():
    program = """
import sys
sys.modules["PIL"] = None
from pace.media.images import image_size, load_rgb
data = sys.stdin.buffer.read()
print(image_size(data))
try:
    load_rgb(data)
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], input=files()["png"], capture_output=True, check=True)
    assert done.stdout.decode().splitlines() == [
        "(43, 61)",
        'images need Pillow: pip install "pace-llm[vision]"',
    ]


def test_the_largest_sizes():
    zero = np.zeros(3, np.uint8)
    for height, width in ((16384, 1), (1, 16384), (16384, 2441), (5000, 8000)):
        assert image_size(np.broadcast_to(zero, (height, width, 3))) == (height, width)
    for height, width in ((16385, 1), (1, 16385), (16384, 2442), (5000, 8001), (0, 1), (1, 0)):
        with pytest.raises(MediaError, match=f"{width} x {height}"):
            image_size(np.broadcast_to(zero, (height, width, 3)))


def test_arrays_are_rgb_and_other_kinds_are_refused():
    array = np.asarray(draw(9, 6))
    assert np.array_equal(load_rgb(array), array) and image_size(array) == (6, 9)
    assert np.array_equal(load_rgb(array[::-1, ::2]), array[::-1, ::2])
    for wrong in (array.astype(np.float32), array[:, :, 0], array[None], np.zeros((3, 3, 4), np.uint8)):
        with pytest.raises(MediaError, match=r"uint8 \[height, width, 3\]; got"):
            load_rgb(wrong)
    for wrong in (None, 3, [array], {"url": "x"}, io.BytesIO(b"")):
        with pytest.raises(TypeError, match=f"an image is bytes, .*; got {type(wrong).__name__}"):
            load_rgb(wrong)


def test_paths_and_urls_that_are_no_image(tmp_path):
    (tmp_path / "large.png").write_bytes(bytes(MAX_ENCODED_BYTES + 1))
    (tmp_path / "text.png").write_text("hello")
    for source, message in (
        (tmp_path / "large.png", "larger than"),
        (bytes(MAX_ENCODED_BYTES + 1), "too large"),
        (tmp_path / "text.png", "not an image of a known format"),
        (tmp_path, "a directory"),
        ("/dev/zero", "device"),
        ("https://example.com/a.png", "not a URL"),
        ("data:image/png;base64,iVBORw0KGgo=", "not a URL"),
        (b"", "not an image"),
        (encode(draw(4, 4), "BMP"), "not an image of a known format"),
        (encode(draw(4, 4), "TIFF"), "not an image of a known format"),
    ):
        with pytest.raises(MediaError, match=message) as caught:
            image_size(source)
        assert len(str(caught.value)) < 250 and "base64" not in str(caught.value)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_rgb(tmp_path / "missing.png")
