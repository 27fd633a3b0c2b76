"""The layers of docs/architecture.md: allowed imports, checked in the source of every module."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Lower layers first. A module may import modules of its own layer and of the layers before it. The longest matching
# name counts.
LAYERS: list[list[str]] = [
    ["pace", "pace._C", "pace.assets", "pace.env", "pace.memory", "pace.naming", "pace.states"],
    ["pace.batch", "pace.ops", "pace.graph"],
    ["pace.quant"],
    ["pace.checkpoints", "pace.media"],
    ["pace.tokenizer"],
    ["pace.grammar"],
    ["pace.llm.aliases", "pace.llm.configs", "pace.llm.defaults", "pace.llm.inputs", "pace.llm.limits"]
    + ["pace.llm.operators", "pace.llm.infill", "pace.llm.validators", "pace.llm.sequence"]
    + ["pace.llm.speculation.configs", "pace.llm.decisions.config", "pace.llm.chat"]
    + ["pace.llm.processors.processor", "pace.llm.processors.prompts"],
    ["pace.llm.layers"],
    ["pace.llm.models", "pace.llm.loading", "pace.llm.processors", "pace.llm.adapters"],
    ["pace.llm.runners"],
    ["pace.llm.cache", "pace.llm.text", "pace.llm.outputs"],
    ["pace.llm.constraints"],
    ["pace.llm.sampling"],
    ["pace.llm.engine", "pace.llm.speculation"],
    ["pace.llm.clients", "pace.llm.decisions"],
    ["pace.llm", "pace.llm.embedding_model", "pace.llm.encoding", "pace.llm.generator", "pace.llm.llm"]
    + ["pace.llm.preparation", "pace.llm.sequences"]
    + ["pace.llm.loading.load", "pace.llm.loading.options"],
    ["pace.bench", "pace.eval"],
    ["pace.calibrate"],
    ["pace.server"],
    ["pace.cli", "pace.integrations", "pace.__main__"],
]
STRANGERS = ["pace.llm.engine.scheduler", "pace.llm.engine.drafter", "pace.llm.cache", "pace.llm.sampling"]
"""Modules that must not import each other: the engine composes them."""
MAX_FILES = 15
"""Maximum number of modules directly in one folder, except in `LISTS`."""
LISTS = [Path("pace/llm") / room for room in ("models/families", "models/towers", "processors")]
"""Folders that are lists of like things, each found by its name."""
HOMES = {
    "PIL": ["pace.media.images", "pace.media.patches"],
    "langchain_core": ["pace.integrations.langchain"],
    "huggingface_hub": ["pace.llm.loading.download", "pace.llm.loading.hub"],
    "transformers": ["pace.tokenizer.loading"],
}
"""Library -> the only modules that may import it."""
EXTRAS = {"guidance", "kani", "lm_eval", "ray"}
"""Libraries that only their packages in pace.integrations import."""


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted((ROOT / "pace").rglob("*.py"))}


def imports(source: str, package: str) -> set[str]:
    """Names of the modules that a source imports at any place, including `TYPE_CHECKING` blocks."""
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(
                    [*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])]
                )
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full in MODULES or full == "pace._C" else base)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(source))
    return found


def layer(module: str) -> int | None:
    """Index of the layer with the longest name that equals or contains `module`. A package's own name matches only
    the package itself."""
    matches = [
        (len(name), index)
        for index, names in enumerate(LAYERS)
        for name in names
        if module == name or (name not in ("pace", "pace.llm") and module.startswith(name + "."))
    ]
    return max(matches)[1] if matches else None


@cache
def imports_of(module: str) -> set[str]:
    path = MODULES[module]
    return imports(path.read_text(), module if path.name == "__init__.py" else module.rpartition(".")[0])


def libraries(module: str) -> set[str]:
    return {name.split(".")[0] for name in imports_of(module)}


def test_imports_go_down():
    modules = [module for module in MODULES if not module.startswith("pace.assets")]
    homeless = [module for module in modules if layer(module) is None]
    assert not homeless, f"{homeless} have no place in LAYERS: add them there and to docs/architecture.md"
    wrong = [
        f"{module} must not import {name}, which lies above it"
        for module in modules
        for name in imports_of(module)
        if name.split(".")[0] == "pace" and (layer(name) is None or layer(name) > layer(module))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_engine_composes_its_parts():
    for module in MODULES:
        part = next((name for name in STRANGERS if module == name or module.startswith(name + ".")), None)
        others = {name for name in imports_of(module) if name in STRANGERS and name != part} if part else set()
        assert not others, f"{module} must not import {', '.join(sorted(others))}: the engine brings them together"


@pytest.mark.parametrize("library", HOMES)
def test_few_modules_know_the_hub(library):
    assert [module for module in MODULES if library in libraries(module)] == HOMES[library]


def test_a_library_is_known_in_its_room_alone():
    for module in MODULES:
        for library in libraries(module) & EXTRAS:
            assert module.startswith(f"pace.integrations.{library}"), f"{module} must not import {library}"


def test_rooms_are_small():
    for top in (ROOT / "pace", ROOT / "tests"):
        for folder in (top, *(path for path in top.rglob("*") if path.is_dir())):
            sources = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
            assert len(sources) <= MAX_FILES or folder.relative_to(ROOT) in LISTS, (
                f"{folder} holds {len(sources)} modules side by side; would two rooms be clearer?"
            )


def test_kernels_know_no_python_torch_or_threads():
    for path in (ROOT / "csrc" / "kernels").glob("*"):
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("#include"):
                assert not any(word in line for word in ("Python", "torch", "pybind11", "thread", "omp.h")), (
                    f"{path}: {line}"
                )


def test_the_reader_of_imports_sees_every_kind():
    source = """
import a.b
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import hidden
else:
    import shown
def f():
    from c import d
from . import sibling
from ..up import x
"""
    assert imports(source, "p.q") == {"a.b", "typing", "hidden", "shown", "c", "p.q", "p.up"}
    assert (
        layer("pace.llm.models.families.llama")
        == layer("pace.llm.models")
        > layer("pace.llm.layers.norm")
        > layer("pace.ops.native")
    )
    assert layer("pace.llm.nowhere") is None
