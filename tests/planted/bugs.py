"""The list of bugs, and the draw of some of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LIST = Path(__file__).with_name("bugs.txt")


@dataclass(frozen=True)
class Bug:
    """One entry of bugs.txt; the head of that file explains the fields."""

    id: str
    """The room and the number within the room, such as "llm/cache/3"."""
    room: str
    kind: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    why: str

    @property
    def is_native(self) -> bool:
        """True if the extension must be rebuilt."""
        return self.file.startswith("csrc/")

    def is_stale(self, tree: Path) -> bool:
        """True if the text no longer occurs exactly once in the tree."""
        path = tree / self.file
        return not path.is_file() or path.read_text(encoding="utf-8").count(self.find) != 1


def read_bugs(path: Path = LIST) -> list[Bug]:
    """All bugs, in the order of the file."""
    numbers: Counter[str] = Counter()
    bugs = []
    for entry in path.read_text(encoding="utf-8").split("\n\n")[1:]:
        head, *changes, why = entry.strip("\n").split("\n")
        room, kind, file, tests = head.split(" | ")
        find, replace = ("\n".join(line[1:] for line in changes if line[0] == sign) for sign in "-+")
        numbers[room] += 1
        bugs.append(Bug(f"{room}/{numbers[room]}", room, kind, file, find, replace, tuple(tests.split()), why))
    return bugs


def draw(bugs: Sequence[Bug], seed: int, count: int) -> list[Bug]:
    """Returns `count` of the bugs, or all if there are fewer: the same for the same list, seed and count.

    Rooms take turns, in an order drawn once. A turn takes a bug of the kind that the room has used least. Ties go to
    the kind that the whole draw has used least, then to chance. Python bugs come first in the result, so that the
    extension is unchanged until the native ones."""
    random_order = random.Random(seed)
    left: dict[str, list[Bug]] = {}
    for bug in bugs:
        left.setdefault(bug.room, []).append(bug)
    rooms = sorted(left)
    random_order.shuffle(rooms)
    drawn: list[Bug] = []
    in_room: Counter[tuple[str, str]] = Counter()
    in_all: Counter[str] = Counter()
    while len(drawn) < min(count, len(bugs)):
        for room in rooms:
            if not left[room] or len(drawn) == count:
                continue
            ranks = [(in_room[room, bug.kind], in_all[bug.kind]) for bug in left[room]]
            bug = random_order.choice([bug for bug, rank in zip(left[room], ranks) if rank == min(ranks)])
            left[room].remove(bug)
            in_room[room, bug.kind] += 1
            in_all[bug.kind] += 1
            drawn.append(bug)
    return sorted(drawn, key=lambda bug: bug.is_native)
