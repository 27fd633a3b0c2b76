"""The JSON-Schema-Test-Suite, through our grammars: `python -m tests.grammar.json_schema_suite [DRAFT ...]`.

Each valid instance of a schema that compiles must be accepted, each invalid one refused, by tokens and byte by byte. A
grammar admits only one spelling of a valid instance: keys in the order of the schema, whole numbers without a fraction.
The suite is taken from the source distribution of `jsonschema`, which pip fetches into a cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pace.assets import TINY
from pace.grammar import Grammar
from pace.llm.constraints.grammars import GrammarCompiler
from pace.tokenizer.loading import load_tokenizer

DRAFTS = ("draft2020-12", "draft2019-09", "draft7", "draft6", "draft4")
CACHE = Path.home() / ".cache" / "pace" / "json-schema-test-suite"
VERSION = "4.26.0"
NARROWER = {
    "format.json": "formats are checked, which the standard leaves open",
    "format/email.json": "no quoted local parts, no addresses in brackets",
    "format/ipv6.json": "no dotted quads within",
    "format/time.json": "no leap seconds at other offsets than UTC's",
    "format/date-time.json": "no leap seconds at other offsets than UTC's",
    "float-overflow.json": "integers are written without an exponent",
    "draft7/ref.json": "what stands beside $ref holds, as in the newer drafts",
    "draft6/ref.json": "what stands beside $ref holds, as in the newer drafts",
    "draft4/ref.json": "what stands beside $ref holds, as in the newer drafts",
    "bignum.json": "integers are written without an exponent",
}
"""Files of the suite in which valid instances are refused, and the reasons."""
MOST_SPELLINGS = 200


def suite() -> Path:
    """The folder of the suite's tests."""
    folder = CACHE / f"jsonschema-{VERSION}" / "json" / "tests"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(CACHE)]
        subprocess.run([*pip, f"jsonschema=={VERSION}"], check=True)
        with tarfile.open(CACHE / f"jsonschema-{VERSION}.tar.gz") as archive:
            archive.extractall(CACHE, filter="data")
    return folder


def spellings(value: Any) -> Iterator[Any]:
    """The value with its keys in every order, and whole numbers as integers."""
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    elif isinstance(value, list):
        yield from map(list, itertools.product(*(list(spellings(item)) for item in value)))
    elif isinstance(value, dict):
        for keys in itertools.permutations(value):
            for items in itertools.product(*(list(spellings(value[key])) for key in keys)):
                yield dict(zip(keys, items))
    else:
        yield value


class Judge:
    """Decides whether a grammar admits a JSON value."""

    def __init__(self) -> None:
        self._tokenizer = load_tokenizer(TINY)
        self._compiler = GrammarCompiler(self._tokenizer, len(self._tokenizer))
        names = self._tokenizer.get_vocab()
        table = self._compiler._table_future().result()
        self._bytes = [table.tokenize_bytes(bytes([byte]))[0] for byte in range(256)]
        assert len(set(self._bytes)) == 256 <= len(names)

    def compile(self, schema: Any) -> Any:
        """A matcher for a schema. Raises ValueError if the schema is refused."""
        return self._compiler.compile(Grammar.json_schema(schema)).matcher

    def admits(self, matcher: Any, value: Any, any_spelling: bool) -> set[bool]:
        """The answers by tokens and by bytes, for one spelling or, with `any_spelling`, for any that is admitted."""
        found = {False}
        values = itertools.islice(spellings(value), MOST_SPELLINGS) if any_spelling else [value]
        for candidate in itertools.chain([value], values):
            text = json.dumps(candidate, separators=(",", ":"), ensure_ascii=False)
            tokens = self._tokenizer.encode(text, add_special_tokens=False)
            found = {self._admits(matcher, tokens), self._admits(matcher, [self._bytes[b] for b in text.encode()])}
            if found == {True} or not any_spelling:
                break
        return found

    def _admits(self, matcher: Any, tokens: list[int]) -> bool:
        copy = matcher.deep_copy()
        return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()


def run(folder: Path, judge: Judge) -> tuple[Counter, list[str]]:
    """Counts for one draft, and the instances that were judged wrongly without a known reason."""
    counts: Counter = Counter()
    wrong = []
    for file in sorted(folder.rglob("*.json")):
        for case in json.loads(file.read_text(encoding="utf-8")):
            try:
                matcher = judge.compile(case["schema"])
            except ValueError:
                counts["schemas refused"] += 1
                continue
            counts["schemas"] += 1
            for test in case["tests"]:
                try:
                    found = judge.admits(matcher, test["data"], test["valid"])
                except UnicodeEncodeError:  # half a surrogate pair cannot be encoded
                    continue
                narrower = any(file.as_posix().endswith(name) for name in NARROWER)
                if found == {test["valid"]}:
                    counts["instances"] += 1
                elif test["valid"] and narrower:
                    counts["narrower"] += 1
                else:
                    counts["wrong"] += 1
                    wrong.append(f"{file.name}: {case['description']}: {test['description']}")
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafts", nargs="*", default=DRAFTS, metavar="DRAFT")
    drafts = parser.parse_args().drafts
    judge, folder, all_wrong = Judge(), suite(), []
    print("| draft | schemas compiled | refused | instances judged right | valid, but narrower | wrong |")
    print("|---|---|---|---|---|---|")
    for draft in drafts:
        counts, wrong = run(folder / draft, judge)
        row = (counts[name] for name in ("schemas", "schemas refused", "instances", "narrower", "wrong"))
        print(f"| {draft} | " + " | ".join(map(str, row)) + " |")
        all_wrong += [f"{draft}/{line}" for line in wrong]
    print(*all_wrong, sep="\n")
    return 1 if all_wrong else 0


if __name__ == "__main__":
    sys.exit(main())
