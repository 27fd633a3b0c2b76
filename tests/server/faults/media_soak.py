"""The soak with images, sound and text, for a tiny random Qwen3-Omni.

    python -m tests.server.faults.media_soak --seconds 1800 [--honest 64] [--faulty 16] [--seed 1]

Clients also leave in the middle of an upload and of an encoding, and send damaged media.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from pace.llm.generator import Generator
from pace.llm.loading import load
from pace.llm.loading.options import LoadOptions
from pace.server.service import joined_salt
from tests.llm.processors.chatting import save_omni_chatting
from tests.media.drawn import glide, media_type, pictures
from tests.server.faults.soak import FAULTS, Soak, main, soak
from tests.server.schemas.test_media import data_url, image_url, input_audio, text


class MediaSoak(Soak):
    """Images, sound and text. Requests of the same cache salt share rows, and the cache of rows is small. So media are
    encoded again and again."""

    def make_questions(self) -> list[Any]:
        images = {name: image_url(data_url(data, media_type(name))) for name, data in pictures().items()}
        shapes, chart, photo, star = (images[name] for name in ("shapes.png", "chart.gif", "photo.jpg", "star.webp"))
        clip, words = input_audio(glide()), text("w3 w4")
        padded = image_url(data_url(pictures()["text.png"] + bytes(4 << 20)))
        self.large = image_url(data_url(large_photo(), "image/jpeg"))
        return [
            "w1 w2 w3", "w9 w8", [shapes, words], [words, chart, photo, text("w7")], [clip, text("w5")],
            [text("w6"), clip, star, words], [*images.values(), clip, words], [self.large, words], [padded, words],
        ]  # fmt: skip

    @property
    def faults(self) -> tuple[Callable[[Any], Awaitable[None]], ...]:
        return FAULTS + MEDIA_FAULTS

    def body(self, content: Any, **fields: Any) -> bytes:
        return super().body(content, **{"cache_salt": f"salt {self.random.randrange(12)}"} | fields)

    def check_idle(self) -> None:
        """An encoding does not outlive its client, and rows take what `MediaEncoder` says: its cache, and those of one
        sequence."""
        asyncio.run(self.leave_in_an_encoding())
        super().check_idle()
        engine = self.serving.generator.engine
        width = max(rows.shape[1] for rows in engine.media._rows.values())
        assert engine.media._encoding is None
        assert engine.media.num_bytes <= engine.media.cache_bytes + 4 * width * engine.max_length
        self.counts["encoded"] = engine.media.num_encoded

    # -- what goes wrong -----------------------------------------------------------------------------------------------

    async def leave_in_an_upload(self) -> None:
        data = self.body(self.questions[-1])
        _, writer = await self._open(b"")
        for start in range(0, self.random.randrange(len(data)), 1 << 18):
            writer.write(data[start : start + (1 << 18)])
            await writer.drain()
        writer.transport.abort() if self.random.random() < 0.5 else writer.close()

    async def leave_in_an_encoding(self) -> None:
        """The cache salt shows that the encoding under way is this client's."""
        salt, media = f"left {self.random.random()}", self.serving.generator.engine.media
        of_engine = joined_salt(None, salt)
        _, writer = await self._open(self.body([self.large, text("w2")], cache_salt=salt, stream=True))
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            encoding = media._encoding
            if encoding is not None and encoding[0][0] == of_engine:
                self.counts["left in its encoding"] += 1
                break
            await asyncio.sleep(0.002)
        writer.transport.abort() if self.random.random() < 0.5 else writer.close()

    async def send_broken_media(self) -> None:
        shapes, clip = pictures()["shapes.png"], glide()
        wide = shapes[:16] + (60_000).to_bytes(4, "big") * 2 + shapes[24:]
        broken = [image_url(data_url(data)) for data in (shapes[:200], wide, b"", clip)]
        broken += [input_audio(clip[:60]), image_url("data:image/png;base64,????")]
        status, _ = await self._ask(self.body([self.random.choice(broken), text("w1")]))
        assert status in (400, 429), status


MEDIA_FAULTS = (
    MediaSoak.leave_in_an_upload, MediaSoak.leave_in_an_encoding, MediaSoak.leave_in_an_encoding,
    MediaSoak.send_broken_media,
)  # fmt: skip


def large_photo() -> bytes:
    """A photo of 1.9 million pixels."""
    with io.BytesIO(pictures()["photo.jpg"]) as small, io.BytesIO() as file:
        Image.open(small).resize((1600, 1200)).save(file, "JPEG", quality=95)
        return file.getvalue()


def make_omni() -> Generator:
    """An engine of a tiny random Qwen3-Omni. Its tower is as deep as real ones, so that encoding takes a while. The
    cache of rows has room for a third of the media."""
    with TemporaryDirectory() as folder:
        save_omni_chatting(
            Path(folder), {"depth": 24, "hidden_size": 64, "intermediate_size": 128}, max_pixels=256 * 64
        )
        sizes = {"kv_cache_bytes": "16MiB", "media_cache_bytes": 300_000}
        loaded = load.open_model(LoadOptions(folder, dtype="float32", progress=False, **sizes))
    return Generator(loaded.engine, loaded.tokenizer, loaded.defaults, encoder=loaded.encoder)


def media_soak(seconds: float, num_honest: int, num_faulty: int, seed: int, **least: int) -> dict[str, Any]:
    """Runs the soak with images and sound; see `soak`."""
    return soak(seconds, num_honest, num_faulty, seed, MediaSoak, make_omni, least)


if __name__ == "__main__":
    main(media_soak)
