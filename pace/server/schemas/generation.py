"""Fields shared by chat and completions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, create_model

from pace.llm.configs import SamplingConfig
from pace.llm.limits import MAX_PRIORITY
from pace.ops.rules import Rules
from pace.server.adapters.request import read_scales
from pace.server.errors import ApiError, invalid
from pace.server.jobs import ChatPrompt, GenerationJob, TextPrompts
from pace.server.limits import Limits
from pace.server.schemas.fields import Bounded, Integers, Strings, check_range, check_salt
from pace.server.schemas.sampling import Settings
from pace.server.schemas.structure import StructuredRequest

MAX_TOKENS = 2**31 - 1
BUDGETS = ("thinking_budget", "thinking_token_budget", "reasoning_budget_tokens", "thinking_budget_tokens")
"""Names of the thinking budget at the top level."""
MEDIA_OPTIONS = "how images and sound are prepared is set by the model and the server"


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    """Adds a last chunk with the usage."""
    continuous_usage_stats: bool | None = None
    """Adds the usage so far to every chunk."""
    include_obfuscation: bool | None = None
    """Accepted without effect."""


_RULES = {name: (kind | None, None) for name, kind in get_type_hints(Rules).items()}


class GenerationRequest(create_model("RuleFields", __base__=StructuredRequest, **_RULES)):
    """The rules of a draw, OpenAI's fields, then those of vLLM and llama.cpp that the same clients send."""

    UNSUPPORTED = {
        "use_beam_search": "beam search is not supported over HTTP; use best_of, or LLMModel.generate with num_beams",
        "prompt_embeds": "embeddings are not supported as input",
        "logits_processors": "code from clients is not run",
        "lora_request": "name an adapter as the model",
        "custom_logit_processor": "code from clients is not run",
        "lora_path": "name an adapter as the model",
        "stop_regex": "a stop is a text: send stop",
        "no_stop_trim": "send include_stop_str_in_output",
        "store": "nothing is stored here",
        "mm_processor_kwargs": MEDIA_OPTIONS,
        "media_io_kwargs": MEDIA_OPTIONS,
    }
    UNUSED = StructuredRequest.UNUSED | set(
        "user metadata safety_identifier prompt_cache_key prompt_cache_retention verbosity request_id "
        "spaces_between_special_tokens skip_reading_prefix_cache".split()
    )

    max_tokens: int | None = None
    n: int | None = None
    stop: str | Strings | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Bounded] | None = None
    service_tier: Literal["auto", "default"] | None = None
    """There is only one tier."""

    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    """vLLM's name of the thinking budget; the next two are llama.cpp's."""
    reasoning_budget_tokens: int | None = None
    thinking_budget_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Integers | None = None
    allowed_token_ids: Integers | None = None
    bad_words: Strings | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    best_of: int | None = None
    lora: list[Any] | None = None
    """llama.cpp's list of adapters: `{"id", "scale"}` each."""

    def settings(
        self,
        limits: Limits,
        defaults: SamplingConfig,
        is_chat: bool,
        budgets: Mapping[str, int | None] = MappingProxyType({}),
    ) -> Settings:
        """Returns the settings for sampling and stopping. `budgets`: further names of the thinking budget. Raises
        ApiError."""
        settings = Settings(limits, defaults, is_chat)
        settings.draws(self)
        for name in ("repetition_penalty", "no_repeat_ngram_size", "frequency_penalty", "presence_penalty"):
            settings.set(name, getattr(self, name))
        settings.set("min_new_tokens", self.min_tokens, "min_tokens")
        settings.thinking_budget({name: getattr(self, name) for name in BUDGETS} | dict(budgets))
        settings.seed(self.seed)
        settings.stop(self.stop)
        settings.end_tokens(self.stop_token_ids, bool(self.ignore_eos))
        settings.logit_bias(self.logit_bias)
        settings.allowed_tokens(self.allowed_token_ids)
        settings.logprobs(self.prompt_logprobs, "prompt_logprobs", "prompt_logprobs")
        return settings

    def job(
        self,
        prompt: ChatPrompt | TextPrompts,
        settings: Settings,
        max_tokens: int | None,
        max_tokens_param: str = "max_tokens",
    ) -> GenerationJob:
        """Returns the job of these fields. `max_tokens_param` is the client's name for `max_tokens`. Raises
        ApiError."""
        n = 1 if self.n is None else self.n
        num_computed = n if self.best_of is None else self.best_of
        settings.num_choices(n)
        if self.best_of is not None:
            settings.num_choices(num_computed, "best_of")
            if num_computed < n:
                raise ApiError(400, f"best_of={num_computed} is less than n={n}", param="best_of")
            if self.stream and num_computed > n:
                raise invalid("best_of", "cannot be streamed: the best choices are known only at the end")
            if num_computed > n and settings.config.logprobs is None:
                settings.set("logprobs", 0)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "cannot be streamed")
        check_range(max_tokens_param, max_tokens, 0, MAX_TOKENS)
        check_range("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_TOKENS)
        check_range("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        if self.min_tokens is not None and max_tokens is not None and self.min_tokens > max_tokens:
            raise ApiError(
                400, f"min_tokens={self.min_tokens} is more than {max_tokens_param}={max_tokens}", param="min_tokens"
            )
        check_salt(self.cache_salt, settings.limits)
        bad_words = self.bad_words or []
        if len(bad_words) > settings.limits.token_lists or not all(bad_words):
            raise invalid("bad_words", f"may have at most {settings.limits.token_lists} words, and none may be empty")
        return GenerationJob(
            prompt,
            settings.config,
            max_tokens,
            num_choices=n,
            stream=bool(self.stream),
            truncate_prompt=self.truncate_prompt_tokens,
            priority=-(self.priority or 0),  # lower is earlier on the wire
            cache_salt=self.cache_salt,
            lora=read_scales(self.lora, settings.limits),
            bad_words=bad_words,
            tokens_named=settings.tokens_named,
            budget_param=settings.budget_param,
            wants_prompt=bool(self.return_token_ids) or self.prompt_logprobs is not None,
            wants_tokens=settings.config.logprobs is not None or bool(self.return_token_ids),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            structure=self.structure(),
        )
