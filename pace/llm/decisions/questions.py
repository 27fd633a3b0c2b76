"""Questions of a decision request, and their answers, in the form of System One."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pace.llm.decisions.config import KINDS, DecisionConfig
from pace.naming import shown

YES_OR_NO = ["Yes", "No"]
EXAMPLES = {
    "noul": {"type": "noul", "instructions": "Is this spam?", "criteria": {"true": "Advertising", "false": None}},
    "choice": {"type": "choice", "instructions": "Which tone?", "criteria": {"calm": "Polite", "angry": None}},
    "score": {"type": "score", "instructions": "How urgent is it?", "criteria": ["Can wait", "Today"]},
}
"""A valid question of each kind, for messages."""
FIELDS = {"type", "instructions", "criteria"}

Content = str | dict | list
"""What a state, an instruction or a description may be: text, or JSON that is shown as JSON."""


@dataclass(frozen=True)
class Question:
    """One question. Its lists are in the order in which the template shows the options."""

    name: str
    type: str
    """One of `KINDS`."""
    instructions: Any
    options: list[str]
    """Options of a choice, "0", "1" ... for the levels of a score, or "true" and "false"."""
    labels: list[str]
    """Text that the model would answer with, for each option."""
    descriptions: list[Any]

    @classmethod
    def read(cls, name: str, given: Any, config: DecisionConfig) -> Question:
        """Reads a question as a client writes it. Raises ValueError, with an example of a valid one."""
        kind = given.get("type") if isinstance(given, Mapping) else None
        if not isinstance(kind, str) or kind not in KINDS:
            raise ValueError(f"question {shown(name)}: type must be {', '.join(KINDS)}; got {shown(kind or given)}")
        try:
            criteria = _read_criteria(kind, given)
        except ValueError as error:
            raise ValueError(f"question {shown(name)}: {error}; for example {json.dumps(EXAMPLES[kind])}") from None
        if kind == "noul":
            described = {option: (criteria or {}).get(option) for option in config.noul_options}
        elif kind == "score":
            described = {str(level): description for level, description in enumerate(criteria)}
        else:
            described = criteria
        labels = config.labels.get(kind) or (YES_OR_NO if kind == "noul" else list(string.ascii_uppercase))
        if len(described) > len(labels):
            raise ValueError(
                f"question {shown(name)} has {len(described)} options, and this model has labels for {len(labels)} "
                f"(labels.{kind} in its decision.json)"
            )
        options = list(described)
        return cls(name, kind, given.get("instructions"), options, labels[: len(options)], list(described.values()))

    def answer(self, probabilities: Sequence[float]) -> dict[str, Any]:
        """Returns the answer, given the probability of each option."""
        count, by_option = len(probabilities), dict(zip(self.options, probabilities))
        if self.type == "noul":
            return {"type": "noul", "noul": by_option["true"]}
        best = max(by_option, key=by_option.__getitem__)
        if self.type == "choice":
            confidence = 1.0 if count == 1 else max(0.0, (by_option[best] - 1 / count) / (1 - 1 / count))
            return {"type": "choice", "choice": best, "confidence": confidence, "probabilities": by_option}
        # The expected distance to the best level, relative to that of equal probabilities to the middle.
        distance = sum(probability * abs(level - int(best)) for level, probability in enumerate(probabilities))
        middle = sum(abs(level - (count - 1) / 2) for level in range(count)) / count
        return {
            "type": "score",
            "score": sum(level * probability for level, probability in enumerate(probabilities)),
            "legend": dict(zip(self.options, self.descriptions)),
            "confidence": 1.0 if count == 1 else max(0.0, 1 - distance / middle),
            "probabilities": by_option,
        }


def read_questions(questions: Any, config: DecisionConfig) -> list[Question]:
    """Reads the questions of a request, by name. Raises one ValueError that lists every invalid one."""
    if not isinstance(questions, Mapping) or not questions:
        raise ValueError(f"questions must map names to questions, at least one; got {shown(questions)}")
    read, problems = [], []
    for name, given in questions.items():
        try:
            if not isinstance(name, str):
                raise ValueError(f"questions: names must be texts; got {shown(name)}")
            read.append(Question.read(name, given, config))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return read


def check_state(state: Any) -> None:
    """Raises ValueError for a state that is neither text nor JSON."""
    if not isinstance(state, Content):
        raise ValueError(f"state must be a text, an object or a list; got {shown(state)}")


def _read_criteria(kind: str, given: Mapping[str, Any]) -> Any:
    """Returns the criteria of a question. Raises ValueError for them, for unknown fields and for instructions."""
    if unknown := [name for name in given if name not in FIELDS]:
        raise ValueError(f"it has the unknown field {shown(unknown[0])}")
    if not isinstance(given.get("instructions"), Content | None):
        raise ValueError("instructions must be a text, an object, a list or null")
    criteria = given.get("criteria")
    if kind == "score":
        if not isinstance(criteria, list) or not criteria or not all(isinstance(one, Content) for one in criteria):
            raise ValueError("criteria must be a list with a description of each level, the lowest first")
    elif kind == "choice" or criteria is not None:
        what = "map each option to a description or null"
        if not isinstance(criteria, Mapping) or (kind == "choice" and not criteria):
            raise ValueError(f"criteria must {what}")
        if not all(isinstance(option, str) and isinstance(one, Content | None) for option, one in criteria.items()):
            raise ValueError(f"criteria must {what}")
        if kind == "noul" and (others := criteria.keys() - {"true", "false"}):
            raise ValueError(f"criteria describe true and false; got {shown(others.pop())}")
    return criteria
