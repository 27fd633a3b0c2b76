"""A kani chat about images and sound, of a model that takes them.

    python examples/pace_llm_kani_media.py --model Qwen/Qwen3-VL-2B-Instruct cat.png "What is this?"
    python examples/pace_llm_kani_media.py --model Qwen/Qwen3-Omni-30B-A3B-Instruct cat.png dog.wav "Who barks?"

Needs kani with its parts for media: pip install "pace-llm[kani-multimodal]". Sound other than WAV also needs ffmpeg.
"""

import argparse
import asyncio
from pathlib import Path

from kani import Kani
from kani.ext.multimodal_core import AudioPart, ImagePart

from pace.integrations.kani import PaceEngine

SOUNDS = (".wav", ".mp3", ".flac")


def part_of(path: Path) -> ImagePart | AudioPart:
    return AudioPart.from_file(path) if path.suffix.lower() in SOUNDS else ImagePart.from_file(path)


async def main() -> None:
    parser = argparse.ArgumentParser(description="Chat by kani about images and sound.")
    parser.add_argument("file", nargs="+", type=Path, help="images and clips of sound")
    parser.add_argument("question")
    parser.add_argument("--model", required=True, help="a directory or a Hub id")
    parser.add_argument("--max-tokens", type=int, default=200)
    args = parser.parse_args()

    engine = PaceEngine(args.model, max_tokens=args.max_tokens)
    ai = Kani(engine)
    question = [*map(part_of, args.file), args.question]
    async for piece in ai.chat_round_stream(question):
        print(piece, end="", flush=True)
    print()
    usage = ai.chat_history[-1].extra["pace"]
    print(f"[{usage['prompt_tokens']} tokens of prompt, images and sound included]")

    answer = await ai.chat_round("Are you sure?")  # the images are still in the conversation
    print(answer.text)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
