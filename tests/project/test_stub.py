"""pace/_C.pyi names exactly what the extension has."""

import ast
from pathlib import Path

import pace
from pace import _C

STUB = Path(pace.__file__).parent / "_C.pyi"


def test_the_stub_lists_the_functions_and_classes_of_the_extension():
    tree = ast.parse(STUB.read_text())
    stubbed = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    stubbed |= {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    assert stubbed == {name for name in dir(_C) if not name.startswith("_")}


def test_the_stub_has_as_many_arguments_as_the_extension_takes():
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            # pybind11 writes the signature into the docstring: "name(arg0: int, ...) -> ...".
            signature = getattr(_C, node.name).__doc__.splitlines()[0]
            arguments = ast.parse(f"def {signature.replace('*, ', '')}: ...".replace("typing.", "")).body[0].args.args
            assert len(arguments) == len(node.args.args), signature
