"""Rewrites argument names in messages to the options of the command line.

max_new_tokens=5 is ...     --max-new-tokens=5 is ...
set act_order=False         set --no-act-order
overrides: no module ...    --keep: no module ...
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable, Iterable

CERTAIN = {"quantization", "overrides"}
"""Arguments without an underscore that are always rewritten, like those with one: messages use these words for nothing
else."""


def option(parser: argparse.ArgumentParser, name: str, flag: bool | None = None) -> str | None:
    """Returns the option that sets the argument `name` (its `dest`), or sets it to `flag`; None if there is none."""
    found = [
        text for action in parser._actions if action.dest == name for text in action.option_strings or [action.metavar]
    ]
    return next((text for text in found if flag is None or text.startswith("--no-") != flag), None)


def refuse_given(arguments: argparse.Namespace, names: Iterable[str], subject: str) -> None:
    """Exits with a usage error if one of these options is given, which have no meaning for the subject."""
    parser = arguments.parser
    for name in names:
        if getattr(arguments, name) != parser.get_default(name):
            parser.error(f"{option(parser, name)} has no meaning for {subject}: leave it out")


def rewrite(message: str, find: Callable[[str, bool | None], str | None]) -> str:
    """Returns the message with options in place of argument names. `find(name, flag)` works like `option`.

    Unchanged are quoted text, parts of a path or longer name, fields of a file (`config.json: top_k`), and arguments of
    a call (`QuantizationConfig(group=32)`). A plain word such as `context` is rewritten only before `=` or
    alone in brackets. At the start of a message, it is also rewritten before "must", "would", "and", "set," or a
    colon."""

    def replaced(match: re.Match) -> str:
        name, before, after = match["name"], message[: match.start()], message[match.end() :]
        if before.endswith(".json: ") or re.search(r"\w\([^()]*$", before):
            return match[0]
        if match["flag"]:
            return find(name, match["flag"] == "=True") or match[0]
        begins = not before and re.match(r" (must|would|and) |(, \w+)* set, |: ", after)
        alone = before.endswith("(") and after.startswith(")")
        if "_" in name or name in CERTAIN or begins or alone or after.startswith("="):
            return find(name, None) or name
        return name

    return _WORD.sub(replaced, message)


_WORD = re.compile(r"""(?<![\w./'"`<-])(?P<name>[a-z]\w*)(?![\w/'"`>-]|\.\w)(?P<flag>=(?:True|False)\b)?""")


class OptionsInLog(logging.Formatter):
    """Formats log records, with options in place of argument names."""

    def __init__(self, find: Callable[[str, bool | None], str | None]) -> None:
        super().__init__("pace: %(message)s")
        self.find = find

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = rewrite(record.message, self.find)
        return super().formatMessage(record)
