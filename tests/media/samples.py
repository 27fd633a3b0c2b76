"""Small images of every mode and file format, drawn from a seed."""

from __future__ import annotations

import io
from functools import cache

import numpy as np
import PIL.Image

ORIENTATION = 0x0112
"""Number of the EXIF tag."""


def draw(width: int, height: int, seed: int = 0) -> PIL.Image.Image:
    """An RGB image of a few soft shapes and some noise."""
    rng = np.random.default_rng((seed, width, height))
    small = rng.integers(0, 256, (max(1, height // 8), max(1, width // 8), 3), np.uint8)
    image = np.asarray(PIL.Image.fromarray(small).resize((width, height), PIL.Image.Resampling.BILINEAR))
    return PIL.Image.fromarray(np.clip(image + rng.integers(-9, 10, image.shape), 0, 255).astype(np.uint8))


def with_alpha(image: PIL.Image.Image) -> PIL.Image.Image:
    """The image with an alpha channel that has all levels."""
    alpha = np.resize(np.arange(256, dtype=np.uint8), (image.height, image.width))
    image = image.copy()
    image.putalpha(PIL.Image.fromarray(alpha))
    return image


def modes(width: int = 37, height: int = 53) -> dict[str, PIL.Image.Image]:
    """Name -> image, for the modes of PIL and the ways in which they hold transparency."""
    image = draw(width, height)
    deep = np.asarray(image.convert("L")).astype(np.uint16) * 257
    images = {mode: image.convert(mode) for mode in ("1", "L", "P", "RGB", "CMYK", "YCbCr", "HSV", "I", "F", "RGBX")}
    images |= {"RGBA": with_alpha(image), "LA": with_alpha(image.convert("L")), "I;16": PIL.Image.fromarray(deep)}
    images["PA"] = images["RGBA"].convert("PA")
    images["La"], images["RGBa"] = images["LA"].convert("La"), images["RGBA"].convert("RGBa")
    images["LAB"] = PIL.Image.new("LAB", image.size)
    for name, mode, transparency in (
        ("P with one transparent color", "P", 3),
        ("P with levels of transparency", "P", bytes(range(0, 256, 2))),
        ("L with one transparent level", "L", 100),
        ("RGB with one transparent color", "RGB", image.getpixel((3, 4))),
    ):
        images[name] = image.convert(mode)
        images[name].info["transparency"] = transparency
    return images


def encode(image: PIL.Image.Image, format: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


@cache
def files(width: int = 61, height: int = 43) -> dict[str, bytes]:
    """Name -> image file, for the kinds of the four formats that Pillow writes."""
    image = draw(width, height)
    gray, palette, alpha, deep = image.convert("L"), image.convert("P"), with_alpha(image), modes(width, height)["I;16"]
    frames = [draw(width, height, seed) for seed in (1, 2)]
    exif = PIL.Image.Exif()
    exif[ORIENTATION] = 6
    exif[0x010E] = "a description"
    extras = {"exif": exif, "icc_profile": bytes(range(256)) * 9}
    return {
        "png": encode(image, "PNG"),
        "png gray": encode(gray, "PNG"),
        "png gray of 16 bits": encode(deep, "PNG"),
        "png of 1 bit": encode(image.convert("1"), "PNG"),
        "png with alpha": encode(alpha, "PNG"),
        "png gray with alpha": encode(with_alpha(gray), "PNG"),
        "png of a palette": encode(palette, "PNG"),
        "png of a palette of 2 bits": encode(image.quantize(4), "PNG", bits=2),
        "png of a palette with alpha": encode(palette, "PNG", transparency=bytes(range(256))),
        "png with a transparent color": encode(image, "PNG", transparency=image.getpixel((5, 5))),
        "png gray with a transparent level": encode(gray, "PNG", transparency=77),
        "png with extras": encode(image, "PNG", **extras),
        "png animated": encode(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "jpeg": encode(image, "JPEG"),
        "jpeg gray": encode(gray, "JPEG"),
        "jpeg progressive": encode(image, "JPEG", progressive=True, quality=90),
        "jpeg of full colors": encode(image, "JPEG", subsampling=0, optimize=True),
        "jpeg with restarts": encode(image, "JPEG", restart_marker_blocks=3),
        "jpeg cmyk": encode(image.convert("CMYK"), "JPEG"),
        "jpeg rgb": encode(image, "JPEG", keep_rgb=True),
        "jpeg with extras": encode(image, "JPEG", comment=b"a comment", **extras),
        "jpeg of two images": encode(frames[0], "MPO", save_all=True, append_images=frames[1:]),
        "webp": encode(image, "WEBP"),
        "webp lossless": encode(image, "WEBP", lossless=True),
        "webp with alpha": encode(alpha, "WEBP"),
        "webp lossless with alpha": encode(alpha, "WEBP", lossless=True),
        "webp with extras": encode(image, "WEBP", **extras),
        "webp lossless with extras": encode(image, "WEBP", lossless=True, **extras),
        "webp animated": encode(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
        "gif": encode(palette, "GIF"),
        "gif gray": encode(gray, "GIF"),
        "gif with a transparent color": encode(palette, "GIF", transparency=9),
        "gif interlaced": encode(palette, "GIF", interlace=1),
        "gif with a comment": encode(palette, "GIF", comment=b"a comment " * 100),
        "gif animated": encode(frames[0], "GIF", save_all=True, append_images=frames[1:], disposal=2, loop=0),
    }
