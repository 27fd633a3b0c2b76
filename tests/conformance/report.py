"""Turns a suite's results (JUnit's XML) and its waivers into a row of the table in docs/serving.md."""

from __future__ import annotations

import re
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "serving.md"
BEGIN, END = "<!-- conformance: begin -->", "<!-- conformance: end -->"


@dataclass(frozen=True)
class Waiver:
    """Tests that may fail. In a name, `*` matches any text."""

    tests: tuple[str, ...]
    reason: str


def read_waivers() -> dict[str, list[Waiver]]:
    """The waivers of each suite."""
    suites = tomllib.loads((HERE / "waivers.toml").read_text())
    return {name: [Waiver(tuple(entry["tests"]), entry["reason"]) for entry in own] for name, own in suites.items()}


@dataclass
class Report:
    """Results of a suite. `outcomes` has "" for each test that passed, else the reason of the failure. Tests that the
    suite itself skips are left out."""

    name: str
    title: str
    outcomes: dict[str, str]
    waivers: list[Waiver]
    failure: str = ""
    """The reason why the suite could not be run, in words for a page."""
    log: str = ""
    """Output of the failed command."""

    @classmethod
    def of(cls, name: str, title: str, results: Path, waivers: list[Waiver]) -> Report:
        if not results.exists():
            return cls(name, title, {}, waivers, "the suite left no results")
        outcomes = read_results(results)
        return cls(name, title, outcomes, waivers, "" if outcomes else "the suite ran no test")

    @property
    def passed(self) -> list[str]:
        return [test for test, why in self.outcomes.items() if not why]

    @property
    def waived(self) -> dict[str, Waiver]:
        """Failed tests with a waiver -> the waiver."""
        found = {test: self._waiver(test) for test, why in self.outcomes.items() if why}
        return {test: waiver for test, waiver in found.items() if waiver is not None}

    @property
    def failed(self) -> list[str]:
        return [test for test, why in self.outcomes.items() if why and self._waiver(test) is None]

    @property
    def needless(self) -> list[str]:
        """Names in waivers that match no failed test, if the suite was run."""
        names = [name for waiver in self.waivers for name in waiver.tests]
        return [
            name
            for name in names
            if self.outcomes and not any(why and _matches(name, test) for test, why in self.outcomes.items())
        ]

    @property
    def is_well(self) -> bool:
        return not self.failure and not self.failed

    def row(self) -> str:
        if self.failure:
            return f"| {self.title} | not run | | | {self.failure} |"
        reasons = {waiver.reason: 0 for waiver in self.waivers if waiver in self.waived.values()}
        for waiver in self.waived.values():
            reasons[waiver.reason] += 1
        why = "; ".join(f"{reason} ({number})" for reason, number in reasons.items())
        return f"| {self.title} | {len(self.passed)} | {len(self.waived)} | {len(self.failed)} | {why} |"

    def details(self) -> str:
        lines = [f"{self.name}: {self.failure}\n{self.log}"] if self.failure else []
        lines += [f"{self.name}: {test} failed:\n{self.outcomes[test]}" for test in self.failed]
        lines += [f"{self.name}: the waiver of {name} is no longer needed" for name in self.needless]
        return "\n".join(lines)

    def _waiver(self, test: str) -> Waiver | None:
        return next((one for one in self.waivers if any(_matches(name, test) for name in one.tests)), None)


def read_results(results: Path) -> dict[str, str]:
    """`module::name` of each test that ran -> the failure, or "" if it passed."""
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(results).iter("testcase"):
        if case.find("skipped") is not None and (case.find("skipped").get("type") or "") != "pytest.xfail":
            continue
        wrong = [*case.iter("failure"), *case.iter("error")]
        name = "::".join(part for part in (case.get("classname"), case.get("name")) if part)
        outcomes[name] = "\n".join((one.text or one.get("message") or "?").strip() for one in wrong)[-3000:]
    return outcomes


def write_rows(reports: list[Report], titles: list[str]) -> None:
    """Adds or replaces the rows of `reports` between the markers of the page, in the order of `titles`."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    between, _, after = rest.partition(END)
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in between.splitlines() if line.startswith("| ")}
    rows |= {report.title: report.row() for report in reports}
    table = ["| suite | passed | waived | failed | why waived |", "|---|---|---|---|---|"]
    table += [rows[title] for title in titles if title in rows]
    PAGE.write_text("\n".join([before + BEGIN, "", *table, "", END]) + after)


def _matches(name: str, test: str) -> bool:
    return re.fullmatch(re.escape(name).replace(r"\*", ".*"), test) is not None
