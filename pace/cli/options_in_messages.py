"""Messages name arguments as Python has them; at the command line they name options, as a user types them.

max_new_tokens=5 is ...     --max-new-tokens=5 is ...
set act_order=False         set --no-act-order
overrides: no module ...    --keep: no module ...
"""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable

CERTAIN = {"quantization", "overrides"}
"""Arguments that are one word and yet no word of our English: with all that have an underscore, they are rewritten
wherever they stand by themselves."""


def option(parser: argparse.ArgumentParser, name: str, flag: bool | None = None) -> str | None:
    """What sets the argument of that name (`dest`), or sets it to a flag; None where nothing does."""
    found = [
        text for action in parser._actions if action.dest == name for text in action.option_strings or [action.metavar]
    ]
    return next((text for text in found if flag is None or text.startswith("--no-") != flag), None)


def rewrite(message: str, find: Callable[[str, bool | None], str | None]) -> str:
    """The message with options in place of arguments; `find(name, flag)` as `option`.

    Left alone: what is quoted, a part of a path or of a longer name, a field of a file (`config.json: top_k`), and what
    stands in a call (`QuantizationConfig(group=32)`). A plain word, as `context`, is an argument only where a message
    begins with it and goes on with what it must be, in brackets of its own, and before `=`."""

    def replaced(match: re.Match) -> str:
        name, before, after = match["name"], message[: match.start()], message[match.end() :]
        if before.endswith(".json: ") or re.search(r"\w\([^()]*$", before):
            return match[0]
        if match["flag"]:
            return find(name, match["flag"] == "=True") or match[0]
        begins = not before and re.match(r" (must|would|and) |: ", after)
        alone = before.endswith("(") and after.startswith(")")
        if "_" in name or name in CERTAIN or begins or alone or after.startswith("="):
            return find(name, None) or name
        return name

    return _WORD.sub(replaced, message)


_WORD = re.compile(r"""(?<![\w./'"`<-])(?P<name>[a-z]\w*)(?![\w/'"`>-]|\.\w)(?P<flag>=(?:True|False)\b)?""")


class OptionsInLog(logging.Formatter):
    """What the library logs, as `rewrite` has it."""

    def __init__(self, find: Callable[[str, bool | None], str | None]) -> None:
        super().__init__("pace: %(message)s")
        self.find = find

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = rewrite(record.message, self.find)
        return super().formatMessage(record)
