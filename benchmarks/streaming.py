"""What it costs to hand tokens over as they come: `stream`, `events` and a streamer, beside `generate`, which hands over
the end alone.

    python benchmarks/streaming.py [MODEL] [--into benchmarks/RESULTS.md]

All ways take turns, run by run, on the same prompt with the same tokens. The hand-over of a way is what its tokens take
longer than those of `generate`; its delay lies between the moment when the engine has a token and the one when the
caller has it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import page  # noqa: E402
from pace.assets import TINY  # noqa: E402
from pace.llm import CallbackStreamer, LLMModel, SamplingConfig  # noqa: E402
from pace.llm.clients.requests import Record  # noqa: E402

SCRIPT = "benchmarks/streaming.py"
PROMPT = "Once upon a time"


class Ways:
    """The ways to generate the same tokens. `delays` are the seconds that the tokens of the last `events` took."""

    def __init__(self, model: LLMModel, config: SamplingConfig) -> None:
        self.model, self.config = model, config
        self.delays: list[float] = []

    def generate(self) -> None:
        self.model.generate(PROMPT, self.config)

    def streamer(self) -> None:
        self.model.generate(PROMPT, self.config, CallbackStreamer(lambda event: None))

    def stream(self) -> None:
        for _ in self.model.stream(PROMPT, self.config):
            pass

    def events(self) -> None:
        with _moments() as made:
            got = []
            for _ in self.model.add_request(PROMPT, self.config).events():
                got.append(time.perf_counter())
        self.delays = [after - before for before, after in zip(made, got)]


@contextmanager
def _moments() -> Iterator[list[float]]:
    """When the engine's thread noted each token."""
    moments, note = [], Record.token

    def token(record: Record, *event: object) -> None:
        moments.append(time.perf_counter())
        note(record, *event)

    Record.token = token
    try:
        yield moments
    finally:
        Record.token = note


def seconds_of(way: Callable[[], None]) -> float:
    begin = time.perf_counter()
    way()
    return time.perf_counter() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(TINY), help="default: the bundled model")
    parser.add_argument("--generate", type=int, default=400, metavar="N", help="tokens of a run (default: 400)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="medians are over so many (default: 15)")
    page.add_into_argument(parser)
    options = parser.parse_args()
    page.check_page(options.into, SCRIPT)

    config = SamplingConfig(max_new_tokens=options.generate, ignore_eos=True)
    ways = Ways(LLMModel(options.model), config)
    runs: dict[str, list[float]] = {name: [] for name in ("generate", "streamer", "stream", "events")}
    for name in runs:
        getattr(ways, name)()
    for _ in range(options.rounds):
        for name, seconds in runs.items():
            seconds.append(seconds_of(getattr(ways, name)))
    page.publish(options.into, SCRIPT, table(runs, ways.delays, options))
    return 0


def table(runs: dict[str, list[float]], delays: list[float], options: argparse.Namespace) -> str:
    lines = [
        f"`{page.command(SCRIPT)}`: {options.generate} tokens of {Path(options.model).name}, {options.rounds} rounds. "
        f"The delay of an event is {1e6 * statistics.median(delays):,.0f} us in the median, "
        f"{1e6 * sorted(delays)[int(0.99 * len(delays))]:,.0f} us at the 99th percentile.\n",
        "| way | tokens/s | of `generate` | hand-over, us a token |",
        "|---|---:|---:|---:|",
    ]
    for name, seconds in runs.items():
        ratio = statistics.median(least / own for least, own in zip(runs["generate"], seconds))
        more = statistics.median(own - least for least, own in zip(runs["generate"], seconds)) / options.generate
        rate = options.generate / statistics.median(seconds)
        lines.append(f"| `{name}` | {rate:,.0f} | {ratio:.2f} | {1e6 * more:.1f} |")
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    sys.exit(main())
