"""Random cases by the hundred, by hand: the command line and the loop of `tests.llm.clients.beam_oracle` and
`tests.llm.quantization_sweep`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import torch


def main(description: str, check_case: Callable[[int], str | None], num_cases: int) -> NoReturn:
    """Prints what `check_case(seed)` says is wrong (None: nothing) for each of `num_cases` seeds, or of as many as the
    command line asks for; leaves with 1 if anything was."""
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
