"""Plants bugs one at a time, and reports the bugs that the tests catch.

    python -m tests.planted --seed 1 --count 60            in this checkout

    python -m tests.planted --tree ../other --near-only    in another one, with the nearest tests only

    python -m tests.planted --only llm/cache               all bugs of a room, or one: --only llm/cache/3

The bugs are in bugs.txt. Each goes into a copy of the tree, where its nearest tests run first, then all others. A bug
is caught if a test fails that passes without the bug, or a run hangs that ends without it. The same list, seed and
count give the same bugs.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.planted.bugs import Bug, draw, read_bugs
from tests.planted.copies import Copy, DoesNotBuild

ROOT = Path(__file__).parents[2]
MAX_CHECKED = 10
"""Failed tests that are run again without the bug."""


def main() -> int:
    arguments = _arguments()
    bugs = read_bugs()
    if arguments.only:
        bugs = [bug for bug in bugs if arguments.only in (bug.room, bug.id)]
    chosen = draw(bugs, arguments.seed, len(bugs) if arguments.only else arguments.count)
    for bug in [bug for bug in chosen if bug.is_stale(arguments.tree)]:
        print(f"stale: {bug.id}: {bug.file} does not have the text of this bug exactly once")
        chosen.remove(bug)
    if arguments.list:
        print("\n".join(f"{bug.id:<28}{bug.kind:<13}{bug.file}: {bug.why}" for bug in chosen))
        return 0
    results = arguments.out.read_text().splitlines() if arguments.out and arguments.out.exists() else []
    results = [json.loads(line) for line in results]
    done = {result["id"] for result in results}
    chosen = [bug for bug in chosen if bug.id not in done]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Copy(arguments.tree, Path(folder).resolve() / "tree", shlex.split(arguments.pytest))
        if not arguments.near_only or any(bug.is_native for bug in chosen):
            print("The copy is being built, so that no bug pays for that.", flush=True)
            copy.build(arguments.build_seconds, "_C" if arguments.near_only else "all")
        for number, bug in enumerate(chosen, 1):
            result = try_bug(copy, bug, arguments)
            results.append(result)
            shown = ", ".join(filter(None, (result["stage"], result["by"], result["note"])))
            verdict = "caught" if result["caught"] else "MISSED"
            print(f"[{number}/{len(chosen)}] {bug.id:<28}{verdict} {result['seconds']:6.0f} s  {shown}", flush=True)
            if arguments.out:
                with open(arguments.out, "a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
    print(table(results))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw (default: 0)")
    parser.add_argument("--count", type=int, default=60, metavar="N", help="bugs to draw (default: 60)")
    parser.add_argument("--tree", type=Path, default=ROOT, metavar="PATH", help="checkout (default: this one)")
    parser.add_argument("--pytest", default="", metavar="ARGS", help="further arguments of pytest, in one string")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="JSON lines, one for each bug; those that are there stay"
    )
    parser.add_argument("--only", metavar="ROOM[/NUMBER]", help="all bugs of a room, or one of them")
    parser.add_argument("--list", action="store_true", help="print the drawn bugs, and run nothing")
    parser.add_argument("--near-only", action="store_true", help="leave out the whole suite")
    for name, default in (("near", 1200), ("whole", 7200), ("build", 3600)):
        help_text = f"limit of a {name} run (default: {default})"
        parser.add_argument(f"--{name}-seconds", type=float, default=default, metavar="X", help=help_text)
    arguments = parser.parse_args()
    arguments.tree = arguments.tree.resolve()
    return arguments


def try_bug(copy: Copy, bug: Bug, arguments: argparse.Namespace) -> dict[str, Any]:
    """Plants the bug, runs the tests, and takes the bug out again. Returns a line of the results."""
    start = time.monotonic()
    result = {"id": bug.id, "room": bug.room, "kind": bug.kind, "caught": False}
    result |= {"by": None, "stage": None, "seconds": 0.0, "note": "no test was run"}
    near = [test for test in bug.tests if (copy.folder / test).exists()]
    stages = [("near", near, [], arguments.near_seconds)] if near else []
    if not arguments.near_only:
        stages.append(("whole", [], near, arguments.whole_seconds))
    try:
        for stage, tests, without, seconds in stages:
            result |= {"stage": stage} | run_stage(copy, bug, tests, without, seconds, arguments.build_seconds)
            if result["caught"]:
                break
    except DoesNotBuild as error:
        result["note"] = f"does not build: {error}"
    finally:
        copy.restore(bug)
    result["seconds"] = round(time.monotonic() - start, 1)
    return result


def run_stage(
    copy: Copy, bug: Bug, tests: Sequence[str], without: Sequence[str], seconds: float, build_seconds: float
) -> dict[str, Any]:
    """Runs tests with the bug, and runs those that fail again without it. Tests that fail both ways are left out from
    then on, and the stage begins again."""
    while True:
        if tests and not (tests := [test for test in tests if test not in copy.known]):
            return {"caught": False, "note": "the nearest tests fail without the bug, too"}
        copy.plant(bug, build_seconds)
        outcome = copy.pytest(tests, without, seconds)
        if outcome.status in (0, 5):  # passed, or nothing was selected
            return {"caught": False, "note": "all tests pass"}
        failed = outcome.failed[:MAX_CHECKED]
        copy.restore(bug)
        clean = copy.pytest(failed or tests, [] if failed else without, seconds, stops=False)
        if clean.status is None:
            return {"caught": False, "note": "the run takes too long without the bug, too"}
        if outcome.status is None:
            return {"caught": True, "note": "the run hangs"}
        if not failed:
            return {"caught": clean.status == 0, "note": f"pytest ends with {outcome.status}: {outcome.output[-300:]}"}
        caught = [test for test in failed if test not in clean.failed]
        if caught:
            return {"caught": True, "by": caught[0], "note": "" if "::" in caught[0] else "error of collection"}
        copy.known.update(failed)


def table(results: Sequence[dict[str, Any]]) -> str:
    """Counts by room and by kind; then the bugs that were missed or caught in an unusual way."""
    lines = []
    for name in ("room", "kind"):
        lines.append(f"\n{name:<28}{'bugs':>6}{'near':>6}{'whole':>6}{'missed':>8}")
        for value in [*sorted({result[name] for result in results}), "all"]:
            here = [result for result in results if value in ("all", result[name])]
            stages = [sum(r["caught"] and r["stage"] == stage for r in here) for stage in ("near", "whole")]
            lines.append(f"{value:<28}{len(here):>6}{stages[0]:>6}{stages[1]:>6}{len(here) - sum(stages):>8}")
    for result in results:
        if result["note"]:
            lines.append(f"{'caught' if result['caught'] else 'missed'}: {result['id']}: {result['note']}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
