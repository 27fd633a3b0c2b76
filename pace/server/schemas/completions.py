"""`POST /v1/completions`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from pydantic import WithJsonSchema

from pace.llm.configs import SamplingConfig
from pace.server.errors import ApiError, invalid
from pace.server.jobs import GenerationJob, TextPrompts
from pace.server.limits import Limits
from pace.server.schemas.generation import GenerationRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for completions."""


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
    suffix: str | None = None
    """Text after the gap, for models that fill gaps."""
    echo: bool | None = None
    logprobs: int | None = None

    def to_job(self, limits: Limits, defaults: SamplingConfig) -> GenerationJob:
        """Returns the job of the request. Raises ApiError for unsupported requests."""
        settings = self.settings(limits, defaults, is_chat=False)
        settings.logprobs(self.logprobs, "logprobs")
        if self.echo and self.logprobs is not None:
            settings.set("prompt_logprobs", max(self.logprobs, self.prompt_logprobs or 0))
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens=0 is only valid with echo=true", param="max_tokens")
        suffix = self.suffix or None
        if suffix is not None:
            self._check_gap()
        prompts = TextPrompts(_prompts(self.prompt), self.add_special_tokens is not False, suffix)
        job = self.job(prompts, settings, max_tokens)
        num_rows = len(prompts.items) * max(job.num_choices, settings.config.num_return_sequences)
        if num_rows > limits.prompts:
            raise ApiError(
                400, f"{len(prompts.items)} prompts times n make {num_rows} texts; the maximum is {limits.prompts}",
                param="prompt",
            )  # fmt: skip
        return replace(job, wants_prompt=True) if self.echo else job

    def _check_gap(self) -> None:
        """Raises ApiError for fields that have no meaning with a suffix."""
        if self.echo:
            raise invalid("echo", "is not supported with a suffix; leave it out")
        if self.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens", "is not supported with a suffix; shorten the prompt's text instead")


def _prompts(prompt: Any) -> list[Any]:
    """Returns the prompts, by the type of the first entry: a text, texts, token ids, or lists of token ids. The worker
    that reads the prompts checks the other entries: there may be millions."""
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return prompt
    return [prompt]
