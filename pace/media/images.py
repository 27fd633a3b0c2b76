"""Images from bytes, paths, PIL images and arrays, as RGB pixels or as a size without decoding.

Only this module and `patches` import Pillow, on first use. Bytes and paths are turned as their EXIF orientation says,
and PIL images are not, as transformers does."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pace.checkpoints.files import read_whole
from pace.media.containers import ImageHeader, check_size, read_header
from pace.media.media import MediaError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ENCODED_BYTES = 20 << 20
KINDS = "bytes, a path, a PIL image or a uint8 array [height, width, 3]"


def image_size(source: Any) -> tuple[int, int]:
    """Height and width in pixels, upright. Decodes nothing. Raises what `load_rgb` raises for headers and kinds."""
    opened = open_source(source)
    if isinstance(opened, ImageHeader):
        return opened.upright_size
    return opened.shape[:2] if isinstance(opened, np.ndarray) else (opened.height, opened.width)


def load_rgb(source: Any) -> Image:
    """Returns an image in mode RGB, upright, with transparency composited on white. Do not modify the result: it may
    be the caller's own object.

    Raises MediaError for an image that is damaged, incomplete or beyond the limits, and for a URL. Raises TypeError for
    another kind of object, ImportError without Pillow, and FileNotFoundError or PermissionError for a path."""
    opened = open_source(source)
    module = pillow()
    if isinstance(opened, np.ndarray):
        return module.fromarray(np.ascontiguousarray(opened))
    try:
        return to_rgb(decode(opened) if isinstance(opened, ImageHeader) else opened)
    except MediaError:
        raise
    except Exception:  # Pillow's errors have many types, and their messages may quote the data
        reason = (
            f"its {opened.format} data is damaged or incomplete"
            if isinstance(opened, ImageHeader)
            else f"either mode {opened.mode} has no RGB form, or its file is damaged, incomplete or closed"
        )
        raise MediaError(f"the image cannot be decoded: {reason}") from None


def open_source(source: Any) -> ImageHeader | Image | np.ndarray:
    """Header of an encoded image, or the PIL image or array itself, within the limits. `image_size` and `load_rgb` take
    the result as a source."""
    if isinstance(source, ImageHeader):
        return source
    if isinstance(source, (str, os.PathLike)):
        return read_header(read_path(source))
    if isinstance(source, (bytes, bytearray, memoryview)):
        if len(source) > MAX_ENCODED_BYTES:
            raise MediaError(f"the image file is too large: {len(source):,} bytes; allowed are {MAX_ENCODED_BYTES:,}")
        return read_header(bytes(source))
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            shape = ", ".join(map(str, source.shape))
            raise MediaError(f"an image array is uint8 [height, width, 3]; got {source.dtype} [{shape}]")
        check_size(*source.shape[:2])
        return source
    module = sys.modules.get("PIL.Image")
    if module is not None and isinstance(source, module.Image):
        check_size(source.height, source.width)
        return source
    raise TypeError(f"an image is {KINDS}; got {type(source).__name__}")


def read_path(path: str | os.PathLike) -> bytes:
    name = os.fspath(path)
    if isinstance(name, str) and name.startswith(("http:", "https:", "data:", "file:")):
        raise MediaError("an image given as a string is the path of a file, not a URL; read it and give its bytes")
    try:
        return read_whole(Path(os.fsdecode(name)), MAX_ENCODED_BYTES)
    except ValueError as error:
        raise MediaError(str(error)) from None


def decode(header: ImageHeader) -> Image:
    """Decodes the first frame and turns it upright. Raises any error of Pillow."""
    module = pillow()
    image = module.open(io.BytesIO(header.data), formats=[header.format])
    if image.size != (header.width, header.height):
        raise MediaError(f"the {header.format} image contradicts itself about its size; the file is damaged")
    image.load()
    turn = module.Transpose
    turns = [None, turn.FLIP_LEFT_RIGHT, turn.ROTATE_180, turn.FLIP_TOP_BOTTOM]
    turns += [turn.TRANSPOSE, turn.ROTATE_270, turn.TRANSVERSE, turn.ROTATE_90]
    method = turns[header.orientation - 1]
    return image if method is None else image.transpose(method)


def to_rgb(image: Image) -> Image:
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        module = pillow()
        image = module.alpha_composite(module.new("RGBA", image.size, "white"), image)
    image.load()
    return image if image.mode == "RGB" else image.convert("RGB")


def pillow() -> Any:
    """The module PIL.Image. Raises ImportError that names the extra if it is not installed."""
    try:
        import PIL.Image
    except ImportError:
        raise ImportError('images need Pillow: pip install "pace-llm[vision]"') from None
    return PIL.Image
