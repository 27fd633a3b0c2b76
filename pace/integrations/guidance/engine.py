"""guidance's engine on a model of pace: computes logits of any branch and picks the next token."""

from __future__ import annotations

import copy
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import guidance.chat
import numpy as np
from guidance._schema import EngineResponse, GenToken, GenTokenExtra, SamplingParams, StepConfig, TokenUsage
from guidance.models._engine import Engine, EngineState, LogitsOutput, Tokenizer
from guidance.models._engine._interpreter import recode_special_tokens

from pace.integrations.guidance.branches import Branches
from pace.integrations.guidance.sampling import Sampling, pick
from pace.integrations.guidance.templates import derive
from pace.llm import LLMModel
from pace.llm.chat import read_tools
from pace.llm.chat.template import ChatTemplate

MAX_ROWS = 256
"""Maximum rows of logits per call. guidance asks for all rows of a prompt to show probabilities, but does not need all
of them."""


class PaceTokenizer(Tokenizer):
    """guidance's tokenizer with the token table of pace's grammars, which is as wide as the logits."""

    def __init__(self, table: Any, tokenizer: Any, chat_template: Any) -> None:
        """`chat_template`: a subclass of guidance's ChatTemplate; None for the tokenizer's own template."""
        self._orig_tokenizer = tokenizer  # guidance reads this name
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        super().__init__(table, None, bos if adds_bos else None)
        self._chat_template = chat_template or derive(tokenizer, tokenizer.bos_token if adds_bos else "")

    def recode(self, tokens: Sequence[int]) -> list[int]:
        """Tokenizes the text of `tokens` again, up to its last complete character; the remaining tokens are kept."""
        num_whole = len(tokens)
        while num_whole > len(tokens) - 4:  # a character has at most four bytes
            try:
                text = self.decode(tokens[:num_whole]).decode()
            except UnicodeDecodeError:
                num_whole -= 1
            else:
                return self.encode(text.encode()) + list(tokens[num_whole:])
        return list(tokens)


class PaceEngine(Engine):
    """The state that all branches share: a model, and the sessions of recent branches. Thread-safe."""

    def __init__(
        self,
        model: LLMModel,
        chat_template: str | type[guidance.chat.ChatTemplate] | None,
        seed: int | None,
        max_branches: int,
        **options: Any,
    ) -> None:
        """`options` are those of guidance's Engine. Raises ValueError for a model without a tokenizer."""
        table = model.generator.constraints.grammars.table
        self.model_obj = model  # guidance reads this name
        self.hf_tokenizer = model.tokenizer
        if isinstance(chat_template, str):
            self.hf_tokenizer = copy.copy(model.tokenizer)
            self.hf_tokenizer.chat_template, chat_template = chat_template, None
        self.seed = seed
        self._branches = Branches(model.session, max_branches)
        super().__init__(PaceTokenizer(table, self.hf_tokenizer, chat_template), **options)

    def close(self) -> None:
        """Frees the sessions of all branches."""
        self._branches.close()

    def get_chat_template(self) -> guidance.chat.ChatTemplate | None:
        """Returns None if the tokenizer has no template and none was given."""
        return None if self.tokenizer.chat_template is None else self.tokenizer.chat_template()

    def __call__(
        self,
        state: EngineState,
        grammar: str,
        ensure_bos_token: bool = True,
        sampling_params: SamplingParams | None = None,
        step_config: StepConfig | None = None,
    ) -> Generator[EngineResponse, None, TokenUsage]:
        """Runs guidance's engine on the text that the model reads, which may be longer than the visible text
        (`PaceState`)."""
        reading = EngineState()
        reading.prompt = getattr(state, "read", state.prompt)
        return (yield from super().__call__(reading, grammar, ensure_bos_token, sampling_params, step_config))

    def get_logits(self, token_ids: list[int], include_all_uncached_tokens: bool = False) -> LogitsOutput:
        """Returns logits `[rows, V]` after the last token, or after all tokens that were not cached, up to MAX_ROWS.
        They are preceded by the row before them, if it is known. Raises ValueError for no tokens, or more than the
        context holds."""
        if not token_ids:
            raise ValueError("get_logits needs at least one token")
        rows, num_cached = self._branches.advance(token_ids, MAX_ROWS if include_all_uncached_tokens else 1)
        return {"logits": rows.numpy(), "n_tokens": len(token_ids), "n_cached": num_cached}

    def get_next_token_with_top_k(
        self,
        logits: np.ndarray,
        logits_lat_ms: float,
        token_ids: list[int],
        mask: bytes | None,
        temperature: float,
        k: int,
        compute_unmasked_probs: bool,
        sampling_params: SamplingParams | None,
    ) -> GenTokenExtra:
        """Picks the token after `token_ids`, and returns it with the `k` likeliest tokens. Probabilities ignore the
        mask."""
        began = time.monotonic()
        sampling = Sampling.read({"seed": self.seed, **(sampling_params or {})})
        picked = pick(logits, mask, token_ids, temperature, sampling, k if compute_unmasked_probs else None)
        latency_ms = logits_lat_ms + 1000 * (time.monotonic() - began)

        def shown(token: int, prob: float, kind: type[GenToken]) -> GenToken:
            masked = kind is GenToken and mask is not None and mask[token] == 0
            data = self.tokenizer.decode([token])
            return kind(
                token_id=token, prob=prob, bytes=data, latency_ms=latency_ms, is_generated=True, is_masked=masked
            )

        likeliest = picked.likeliest
        if picked.token not in dict(likeliest):
            likeliest = [*likeliest, (picked.token, picked.prob)]
        issued = shown(picked.token, picked.prob, GenTokenExtra)
        issued.top_k = [shown(token, prob, GenToken) for token, prob in likeliest]
        return issued

    def chat_completion_streaming(
        self, messages: Sequence[Mapping[str, Any]], grammar: str, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Generator[tuple[bytes, dict[str, Any]], None, None]:
        """Yields pieces of the answer to a conversation, constrained by a Lark grammar, and the captures of each piece.
        The tokenizer's template renders the prompt from `messages` and `tools`."""
        state = EngineState()
        state.prompt = ChatTemplate(self.hf_tokenizer).render(messages, read_tools(tools or ()))
        for response in self(state, grammar, sampling_params=SamplingParams()):
            captures = {name: _text(value) for name, value in response.capture_groups.items()}
            yield recode_special_tokens(self.tokenizer, response.new_bytes), captures


def _text(capture: bytes | list[bytes]) -> str | list[str]:
    return [one.decode() for one in capture] if isinstance(capture, list) else capture.decode()
