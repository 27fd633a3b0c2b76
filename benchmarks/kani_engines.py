"""kani's own engine for transformers and `PaceEngine`, with the same weights: what happens to the event loop, to answers
that are cancelled, and to several chats at once.

    python benchmarks/kani_engines.py [MODEL] [--into docs/kani.md]

Both compute in float32 on one thread: more do not help a model as small as the bundled one. Needs kani: pip install "pace-llm[kani]".
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import statistics
import sys
import time
import warnings
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from kani import ChatMessage
from kani.engines import BaseEngine

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from pace.assets import TINY  # noqa: E402
from pace.integrations.kani import PaceEngine  # noqa: E402

SCRIPT = "benchmarks/kani_engines.py"
STORIES = [[ChatMessage.user(f"Tell me a story about a {animal}.")] for animal in ("dog", "cat", "bear", "fox")]
SECONDS_TO_CANCEL = 0.2
"""After the beginning of an answer."""


class Timer:
    """A task that wants a turn each millisecond, while another runs."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def watch(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            self.longest = max(self.longest, time.perf_counter() - began - 0.001)


async def streamed(engine: BaseEngine, messages: list[ChatMessage], options: dict) -> int:
    """The tokens of an answer, as its completion counts them."""
    items = [item async for item in engine.stream(messages, **options)]
    return items[-1].completion_tokens


async def predicted(engine: BaseEngine, messages: list[ChatMessage], options: dict) -> int:
    return (await engine.predict(messages, **options)).completion_tokens


async def watched(work: Callable[[], Awaitable]) -> tuple[float, float]:
    """Seconds that the work takes, and the longest that the loop stands still meanwhile."""
    gc.collect()
    timer = Timer()
    watcher = asyncio.create_task(timer.watch())
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    await work()
    seconds = time.perf_counter() - began
    await asyncio.sleep(0.005)  # the watcher hears of a stop when it is over
    watcher.cancel()
    return seconds, timer.longest


async def cancelled(engine: BaseEngine, options: dict) -> float:
    """Seconds from asking an answer to end until it has."""
    task = asyncio.create_task(engine.predict(STORIES[0], **options))
    began = time.perf_counter() + SECONDS_TO_CANCEL  # when it is due, whether or not the loop has a turn then
    await asyncio.sleep(SECONDS_TO_CANCEL)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    return time.perf_counter() - began


async def measure(engine: BaseEngine, num_tokens: int, rounds: int) -> dict[str, float]:
    """Medians over the rounds; of the loop the worst."""
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    await predicted(engine, STORIES[0], options)
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    for _ in range(rounds):
        for name, ask in (("predict", predicted), ("stream", streamed)):
            seconds, stall = await watched(lambda: ask(engine, STORIES[0], options))
            note(f"{name}: longest stop of the event loop, ms", 1e3 * stall)
            note(f"{name}: tokens/s", num_tokens / seconds)
        seconds, stall = await watched(lambda: asyncio.gather(*[predicted(engine, one, options) for one in STORIES]))
        note("four chats at once: longest stop of the event loop, ms", 1e3 * stall)
        note("four chats at once: tokens/s", len(STORIES) * num_tokens / seconds)
        note("cancelled: returns after, ms", 1e3 * await cancelled(engine, options))
        note(f"stream: usage of {num_tokens} tokens", await streamed(engine, STORIES[0], options))
    worst = {name: max(values) for name, values in found.items() if "stop" in name}
    return {name: statistics.median(values) for name, values in found.items()} | worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY), help="default: the bundled model")
    parser.add_argument("--generate", type=int, default=400, metavar="N", help="tokens of an answer (default: 400)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    from kani.engines.huggingface import HuggingEngine

    makers: dict[str, Callable[[], BaseEngine]] = {
        "HuggingEngine": lambda: HuggingEngine(
            options.model, device="cpu", model_load_kwargs={"torch_dtype": torch.float32}
        ),
        "PaceEngine": lambda: PaceEngine(
            options.model, model_load_kwargs={"torch_dtype": torch.float32, "num_threads": 1, "progress": False}
        ),
    }
    measured = {name: asyncio.run(measure(make(), options.generate, options.rounds)) for name, make in makers.items()}
    page.publish(options.into, SCRIPT, table(measured, options))
    return 0


def table(measured: dict[str, dict[str, float]], options: argparse.Namespace) -> str:
    lines = [
        f"`{page.command(SCRIPT)}`: answers of {options.generate} tokens of {Path(options.model).name}, "
        f"{options.rounds} rounds.\n",
        f"| | {' | '.join(f'`{name}`' for name in measured)} |",
        "|---|" + "---:|" * len(measured),
    ]
    for name in next(iter(measured.values())):
        values = [engine[name] for engine in measured.values()]
        lines.append(
            f"| {name} | {' | '.join(f'{value:,.1f}' if value < 100 else f'{value:,.0f}' for value in values)} |"
        )
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
