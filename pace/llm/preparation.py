"""Preparation of a call: inputs and config in final form, checked against the model before any work is done."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pace.llm.chat.turn import Turn
from pace.llm.clients.beam_search import check_length_penalty
from pace.llm.configs import SamplingConfig
from pace.llm.constraints.builder import ConstraintBuilder, Constraints
from pace.llm.defaults import end_tokens_of, pad_token_of, with_defaults
from pace.llm.engine.driver import EngineDriver
from pace.llm.inputs import Prompts, read_prompts
from pace.llm.processors.prompts import PromptEncoder
from pace.llm.sampling.sampler import mix
from pace.llm.sequence import AdapterKey
from pace.media.media import MediaSpan

logger = logging.getLogger("pace")

DEFAULT_MAX_NEW_TOKENS = 256
"""Default for texts that are no chat answers, if neither the caller nor the checkpoint sets a limit. It is short enough
to wait for on a slow machine."""


@dataclass(frozen=True)
class PreparedPrompt:
    """One prompt, ready to be continued."""

    tokens: list[int]
    """Token ids, without those that token healing generates again."""
    max_length: int
    """Maximum length of its rows, prompt included."""
    seed: int
    constraints: Constraints
    media: tuple[MediaSpan, ...] = ()
    """The images and sound among its tokens."""


@dataclass(frozen=True)
class PreparedCall:
    """One call, ready to run."""

    config: SamplingConfig
    """The config with all fields set: by the caller, the checkpoint, or the default."""
    prompts: list[PreparedPrompt]
    given: Tensor | None = None
    """The caller's tensor of prompts, as in `Prompts`."""
    warnings: tuple[str, ...] = ()
    """Parts of a JSON schema that are not enforced."""
    adapter: AdapterKey = ()
    """Adapters that all of its prompts are computed with."""

    @property
    def row_prompts(self) -> list[PreparedPrompt]:
        """The prompt of each row: `num_return_sequences` rows for each prompt."""
        return [prompt for prompt in self.prompts for _ in range(self.config.num_return_sequences)]

    @property
    def has_captures(self) -> bool:
        return self.prompts[0].constraints.captures is not None

    @property
    def num_logprobs(self) -> int | None:
        """The config's number, or 0 if captures need the log-probabilities of the generated tokens."""
        return 0 if self.config.logprobs is None and self.has_captures else self.config.logprobs

    @property
    def padded_prompts(self) -> Tensor:
        """int64 `[prompts, S]`, as given or padded on the left."""
        return Prompts([prompt.tokens for prompt in self.prompts], self.given).padded(pad_token_of(self.config))

    def require_one_prompt(self, caller: str, one_row: bool = False) -> PreparedCall:
        """Raises ValueError for several prompts or beam search, which `caller` does not support; with `one_row`, also
        for several rows."""
        if self.config.num_beams > 1:
            raise ValueError(
                f"{caller} streams tokens, but beam search only has them at the end: use generate, or num_beams=1"
            )
        if len(self.prompts) != 1:
            raise ValueError(f"{caller} continues one prompt, got {len(self.prompts)}; use generate")
        if one_row and self.config.num_return_sequences > 1:
            raise ValueError(
                f"{caller} returns one text, got num_return_sequences={self.config.num_return_sequences}; use "
                f"generate, or add_request and its events()"
            )
        return self


