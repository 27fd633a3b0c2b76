"""Plots of two diagrams side by side, and a check that they can be written before anything is measured."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_plot(path: Path) -> None:
    """Raises what writing a plot would: ImportError without matplotlib, FileNotFoundError, IsADirectoryError,
    PermissionError, or ValueError for an unsupported file type."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from None
    check_writable(path, "--plot")
    types = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in types:
        raise ValueError(f"--plot {path}: the name must end in a type of picture: {', '.join(types)}")


@contextmanager
def two_diagrams(path: Path, title: str, **options: Any) -> Iterator[Any]:
    """Yields the axes of two diagrams, and then writes them to `path`. Raises what `check_plot` raises. `options` are
    those of `pyplot.subplots`."""
    check_plot(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.8), **options)
    yield axes
    figure.suptitle(title, fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def check_writable(path: Path, option: str) -> None:
    """Raises FileNotFoundError, IsADirectoryError or PermissionError if the file of an option cannot be written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{option} {path}: there is no directory {str(path.parent)!r}")
    if path.is_dir():
        raise IsADirectoryError(f"{option} {path}: this is a directory; give the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{option} {path}: you may not write there")
