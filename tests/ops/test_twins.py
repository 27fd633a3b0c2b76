"""The two implementations of `pace.ops` have the same functions, called in the same way."""

from __future__ import annotations

import inspect

import pytest

from pace.ops import reference

native = pytest.importorskip("pace.ops.native", reason="the kernels are not built")


def functions(module):
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and not name.startswith("_") and value.__module__.startswith("pace.ops")
    }


def test_the_same_functions():
    assert functions(reference).keys() == functions(native).keys()


@pytest.mark.parametrize("name", functions(reference))
def test_the_same_parameters(name):
    def parameters(function):
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert parameters(getattr(native, name)) == parameters(getattr(reference, name))
