"""Room in a cache: what a sequence needs, holds, or could take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """A number of blocks and a number of slots. One does not replace the other."""

    blocks: int = 0
    slots: int = 0

    def __add__(self, other: Room) -> Room:
        return Room(self.blocks + other.blocks, self.slots + other.slots)

    def fits_in(self, other: Room) -> bool:
        """True if `other` has both the blocks and the slots."""
        return self.blocks <= other.blocks and self.slots <= other.slots