class Preparer:
    """Prepares calls for one model. Thread-safe."""

    def __init__(self, driver: EngineDriver, tokenizer: Any, defaults: SamplingConfig, encoder: PromptEncoder) -> None:
        """`defaults` are the checkpoint's settings. Without a tokenizer, prompts must be token ids."""
        self.constraints = ConstraintBuilder(tokenizer, driver.engine.model.vocab_size)
        self._driver = driver
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._encoder = encoder

    def prepare(self, inputs: Any, asked: SamplingConfig, turn: Turn | None, skip_special_tokens: bool) -> PreparedCall:
        """Implements `Generator.prepare_for_generate`."""
        engine = self._driver.engine
        config = with_defaults(asked, self._defaults, is_chat=turn is not None)
        if turn is not None and not config.has_length:
            config.max_length = engine.max_length
        config.check_consistent(asked.explicit_fields)
        self._check_against_model(config)
        model = engine.model
        names = model.towers, model_name(model)
        prompts = read_prompts(inputs, self._tokenizer, model.vocab_size, *names, self._encoder)
        max_lengths = [self._max_length(config, len(row), index) for index, row in enumerate(prompts.rows)]
        if config.num_beams > 1:
            longest = max(length - len(row) for row, length in zip(prompts.rows, max_lengths))
            check_length_penalty(config.length_penalty, longest)
        continues, hidden = turn is None or turn.continues, None if skip_special_tokens else frozenset()
        if turn is not None and (skip_special_tokens or not turn.is_plain):
            hidden = turn.hidden | frozenset(end_tokens_of(config))
        rows, warnings = self.constraints.build(config, prompts.rows, end_tokens_of(config), continues, hidden)
        seed = int(torch.randint(2**63 - 1, ())) if config.seed is None else config.seed
        # Without a seed every prompt draws from its own stream; with a seed, as if it were the only prompt.
        seeds = [mix((seed + index) % 2**64) if config.seed is None else seed for index in range(len(rows))]
        is_healed = any(constraints.text_rules.prompt_end for _, constraints in rows)
        media = prompts.media or [()] * len(rows)
        prepared = [
            PreparedPrompt(tokens, max_length, seed, constraints, placed)
            for (tokens, constraints), max_length, seed, placed in zip(rows, max_lengths, seeds, media)
        ]
        for prompt in prepared:
            if prompt.media and prompt.media[-1].end > len(prompt.tokens):
                raise ValueError("token_healing would generate the end of an image again; leave it out")
        return PreparedCall(config, prepared, None if is_healed else prompts.given, warnings)

    def _max_length(self, config: SamplingConfig, num_prompt_tokens: int, index: int) -> int:
        """Returns the maximum number of tokens in a row, prompt included. Raises ValueError if the prompt leaves no
        room for another one."""
        engine = self._driver.engine
        if num_prompt_tokens >= engine.max_length:
            raise ValueError(
                f"prompt {index} has {num_prompt_tokens} tokens, and prompt and output together may have "
                f"{engine.max_length}: {engine.explain_length_limit(num_prompt_tokens + 1)}"
            )
        if config.max_new_tokens is not None:
            wanted = num_prompt_tokens + config.max_new_tokens
        elif config.max_length is not None:
            wanted = config.max_length
            if wanted <= num_prompt_tokens:
                raise ValueError(
                    f"prompt {index} already has {num_prompt_tokens} tokens, so max_length={wanted} leaves no room for "
                    f"output; raise it or set max_new_tokens"
                )
        else:
            return min(engine.max_length, num_prompt_tokens + DEFAULT_MAX_NEW_TOKENS)
        if wanted > engine.max_length:
            logger.warning(
                "prompt %d with its new tokens may reach %d tokens; it ends with 'length' at %d: %s",
                *(index, wanted, engine.max_length, engine.explain_length_limit(wanted)),
            )
        return min(engine.max_length, wanted)

    def _check_against_model(self, config: SamplingConfig) -> None:
        """Raises ValueError for token ids that the model does not have, and for text options without a tokenizer."""
        vocab_size = self._driver.engine.model.vocab_size
        given = {
            "logit_bias": config.logit_bias or (),
            "bad_words_ids": [token for word in config.bad_words_ids or () for token in word],
            "suppress_tokens": config.suppress_tokens or (),
            "eos_token_id": end_tokens_of(config),
        }
        for name, tokens in given.items():
            unknown = next((token for token in tokens if token >= vocab_size), None)
            if unknown is not None:
                raise ValueError(f"{name} names the token {unknown}; this model's ids are 0 to {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (num_top := getattr(config, name)) is not None and num_top > vocab_size:
                raise ValueError(f"{name}={num_top} asks for more tokens than the vocabulary's {vocab_size}")
        if config.step_callback is not None and self._tokenizer is None:
            raise ValueError("step_callback needs text, and this model has no tokenizer; load one")
        if config.stop_strings and self._tokenizer is None:
            raise ValueError("stop_strings need text, and this model has no tokenizer; load one, or set eos_token_id")
        if any([token] in (config.bad_words_ids or ()) for token in end_tokens_of(config)):
            logger.warning(
                "bad_words_ids holds an end token, which is not banned (as in transformers); use ignore_eos or "
                "min_new_tokens for that"
            )


def model_name(runner: Any) -> str:
    """Name of a runner's architecture, for errors."""
    return type(getattr(runner, "model", runner)).__name__
