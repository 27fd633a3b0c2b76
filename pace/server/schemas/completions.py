"""`POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from pace.llm.configs import SamplingConfig
from pace.server.errors import ApiError
from pace.server.jobs import Job, TextPrompts
from pace.server.limits import Limits
from pace.server.schemas.generation import INERT, REFUSED, GenerationRequest

COMPLETIONS_REFUSED = REFUSED | {
    "suffix": "this model was not trained to fill a gap",
}
COMPLETIONS_INERT = INERT

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for completions."""


_IDS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _IDS,
        {"type": "array", "minItems": 1, "items": _IDS},
    ]
}


class CompletionsRequest(GenerationRequest):
    prompt: Annotated[Any, WithJsonSchema(_PROMPT)]
    echo: bool | None = None
    logprobs: int | None = None

    def to_job(self, limits: Limits, defaults: SamplingConfig) -> Job:
        """Raises ApiError for what cannot be served."""
        settings = self.settings(limits, defaults, is_chat=False)
        settings.logprobs(self.logprobs, "logprobs")
        if self.echo and self.logprobs is not None:
            settings.set("prompt_logprobs", max(self.logprobs, self.prompt_logprobs or 0))
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens: 0 needs echo, or nothing is answered", param="max_tokens")
        prompts = TextPrompts(_prompts(self.prompt), self.add_special_tokens is not False)
        job = self.job(prompts, settings, max_tokens)
        num_rows = len(prompts.items) * max(job.num_choices, settings.config.num_return_sequences)
        if num_rows > limits.prompts:
            raise ApiError(
                400, f"{len(prompts.items)} prompts times n are {num_rows} texts; {limits.prompts} are the most",
                param="prompt",
            )  # fmt: skip
        job.echo = bool(self.echo)
        job.wants_prompt |= job.echo
        return job


def _prompts(prompt: Any) -> list[Any]:
    """The prompts, by the first entry: a text, texts, token ids, or lists of token ids. The other entries are looked at
    by the worker that reads them: there may be millions."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return prompt
    return [prompt]
