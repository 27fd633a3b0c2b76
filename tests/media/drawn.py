"""Pictures that a script draws and clips that a synthesiser speaks, as users send them: for tests of every entry."""

from __future__ import annotations

import math
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from tests.media.samples import ORIENTATION, encode
from tests.media.wavs import speech, wav

TYPES = {"png": "image/png", "jpg": "image/jpeg", "webp": "image/webp", "gif": "image/gif"}
WORDS = "One, two, three. The fox runs over the hill."


def media_type(name: str) -> str:
    return TYPES[name.rpartition(".")[2]]


@cache
def pictures() -> dict[str, bytes]:
    """Name -> file: shapes, a text, a chart and others, in several modes, formats and orientations."""
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    return {
        "shapes.png": encode(_shapes(), "PNG"),
        "text.png": encode(_text("17 + 25 = 42"), "PNG"),
        "chart.gif": encode(_chart([3, 7, 5, 9]), "GIF", save_all=True, append_images=[_chart([9, 1, 1, 1])]),
        "photo.jpg": encode(_landscape(), "JPEG", exif=turned, quality=90),
        "print.jpg": encode(_shapes().crop((0, 0, 48, 40)).convert("CMYK"), "JPEG", quality=90),
        "star.webp": encode(_star(), "WEBP", lossless=True),
        "depth.png": encode(_depth(), "PNG"),
        "icon.png": encode(_star().resize((24, 24)).quantize(8), "PNG"),
    }


def _shapes() -> Image.Image:
    """A red disc, a blue box and a green triangle."""
    image = Image.new("RGB", (72, 48), "white")
    pen = ImageDraw.Draw(image)
    pen.ellipse((4, 6, 30, 32), fill=(220, 20, 30))
    pen.rectangle((36, 10, 66, 26), fill=(20, 60, 200))
    pen.polygon([(20, 46), (34, 22), (48, 46)], fill=(20, 160, 60))
    return image


def _text(words: str) -> Image.Image:
    """Black letters on white, one bit a pixel."""
    image = Image.new("1", (96, 16), 1)
    ImageDraw.Draw(image).text((6, 2), words, fill=0)
    return image


def _chart(values: list[int]) -> Image.Image:
    """Bars between two axes, in a palette."""
    image = Image.new("P", (64, 48), 0)
    image.putpalette([255, 255, 255, 0, 0, 0, 240, 140, 0])
    pen = ImageDraw.Draw(image)
    pen.line((6, 2, 6, 44, 62, 44), fill=1)
    for index, value in enumerate(values):
        pen.rectangle((10 + 13 * index, 44 - 4 * value, 18 + 13 * index, 43), fill=2)
    return image


def _landscape() -> Image.Image:
    """A sky that gets lighter, a hill and a sun."""
    rows = np.linspace(0, 1, 56)[:, None, None] * np.ones((1, 40, 1))
    image = Image.fromarray((np.array([80, 140, 220]) + rows * np.array([120, 80, 20])).astype(np.uint8))
    pen = ImageDraw.Draw(image)
    pen.ellipse((-20, 34, 50, 90), fill=(60, 110, 40))
    pen.ellipse((26, 4, 36, 14), fill=(250, 220, 60))
    return image


def _star() -> Image.Image:
    """A yellow star that is half transparent, on nothing."""
    corners = [(24 + size * math.sin(at * math.pi / 5), 24 - size * math.cos(at * math.pi / 5))
               for at, size in enumerate([22, 9] * 5)]  # fmt: skip
    image = Image.new("RGBA", (48, 48), (0, 0, 0, 0))
    ImageDraw.Draw(image).polygon(corners, fill=(240, 200, 0, 160))
    return image


def _depth() -> Image.Image:
    """A ramp in 16 bits."""
    return Image.fromarray(np.add.outer(np.arange(32), np.arange(40) * 6).astype(np.uint16))


def glide() -> bytes:
    """A WAV file of 1.3 s at 16 kHz that sounds a little like speech."""
    return wav((speech(1.3) * 2**15).astype("<i2"))


@cache
def spoken() -> bytes:
    """A WAV file of 22,050 Hz in which espeak-ng says WORDS. Skips the test where it is not installed."""
    program = shutil.which("espeak-ng")
    if program is None:
        pytest.skip("no espeak-ng here: apt-get install espeak-ng")
    return subprocess.run([program, "--stdout", WORDS], capture_output=True, check=True, timeout=30).stdout


clips = pytest.mark.parametrize("clip", [glide, pytest.param(spoken, marks=pytest.mark.thorough)])
"""For a test that takes `clip`: a generated clip in each run, and a spoken one in `make test-all`."""


def write_all(folder: Path, clip: bytes) -> tuple[list[Path], Path]:
    """Writes the pictures and a clip. Returns their paths."""
    for name, data in {**pictures(), "clip.wav": clip}.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in pictures()], folder / "clip.wav"
