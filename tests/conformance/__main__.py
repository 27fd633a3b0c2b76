"""`make conformance`: other projects' test suites, against `pace serve`, or in guidance and kani, on the bundled model.

    python -m tests.conformance                     all suites
    python -m tests.conformance langchain kani      some of them

Their rows are written to the table of docs/serving.md.

Each suite has a separate environment, made with pip or npm at its first run. It is in a cache outside the tree:
PACE_CONFORMANCE_CACHE, or ~/.cache/pace-conformance. `waivers.toml` has the tests that may fail, with reasons. The exit
code is 1 if any other test fails, or a suite is unavailable.
"""

from __future__ import annotations

import argparse

from tests.conformance.environments import CACHE, Unavailable
from tests.conformance.report import Report, read_waivers, write_rows
from tests.conformance.suites import SUITES, Suite


def main() -> int:
    arguments = _arguments()
    waivers = read_waivers()
    reports = []
    for name in arguments.suites or SUITES:
        reports.append(_run(SUITES[name], waivers.get(name, [])))
        print(reports[-1].details(), reports[-1].row(), sep="\n", flush=True)
        write_rows(reports[-1:], [suite.title for suite in SUITES.values()])
    return 0 if all(report.is_well for report in reports) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance", description=__doc__.partition("\n")[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"of {', '.join(SUITES)}; all where none is named")
    arguments = parser.parse_args()
    if unknown := set(arguments.suites) - SUITES.keys():
        parser.error(f"there is no suite {', '.join(sorted(unknown))}; there are {', '.join(SUITES)}")
    return arguments


def _run(suite: Suite, waivers: list) -> Report:
    print(f"-- {suite.name}", flush=True)
    folder = CACHE / suite.name
    folder.mkdir(parents=True, exist_ok=True)
    results = folder / "results.xml"
    results.unlink(missing_ok=True)
    try:
        suite.run(folder, results)
    except Unavailable as error:
        return Report(suite.name, suite.title, {}, waivers, str(error), error.log)
    return Report.of(suite.name, suite.title, results, waivers)


if __name__ == "__main__":
    raise SystemExit(main())
