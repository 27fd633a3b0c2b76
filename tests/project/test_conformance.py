"""The report of `make conformance` on a suite's results: `tests/conformance/report.py`."""

from __future__ import annotations

import sys
import tomllib

import pytest

from tests.conformance import __main__ as conformance
from tests.conformance import coding, report
from tests.conformance.environments import environment
from tests.conformance.report import Report, Waiver, read_waivers
from tests.conformance.suites import SUITES, Suite

RESULTS = """<testsuites><testsuite>
<testcase classname="m" name="test_a"/>
<testcase classname="m" name="test_b[1]"><failure message="x">why b</failure></testcase>
<testcase classname="m" name="test_c"><error message="broken"/></testcase>
<testcase classname="m" name="test_d"><skipped message="not here"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def results(tmp_path):
    file = tmp_path / "results.xml"
    file.write_text(RESULTS)
    return file


def test_a_failure_without_a_waiver_is_not_well(results):
    found = Report.of("s", "suite", results, [Waiver(("m::test_b[*",), "by intent")])
    assert (found.passed, list(found.waived), found.failed) == (["m::test_a"], ["m::test_b[1]"], ["m::test_c"])
    assert not found.is_well and "broken" in found.details()
    assert found.row() == "| suite | 1 | 1 | 1 | by intent (1) |"


def test_failures_with_waivers_are_well_and_needless_ones_are_named(results):
    waivers = [Waiver(("m::test_b*", "m::test_a"), "one"), Waiver(("m::test_c", "m::gone"), "two")]
    found = Report.of("s", "suite", results, waivers)
    assert found.is_well and found.needless == ["m::test_a", "m::gone"]
    assert found.row() == "| suite | 1 | 2 | 0 | one (1); two (1) |"


def test_a_suite_without_results_is_not_well(tmp_path):
    empty = tmp_path / "empty.xml"
    empty.write_text("<testsuites/>")
    for file in (tmp_path / "none.xml", empty):
        assert not Report.of("s", "suite", file, []).is_well


def test_a_suite_that_cannot_be_had_says_so_without_commands_and_paths(tmp_path):
    def run(folder, results):
        environment(folder, ["no-such-package-of-pace==0"])

    with_no_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformance, "CACHE", tmp_path)
        for name, value in with_no_index.items():
            patch.setenv(name, value)
        found = conformance._run(Suite("s", "suite", run), [Waiver(("m::test",), "why")])
    reason = "the packages no-such-package-of-pace==0 cannot be installed"
    assert not found.is_well and not found.needless and found.row() == f"| suite | not run | | | {reason} |"
    assert "No matching distribution" in found.details()


def test_rows_go_between_the_markers(results, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{report.BEGIN}\n| old | 1 | 0 | 0 |  |\n| gone | 1 | 0 | 0 |  |\n{report.END}\nafter\n")
    monkeypatch.setattr(report, "PAGE", page)
    report.write_rows([Report.of("s", "new", results, [])], ["new", "old", "other"])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "gone" not in text
    assert text.index("|---|") < text.index("| new | 1 | 0 | 2 |") < text.index("| old | 1 | 0 | 0 |  |")


def test_waivers_are_of_suites_and_have_reasons():
    waivers = read_waivers()
    assert waivers.keys() <= SUITES.keys()
    assert all(waiver.reason and waiver.tests for own in waivers.values() for waiver in own)


def test_the_settings_of_coding_clients_are_those_of_the_page(monkeypatch):
    monkeypatch.setenv("PACE_URL", "http://127.0.0.1:9")
    codex = tomllib.loads(coding.settings("# ~/.codex/config.toml"))
    assert codex["model_providers"]["pace"]["base_url"] == "http://127.0.0.1:9/v1"
    assert (codex["model"], codex["model_context_window"]) == (coding.NAME, coding.CONTEXT)
    claude = coding.settings("export ")
    assert "export ANTHROPIC_BASE_URL=http://127.0.0.1:9\n" in claude and f"--model {coding.NAME}" in claude
    assert f"export CLAUDE_CODE_MAX_CONTEXT_TOKENS={coding.CONTEXT}\n" in claude


def test_whom_a_coding_client_asks_beside_the_server_is_noted_and_refused(tmp_path):
    client = coding.Client(tmp_path)
    asks = "import urllib.request; urllib.request.urlopen('http://elsewhere.invalid/x')"
    code, output = client.run(sys.executable, "-c", asks)
    assert code == 1 and "403" in output and client.hosts == ["http://elsewhere.invalid/x"]
