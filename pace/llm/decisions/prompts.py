"""The prompts of a decision request in tokens, and the places where the model is asked for a label.

Without a template of its own, a model is asked in its chat template. The state, the question and its options are the
user's message, and the label is the first token of the answer. A decision_template.jinja writes marks instead, and the
label of a question follows the text before its mark."""

from __future__ import annotations

import copy
import json
import string
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any, NamedTuple

from jinja2 import TemplateError

from pace.llm.chat.rendering import Rendering, TemplateRefusal
from pace.llm.decisions.config import DecisionConfig
from pace.llm.decisions.questions import YES_OR_NO, Question, check_state, read_questions
from pace.naming import check_text, shown
from pace.tokenizer.control_tokens import ControlTokens
from pace.tokenizer.jinja import variables_of

MARK, SPLIT = "<|mark|>", "<|split|>"
"""What a template writes where a label is read, and between texts that must not join. Neither becomes a token."""
VARIABLES = {"enable_thinking": False}
"""Variables of chat templates: the answer is a label at once."""


class DecisionPrompt(NamedTuple):
    """A prompt, and what is read from its logits."""

    tokens: list[int]
    questions: list[Question]
    places: list[int]
    """Position of the token whose logits have the labels of each question."""
    labels: list[list[int]]
    """Token of each label of each question."""


class DecisionPrompts:
    """Makes the prompts of one model. Threads may share it."""

    def __init__(self, tokenizer: Any, config: DecisionConfig) -> None:
        """Raises ValueError for a model without a tokenizer, and without a template if `config` has none."""
        if tokenizer is None:
            raise ValueError("decisions need a tokenizer, and this model has none")
        if config.chat_template is None and getattr(tokenizer, "chat_template", None) is None:
            raise ValueError(
                "decisions need a model with a chat template, or a decision_template.jinja; this model has neither"
            )
        self.config = config
        self._given = tokenizer
        self._label_ids: dict[tuple[str, ...], list[int]] = {}
        self._lock = threading.Lock()
        """Held while a request is read: tokenizers of transformers are not safe to share."""

    def read(self, state: Any, questions: Mapping[str, Any]) -> list[DecisionPrompt]:
        """Returns the prompts of a request: one for each question, or one for all if the template takes them together.

        Raises ValueError for an invalid state or question, and for labels that are not different tokens. Also for a
        template that refuses them, or writes other marks than it should."""
        check_state(state)
        read = read_questions(questions, self.config)
        check_text(json.dumps([state, questions], ensure_ascii=False), "the request")
        if not self.config.sanitize_control_tokens:
            state, read = _without_marks(state), read_questions(_without_marks(questions), self.config)
        with self._lock:
            groups = [read] if "questions" in self._variables else [[question] for question in read]
            return [self._prompt(state, group) for group in groups]

    @cached_property
    def _variables(self) -> frozenset[str]:
        """Variables that the decision template reads."""
        template = self.config.chat_template
        if template is None:
            return frozenset({"state", "question"})
        try:
            return variables_of(template)
        except TemplateError as error:
            raise ValueError(f"the decision template is not Jinja: {error}") from None

    @cached_property
    def _tokenizer(self) -> Any:
        """The model's tokenizer. For a template with marks, a copy in which they are tokens."""
        if self.config.chat_template is None:
            return self._given
        tokenizer = copy.deepcopy(self._given)
        missing = [word for word in (MARK, SPLIT) if word not in tokenizer.get_vocab()]
        if missing:
            tokenizer.add_tokens(missing, special_tokens=True)
        return tokenizer

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        template = self.config.chat_template or self._tokenizer.get_chat_template()
        return ControlTokens(self._tokenizer, template, (MARK, SPLIT))

    @cached_property
    def _rendering(self) -> Rendering:
        return Rendering(self._tokenizer, {})

    def _prompt(self, state: Any, questions: list[Question]) -> DecisionPrompt:
        marked = self._control_tokens.marked if self.config.sanitize_control_tokens else lambda value: value
        options: dict[str, Any] = {"add_generation_prompt": True, **VARIABLES}
        if self.config.chat_template is None:
            message = self._rendering.message("user", marked(plain_prompt(state, questions[0])))
        else:
            message = {"role": "user", "content": ""}
            given = {"state": state, "question": asdict(questions[0]), "questions": [asdict(one) for one in questions]}
            options |= {name: marked(value) for name, value in given.items() if name in self._variables}
            options["chat_template"] = self.config.chat_template
        try:
            text = self._rendering.text([message], [], options)
        except TemplateRefusal as error:
            raise ValueError(error.reason) from None
        if self.config.sanitize_control_tokens:
            ids = self._control_tokens.encode(text)
        else:
            ids = list(self._tokenizer.encode(text, add_special_tokens=False))
        tokens, places = self._read_marks(ids)
        if len(places) != len(questions):
            raise ValueError(
                f"the decision template has {len(places)} places ({MARK}) for {len(questions)} questions; models that "
                "read options from hidden states are not implemented"
            )
        if places[0] < 0:
            raise ValueError(f"the decision template must have a text before {MARK}")
        return DecisionPrompt(tokens, questions, places, [self._labels(tuple(one.labels)) for one in questions])

    def _read_marks(self, ids: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns the tokens without marks, and the position before each mark. If there is no mark, that is the last
        position."""
        if self.config.chat_template is None:
            return list(ids), [len(ids) - 1]
        mark, split = self._tokenizer.convert_tokens_to_ids([MARK, SPLIT])
        tokens, places = [], []
        for index in ids:
            if index == mark:
                places.append(len(tokens) - 1)
            elif index != split:
                tokens.append(index)
        return tokens, places or [len(tokens) - 1]

    def _labels(self, labels: tuple[str, ...]) -> list[int]:
        """Returns the token of each label. Raises ValueError unless they are different, known, single tokens."""
        if labels not in self._label_ids:
            rows = self._given(list(labels), add_special_tokens=False)["input_ids"]
            unknown = getattr(self._given, "unk_token_id", None)
            found = [row[0] for row in rows if len(row) == 1 and row[0] != unknown]
            if len(set(found)) != len(labels):
                raise ValueError(f"the labels {shown(list(labels))} are not different single tokens of this model")
            self._label_ids[labels] = found
        return self._label_ids[labels]


def plain_prompt(state: Any, question: Question) -> str:
    """Returns the message that asks any chat model, as transformers words it."""
    lines = [_text(question.instructions)]
    labels = question.labels
    for option, label, description in zip(question.options, labels, map(_text, question.descriptions)):
        if question.type == "noul":
            described = description or ("" if labels == YES_OR_NO else option)
            lines.append(f"{label}: {described}" if described else "")
        elif question.type == "choice":
            lines.append(f"{label}. {option}: {description}" if description else f"{label}. {option}")
        else:
            lines.append(f"{label}. {description}")
    if question.type == "noul":
        lines.append(f"Answer {labels[0]} or {labels[1]} only.")
    else:
        name = "letter" if labels == list(string.ascii_uppercase[: len(labels)]) else "label"
        of = "option" if question.type == "choice" else "level"
        lines.append(f"Answer with the {name} of the {of} that fits best ({labels[0]} to {labels[-1]}) only.")
    *above, last = lines
    return f"{_text(state)}\n\n" + "\n".join(filter(None, above)) + f"\n{last}"


def _text(value: Any) -> str:
    """Text as it is, anything else as JSON; "" for None."""
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _without_marks(value: Any) -> Any:
    return json.loads(json.dumps(value, ensure_ascii=False).replace(MARK, "").replace(SPLIT, ""))
