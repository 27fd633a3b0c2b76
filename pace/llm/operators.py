"""The operators of a forward pass: which implementation a caller wants for each, and which one ran."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from pace.naming import meant

BACKENDS = ("native", "native-eager", "torch")
"""The names of `backend=`; besides them it takes an `OperatorConfig`, or one written as "attention=torch,mlp=torch"."""

IMPLEMENTATIONS = ("native", "torch")


@dataclass(frozen=True, init=False)
class OperatorConfig:
    """For each operator of a model's forward pass the implementation that runs it: "native", the C++ kernels, or
    "torch", their specification in plain torch. What is not said is native.

        LLMModel(path, backend=OperatorConfig(attention="torch", norm="torch"))

    tells a wrong kernel from a wrong model: with the guilty operator on torch, the text is right again. With any
    operator on torch the model runs op by op, as a program is native throughout. Raises ValueError for what is neither
    operator nor implementation."""

    embedding: str = "native"
    """Rows of the tables of tokens and, in OPT, positions."""
    norm: str = "native"
    """Of rows, and of the heads of queries and keys."""
    projection: str = "native"
    """The matrix products around attention, to queries, keys and values and back; and OPT's between two widths."""
    rotary: str = "native"
    attention: str = "native"
    """The cache's write, softmax(q k') and its product with v."""
    mlp: str = "native"
    """Its matrix products with their activation."""
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
        """From "attention=torch,mlp=native": what `str` makes, as command lines have it."""
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
    """What `backend=` says, with operators written as text read; ValueError where it makes no sense."""
    if isinstance(backend, OperatorConfig) or (isinstance(backend, str) and backend in BACKENDS):
        return backend
    if isinstance(backend, str) and "=" in backend:
        return OperatorConfig.parse(backend)
    names = ", ".join(map(repr, BACKENDS))
    raise ValueError(
        f"backend must be one of {names}, or say what runs each operator, as 'attention=torch,mlp=torch'; got {backend!r}"
    )


@dataclass(frozen=True)
class OperatorRun:
    """What one implementation of an operator has done since the model was made."""

    operator: str
    implementation: str
    calls: int
    """Operations of `pace.ops`, over all layers and steps."""
    seconds: float | None
    """Wall time of them; None where it was not measured, or lies within that of the operators they are fused into."""


@dataclass(frozen=True)
class OperatorReport:
    """Which implementation of each operator ran, as recorded while it did. `print(report)` shows it as a table."""

    how: str
    """"as a program" or "op by op"."""
    runs: Sequence[OperatorRun]
    """In the order of `OPERATORS`; an operator that did not run, or that this model has none of, is not there."""

    def __getitem__(self, operator: str) -> OperatorRun:
        """The run of an operator; KeyError where it did not run."""
        return {run.operator: run for run in self.runs}[operator]

    def __str__(self) -> str:
        ran = {run.operator for run in self.runs}
        lines = [f"{'operator':<12}{'ran ' + self.how:<20}{'calls':>10}{'seconds':>10}"]
        for operator in OPERATORS:
            for run in self.runs:
                if run.operator == operator:
                    lines.append(
                        f"{operator:<12}{run.implementation:<20}{run.calls:>10}{'-' if run.seconds is None else f'{run.seconds:.3f}':>10}"
                    )
            if operator not in ran:
                lines.append(f"{operator:<12}{'did not run':<20}{0:>10}{'-':>10}")
        return "\n".join(lines)
