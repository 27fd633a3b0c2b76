"""Names of kept prefixes, and their files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from pace.server.errors import invalid

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
FILE = re.compile(rf"(?P<name>{NAME.pattern})\.(?P<owner>[0-9a-f]{{16}})\.prefix")


def check_name(name: str) -> None:
    """Raises ApiError unless a name is safe in a path."""
    if not NAME.fullmatch(name):
        raise invalid("name", "must be 1 to 100 letters, digits, '.', '_' and '-', and begin with a letter or a digit")


def hashed(salt: str | None) -> str:
    """Stands for a salt, which it does not reveal, in files and their names."""
    digest = hashlib.blake2b(b"" if salt is None else b"salt " + salt.encode(), digest_size=8, person=b"pace prefix")
    return digest.hexdigest()


def file_of(folder: Path, name: str, owner: str) -> Path:
    """Path of a prefix. Each owner, a hashed key, has names of its own."""
    return folder / f"{name}.{owner}.prefix"
