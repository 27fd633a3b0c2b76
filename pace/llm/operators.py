"""The operators of a forward pass: the implementation chosen for each, and the one that ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pace.naming import meant

BACKENDS = ("native", "native-eager", "torch")
"""Names for `backend=`, which also takes an `OperatorConfig`, or its text form "attention=torch,mlp=torch"."""

IMPLEMENTATIONS = ("native", "torch")


@dataclass(frozen=True, init=False)
class OperatorConfig:
    """Implementation of each operator of a model's forward pass: "native", the C++ kernels, or "torch", their
    specification in plain torch. The default is native.

        LLMModel(path, backend=OperatorConfig(attention="torch", norm="torch"))

    distinguishes a wrong kernel from a wrong model: if the kernel is wrong, the text is right with that operator on
    torch. With any operator on torch, the model runs op by op, because a program is native throughout. Raises
    ValueError for an unknown operator or implementation."""

    embedding: str = "native"
    """Rows of the token table and, in OPT, of the position table."""
    norm: str = "native"
    """Norms of rows, and of the heads of queries and keys."""
    projection: str = "native"
    """The matrix products before and after attention: to queries, keys and values, and back. Also OPT's products
    between its two widths."""
    rotary: str = "native"
    attention: str = "native"
    """Writing the cache, softmax(q k') and its product with v."""
    mlp: str = "native"
    """Matrix products of the MLP, with their activation."""
    lm_head: str = "native"
    """The matrix product that makes logits."""

    def __init__(self, **choices: str) -> None:
        for operator, implementation in choices.items():
            if operator not in OPERATORS:
                raise ValueError(
                    f"there is no operator {operator!r}{meant(operator, OPERATORS)} Known: {', '.join(OPERATORS)}"
                )
            if implementation not in IMPLEMENTATIONS:
                raise ValueError(
                    f"{operator} can be run by {' or '.join(map(repr, IMPLEMENTATIONS))}; got {implementation!r}"
                )
            object.__setattr__(self, operator, implementation)

    @classmethod
    def parse(cls, text: str) -> OperatorConfig:
        """Parses "attention=torch,mlp=native", the form of `str` and of command lines."""
        choices: dict[str, str] = {}
        for choice in text.split(","):
            operator, _, implementation = (part.strip() for part in choice.partition("="))
            if operator in choices:
                raise ValueError(f"{text!r} says twice what runs {operator!r}")
            choices[operator] = implementation
        return cls(**choices)

    def __str__(self) -> str:
        return ",".join(f"{operator}=torch" for operator in OPERATORS if getattr(self, operator) == "torch") or "native"


OPERATORS = tuple(field.name for field in fields(OperatorConfig))


def read_backend(backend: str | OperatorConfig) -> str | OperatorConfig:
    """Parses `backend=`, including operators in text form. Raises ValueError if it is invalid."""
    if isinstance(backend, OperatorConfig) or (isinstance(backend, str) and backend in BACKENDS):
        return backend
    if isinstance(backend, str) and "=" in backend:
        return OperatorConfig.parse(backend)
    names = ", ".join(map(repr, BACKENDS))
    raise ValueError(
        f"backend must be one of {names}, or say what runs each operator, as 'attention=torch,mlp=torch'; got "
        f"{backend!r}"
    )


@dataclass(frozen=True)
class OperatorRun:
    """Statistics of one implementation of an operator since the model was made."""

    operator: str
    implementation: str
    calls: int
    """Calls of `pace.ops` functions, over all layers and steps."""
    seconds: float | None
    """Wall time of the calls; None if it was not measured, or is part of the operator that they are fused into."""


@dataclass(frozen=True)
class OperatorReport:
    """The implementation of each operator that ran, recorded during the runs. `print(report)` shows a table."""

    how: str
    """"as a program" or "op by op"."""
    runs: Sequence[OperatorRun]
    """Runs in the order of `OPERATORS`, without operators that did not run."""

    def __getitem__(self, operator: str) -> OperatorRun:
        """The run of an operator. Raises KeyError if it did not run."""
        return {run.operator: run for run in self.runs}[operator]

    def __str__(self) -> str:
        ran = {run.operator for run in self.runs}
        lines = [f"{'operator':<12}{'ran ' + self.how:<20}{'calls':>10}{'seconds':>10}"]
        for operator in OPERATORS:
            for run in self.runs:
                if run.operator == operator:
                    lines.append(
                        f"{operator:<12}{run.implementation:<20}{run.calls:>10}"
                        f"{'-' if run.seconds is None else f'{run.seconds:.3f}':>10}"
                    )
            if operator not in ran:
                lines.append(f"{operator:<12}{'did not run':<20}{0:>10}{'-':>10}")
        return "\n".join(lines)
