"""Random walks through grammars of the tools in the BFCL data: `python -m tests.llm.chat.bfcl`.

Every tool is called with `tool_choice` auto (starting within a call), required and named. The formats take turns. The
data come from the wheel of bfcl-eval, which pip downloads once.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import LLMatcher

from pace.llm.chat import FORMATS, Tool, ToolChoice, ToolError, TurnParser, read_tools, turn_grammar
from tests.llm.chat.grammars import special_names, vocabulary, walk
from tests.llm.chat.turns import parse

TYPES = {"dict": "object", "float": "number", "double": "number", "long": "integer", "tuple": "array", "list": "array",
         "ArrayList": "array", "Array": "array", "HashMap": "object", "String": "string", "char": "string"}  # fmt: skip
"""The data's type names and their JSON schema names. Other types unknown to JSON schema allow any value."""
KNOWN = {"object", "number", "integer", "array", "string", "boolean", "null"}
COLUMNS = ("walks", "finished", "cut", "refused", "wrong")


def data(cache: Path) -> Path:
    """Returns the path of the wheel with the data, and downloads it if necessary."""
    if not list(cache.glob("bfcl_eval-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "bfcl-eval", "--no-deps", "-q", "-d", str(cache)]
        subprocess.run(command, check=True)
    return next(cache.glob("bfcl_eval-*.whl"))


def descriptions(wheel: Path) -> Iterator[dict[str, Any]]:
    """Yields every description of a function once."""
    seen = set()
    with zipfile.ZipFile(wheel) as files:
        names = [name for name in files.namelist() if name.startswith("bfcl_eval/data/") and name.endswith(".json")]
        for name in sorted(names):
            if any(word in name for word in ("possible_answer", "prereq", "format_sensitivity")):
                continue
            for line in files.read(name).decode().splitlines():
                item = json.loads(line)
                for function in item.get("function", [item] if "parameters" in item else []):
                    text = json.dumps(function)
                    if text not in seen:
                        seen.add(text)
                        yield function


def in_json_schema(schema: Any) -> Any:
    """Returns the schema with JSON schema types, and without keywords that only the data use."""
    if not isinstance(schema, dict):
        return {}
    kept = {key: schema[key] for key in ("enum", "required", "description", "minimum", "maximum") if key in schema}
    kind = TYPES.get(schema.get("type"), schema.get("type"))
    kept |= {"type": kind} if kind in KNOWN else {}
    if isinstance(schema.get("properties"), dict):
        kept["properties"] = {name: in_json_schema(inner) for name, inner in schema["properties"].items()}
    if "items" in schema:
        kept["items"] = in_json_schema(schema["items"])
    return kept


def run_one(tool: Tool, other: Tool, mode: str, number: int, most: int) -> str:
    """Does one walk and returns its outcome: a word of COLUMNS, and sometimes a reason."""
    format = list(FORMATS.values())[number % len(FORMATS)]
    words = vocabulary(tuple(special_names(format)))
    choice = ToolChoice(mode, (tool.name,) if mode == "named" else None)
    grammar = turn_grammar(format, [tool, other], choice, special=words.special)
    refusal = LLMatcher(words.llt, grammar, log_level=0)
    if refusal.is_error():
        return f"refused {format.name}: {refusal.get_error().splitlines()[0]}"
    begin = format.trigger.replace("$NAME", tool.name) if mode == "auto" else ""
    text, ended = walk(grammar, words, random.Random(f"{number} {mode}"), most, begin)
    turn = parse(TurnParser(format, [tool, other]), text)
    try:
        for index, (name, arguments) in enumerate(turn.calls):
            if index in turn.ended:
                by_name = {tool.name: tool, other.name: other}
                jsonschema.validate(json.loads(arguments), by_name[name].parameters)
    except (ValueError, KeyError, jsonschema.ValidationError) as error:
        return f"wrong {format.name}: {str(error).splitlines()[0]}\n    {text!r}"
    if ended and (not turn.calls or len(turn.ended) < len(turn.calls) or (mode != "auto" and turn.text)):
        return f"wrong {format.name}: not only whole calls\n    {text!r}"
    return "finished" if ended else "cut"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "pace-bfcl", help="where the wheel lies")
    parser.add_argument("--tools", type=int, default=1000, help="how many tools")
    parser.add_argument("--most", type=int, default=300, help="tokens of a walk at most")
    options = parser.parse_args()
    tools, unusable = [], 0
    for function in descriptions(data(options.cache)):
        try:
            tools += read_tools([{"name": function["name"], "parameters": in_json_schema(function["parameters"])}])
        except ToolError:
            unusable += 1
    chosen = random.Random(0).sample(tools, min(options.tools, len(tools)))
    print(f"{len(tools)} tools, {unusable} with names or schemas that are refused; {len(chosen)} of them, seeded")
    counts = {mode: Counter() for mode in ("auto", "required", "named")}
    for mode, count in counts.items():
        for number, tool in enumerate(chosen):
            other = next(one for one in chosen[number - 1 :: -1] + chosen if one.name != tool.name)
            outcome = run_one(tool, other, mode, number, options.most)
            count[outcome.split()[0]] += 1
            count["walks"] += 1
            if outcome.startswith(("wrong", "refused")):
                print(f"{mode} {tool.name}: {outcome}")
    print("| tool_choice | " + " | ".join(COLUMNS) + " |\n|---|" + "---|" * len(COLUMNS))
    for mode, count in counts.items():
        print(f"| {mode} | " + " | ".join(str(count[column]) for column in COLUMNS) + " |")
    return 1 if any(count["wrong"] for count in counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
