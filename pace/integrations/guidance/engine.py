"""guidance's engine on a model of pace: logits of any branch, and the next token of each."""

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

MOST_ROWS = 256
"""Rows of logits that one call gives. guidance asks for all of a prompt's to show probabilities, and does without those
that are missing."""


class PaceTokenizer(Tokenizer):
    """The table of tokens that pace's own grammars have: as wide as the model's logits."""

    def __init__(self, table: Any, tokenizer: Any, chat_template: Any) -> None:
        """`chat_template`: a subclass of guidance's ChatTemplate, or None for that of the tokenizer."""
        self._orig_tokenizer = tokenizer  # guidance's name for it
        bos = tokenizer.bos_token_id
        adds_bos = bos is not None and tokenizer("a")["input_ids"][:1] == [bos]
        super().__init__(table, None, bos if adds_bos else None)
        self._chat_template = chat_template or derive(tokenizer, tokenizer.bos_token if adds_bos else "")

    def recode(self, tokens: Sequence[int]) -> list[int]:
        """The tokens of the text that `tokens` are, as far as it ends with a whole character; then the others."""
        num_whole = len(tokens)
        while num_whole > len(tokens) - 4:  # a character has four bytes at most
            try:
                text = self.decode(tokens[:num_whole]).decode()
            except UnicodeDecodeError:
                num_whole -= 1
            else:
                return self.encode(text.encode()) + list(tokens[num_whole:])
        return list(tokens)


class PaceEngine(Engine):
    """What branches of programs share: a model, and the sessions of the last branches. Safe to use from several
    threads."""

    def __init__(
        self,
        model: LLMModel,
        chat_template: str | type[guidance.chat.ChatTemplate] | None,
        seed: int | None,
        max_branches: int,
        **options: Any,
    ) -> None:
        """`options` are those of guidance's Engine. Raises ValueError for a model without a tokenizer."""
        table = model.generator.guides.grammars.table
        self.model_obj = model  # guidance's name for it
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
        """None where the tokenizer has no template, and none was given."""
        return None if self.tokenizer.chat_template is None else self.tokenizer.chat_template()

    def __call__(
        self,
        state: EngineState,
        grammar: str,
        ensure_bos_token: bool = True,
        sampling_params: SamplingParams | None = None,
        step_config: StepConfig | None = None,
    ) -> Generator[EngineResponse, None, TokenUsage]:
        """As guidance's, on what the model is to read, which may be more than what is shown (`PaceState`)."""
        reading = EngineState()
        reading.prompt = getattr(state, "read", state.prompt)
        return (yield from super().__call__(reading, grammar, ensure_bos_token, sampling_params, step_config))

    def get_logits(self, token_ids: list[int], include_all_uncached_tokens: bool = False) -> LogitsOutput:
        """Logits `[rows, V]` of what follows the last tokens: one row, or those of all that were not cached, up to
        MOST_ROWS. The row before them is there, too, where it is known. Raises ValueError for no tokens, and for more
        than the context holds."""
        if not token_ids:
            raise ValueError("get_logits needs at least one token")
        rows, num_cached = self._branches.advance(token_ids, MOST_ROWS if include_all_uncached_tokens else 1)
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
        """The token after `token_ids`, and the `k` likeliest. Probabilities are those without the mask."""
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
        """Pieces of the answer to a conversation, of a Lark grammar, each with what it captured. The prompt is what the
        tokenizer's template makes of `messages` and `tools`."""
        state = EngineState()
        state.prompt = ChatTemplate(self.hf_tokenizer).render(messages, read_tools(tools or ()))
        for response in self(state, grammar, sampling_params=SamplingParams()):
            captures = {name: _text(value) for name, value in response.capture_groups.items()}
            yield recode_special_tokens(self.tokenizer, response.new_bytes), captures


def _text(capture: bytes | list[bytes]) -> str | list[str]:
    return [one.decode() for one in capture] if isinstance(capture, list) else capture.decode()
