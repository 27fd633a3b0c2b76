from __future__ import annotations

import argparse
import random

from tests.llm.engine.stress import WORLDS, run


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Random stress of the engine; ends with an error for any wrong token or leaked block."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="for all worlds together")
    parser.add_argument("--world", choices=WORLDS, help="default: all, one after the other")
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    names = [arguments.world] if arguments.world else list(WORLDS)
    for name in names:
        world = run(name, arguments.seconds / len(names), arguments.seed)
        counts = ", ".join(f"{count} {what}" for what, count in (world.happened + world.num_done).most_common())
        print(f"{name}: {world.num_tokens} tokens as alone; {counts} (seed {arguments.seed})", flush=True)


if __name__ == "__main__":
    main()
