"""The body of `POST /v1/systemone`, in the form of System One's API, as transformers serves it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field

from pace.llm.decisions.config import DecisionConfig
from pace.llm.decisions.decide import Decider
from pace.server.errors import ApiError
from pace.server.prompts import PromptReader
from pace.server.schemas.fields import Request

if TYPE_CHECKING:
    from pace.llm.decisions.prompts import DecisionPrompt

MAX_QUESTIONS = 64


class DecisionRequest(Request):
    """A state and questions about it. Unlike elsewhere, an unknown field is an error: it may be a misspelt part."""

    model_config = ConfigDict(extra="forbid")

    UNSUPPORTED = {"assets": "images in decisions are not supported"}

    state: str | dict[str, Any] | list[Any]
    questions: Annotated[dict[str, dict[str, Any]], Field(min_length=1, max_length=MAX_QUESTIONS)]
    """Name -> question (docs/decisions.md)."""
    assets: dict[str, Any] | None = None

    def read(self, decider: Decider, reader: PromptReader) -> tuple[DecisionConfig, list[DecisionPrompt]]:
        """Returns the model's settings, and the prompts of the request. Runs in a worker. Raises ApiError."""
        whole = {"state": self.state, "questions": max(self.questions.values(), key=lambda one: len(str(one)))}
        reader.check_bytes(len(json.dumps(whole, ensure_ascii=False).encode(errors="replace")), "state")
        try:
            maker = decider.prompts()
        except ValueError as error:  # no tokenizer, or no chat template
            raise ApiError(400, str(error), param="model") from None
        try:
            prompts = maker.read(self.state, self.questions)
        except ValueError as error:
            raise ApiError(400, str(error), param="questions") from None
        for prompt in prompts:
            reader.check_length(prompt.tokens, "state")
        return maker.config, prompts
