"""Implementations of `Ops` have the functions of the protocol, with the same signatures."""

from __future__ import annotations

import inspect

import pytest

from pace.graph import recorded
from pace.llm.operators import OPERATORS
from pace.llm.runners.eager import RoutedOps, TwinsOnPackedWeights
from pace.ops import native, reference
from pace.ops.protocol import ForwardOps, Ops, SamplingOps, WeightOps


def functions_of(protocol):
    """Name -> function of a protocol, including those of its parents."""
    return {
        name: value
        for kind in protocol.__mro__
        for name, value in vars(kind).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def public_functions(implementer):
    """Name -> public function of an object, or of a module and the modules that it is composed of. Functions imported
    from `pace.ops.checks` do not count."""
    return {
        name: value
        for name, value in vars(implementer).items()
        if inspect.isfunction(value)
        and not name.startswith("_")
        and value.__module__ not in ("pace.ops.checks", "pace.graph.instructions", "dataclasses", "typing")
    }


def parameters(function):
    found = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in found if p.name != "self"]


def routed(implementation):
    return RoutedOps(dict.fromkeys(OPERATORS, implementation), {})


IMPLEMENTERS = {
    "native": (native, Ops),
    "reference": (reference, Ops),
    "recorded": (recorded, ForwardOps),
    "routed": (routed(native), ForwardOps),
    "routed to twins": (routed(TwinsOnPackedWeights()), ForwardOps),
}


@pytest.mark.parametrize("name", IMPLEMENTERS)
def test_an_implementer_has_the_functions_of_the_protocol_and_their_parameters(name):
    implementer, protocol = IMPLEMENTERS[name]
    wanted, found = functions_of(protocol), public_functions(implementer)
    assert found.keys() == wanted.keys()
    for operation, function in wanted.items():
        assert parameters(found[operation]) == parameters(function), operation


def test_the_protocol_says_what_each_function_promises():
    functions = functions_of(Ops)
    assert len(functions) == sum(len(functions_of(part)) for part in (ForwardOps, WeightOps, SamplingOps))
    for name, function in functions.items():
        assert inspect.getdoc(function), name
        assert function.__annotations__.keys() == {*inspect.signature(function).parameters, "return"} - {"self"}, name
        changes_its_argument = name.endswith("_") or name == "store_kv"
        assert (function.__annotations__["return"] == "None") == changes_its_argument, name


def test_every_operation_of_a_forward_pass_belongs_to_an_operator():
    assert recorded.OPERATOR_OF.keys() == functions_of(ForwardOps).keys()
    assert {operator for operator in recorded.OPERATOR_OF.values() if operator} <= set(OPERATORS)


def test_other_parameters_are_seen():
    def linear(x, weight, bias=None, activation=None, added=None): ...

    assert parameters(linear) != parameters(ForwardOps.linear) == parameters(native.linear)
