"""pace as an engine for kani's chats: `from pace.integrations.kani import PaceEngine` (docs/kani.md)."""

try:
    from kani import __version__ as _version
except ImportError as error:
    raise ModuleNotFoundError(f'{error}; chats of kani need it: pip install "pace-llm[kani]"') from None
if not (1, 7) <= tuple(map(int, _version.split(".")[:2])) < (2, 0):
    raise ImportError(f"pace works with kani 1.7 and later, and {_version} is installed: pip install 'kani>=1.7,<2'")

from pace.integrations.kani.engine import PaceEngine

__all__ = ["PaceEngine"]
