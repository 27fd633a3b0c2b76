"""Command line and loop for hundreds of random cases, run by hand: `tests.llm.clients.beam_oracle` and
`tests.llm.quantization_sweep` use it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import torch


def main(description: str, check_case: Callable[[int], str | None], num_cases: int) -> NoReturn:
    """Runs `check_case(seed)`, which returns an error message or None, for each seed and prints the messages.

    The number of seeds is `num_cases`, or `--cases` of the command line. Exits with 1 if any case is wrong."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cases", type=int, default=num_cases)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    num_wrong = 0
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.cases):
        wrong = check_case(seed)
        if wrong:
            num_wrong += 1
            print(f"case {seed}: {wrong}", flush=True)
    print(f"{arguments.cases} cases from {arguments.first_seed} on, {num_wrong} wrong")
    sys.exit(num_wrong > 0)
