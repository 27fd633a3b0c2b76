"""Results of a generation."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from pace.llm.configs import SamplingConfig
from pace.llm.defaults import pad_token_of
from pace.llm.models.head_cost import HeadCost
from pace.llm.sequence import Sequence, TokenLogprob
from pace.llm.text.token_texts import with_texts
from pace.memory import format_bytes
from pace.naming import counted, meant


@dataclass(frozen=True)
class Metrics:
    """Counts and speeds of one call over all its sequences, or of one sequence. `print(metrics)` shows them in a
    line."""

    num_prompt_tokens: int
    """Prompt tokens, counted for every sequence, also if several share a prompt."""
    num_reused_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_generated_tokens: int
    total_seconds: float
    seconds_waiting: float
    """Time from the call's start in the engine until its first sequence was admitted to the running ones."""
    seconds_to_first_token: float
    """Time from the call's start in the engine to the first token of any of its sequences."""
    prefill_tokens_per_second: float
    """Prompt tokens that were not reused, divided by the seconds until every sequence had its first token."""
    decode_tokens_per_second: float
    """Tokens after the first of each sequence, divided by the seconds from the first token of all to the end; 0.0
    without such tokens."""
    num_preemptions: int
    """Number of times that one of its sequences was preempted and resumed later. The first row of a beam search counts
    the preemptions of all its beams."""
    num_drafted_tokens: int
    num_accepted_tokens: int
    """Drafted tokens that were accepted."""
    num_forced_tokens: int
    """Generated tokens that were the only ones a token_mask allowed, and took no step; not counted as drafted."""
    draft_speedup: float | None
    """Speedup of decode steps by drafting: the estimated seconds without drafts for the same tokens, divided by the
    actual seconds, drafting included. The estimate uses steps without drafts measured in between. None if nothing was
    drafted, or no such step was measured."""

    @classmethod
    def of(cls, sequences: list[Sequence]) -> Metrics:
        """Computes the metrics of finished sequences. Speeds are 0.0 if their divisor is 0."""
        times = [sequence.stats for sequence in sequences]
        begin = min(each.submitted for each in times)
        end = max(each.finished or begin for each in times)
        admitted = min((each.admitted for each in times if each.admitted is not None), default=end)
        firsts = [each.first_token for each in times if each.first_token is not None]
        first, last_first = min(firsts, default=end), max(firsts, default=end)
        num_prompt = sum(sequence.num_prompt_tokens for sequence in sequences)
        num_reused = sum(each.num_reused for each in times)
        num_generated = sum(sequence.num_generated for sequence in sequences)
        num_after_first = num_generated - len(firsts)
        seconds, num_drafted = sum(each.step_seconds for each in times), sum(each.num_drafted for each in times)
        plain_seconds = sum(each.plain_seconds for each in times)
        return cls(
            num_prompt_tokens=num_prompt,
            num_reused_tokens=num_reused,
            num_generated_tokens=num_generated,
            total_seconds=end - begin,
            seconds_waiting=admitted - begin,
            seconds_to_first_token=first - begin,
            prefill_tokens_per_second=(num_prompt - num_reused) / (last_first - begin) if last_first > begin else 0.0,
            decode_tokens_per_second=num_after_first / (end - first) if num_after_first and end > first else 0.0,
            num_preemptions=sum(each.num_preemptions for each in times),
            num_drafted_tokens=num_drafted,
            num_accepted_tokens=sum(each.num_accepted for each in times),
            num_forced_tokens=sum(each.num_forced for each in times),
            draft_speedup=plain_seconds / seconds if num_drafted and seconds else None,
        )

    def __str__(self) -> str:
        reused = f" ({self.num_reused_tokens} of them reused)" if self.num_reused_tokens else ""
        drafted = (
            f", {self.num_accepted_tokens} of {self.num_drafted_tokens} drafted tokens accepted"
            if self.num_drafted_tokens
            else ""
        )
        drafted += f" ({self.draft_speedup:.2f} times as fast as without)" if self.draft_speedup else ""
        drafted += f", {self.num_forced_tokens} forced" if self.num_forced_tokens else ""
        waited = f", waited {self.seconds_waiting:.2f} s" if self.seconds_waiting >= 0.05 else ""
        preempted = f", preemptions: {self.num_preemptions}" if self.num_preemptions else ""
        return (
            f"{self.num_prompt_tokens} prompt{reused} + {self.num_generated_tokens} new tokens in "
            f"{self.total_seconds:.2f} s: first token after "
            f"{self.seconds_to_first_token * 1e3:.0f} ms, prefill {self.prefill_tokens_per_second:,.0f} tokens/s, "
            f"decode {self.decode_tokens_per_second:,.0f} tokens/s{drafted}{waited}{preempted}"
        )


@dataclass(frozen=True)
class Capture:
    """One part of a text, matched by a rule with `[capture]`."""

    name: str
    text: str
    tokens: range
    """Indices of the generated tokens that overlap this part; the first and last may contain more."""
    logprob: float
    """Sum of the log-probabilities of these tokens, defined as for `SamplingConfig.logprobs`."""


@dataclass(frozen=True)
class Transcript:
    """The words of a clip of sound."""

    text: str
    language: str | None
    """Name of the language, as given or as the model found it; None if it found none."""
    finish_reason: str
    """"stop", or "length" if the text was cut off."""
    metrics: Metrics


@dataclass(frozen=True, repr=False)
class GenerateOutput:
    """Rows of a generation: for each prompt in order, its `num_return_sequences` samples, or the best continuations of
    its beam search."""

    output_token_ids: Tensor
    """int64 `[rows, S + T]`: the prompt as given, then the generated tokens, then padding to the longest, T. Lists and
    strings of several lengths are padded on the left to the longest, S."""
    generated_token_ids: list[list[int]]
    """Token ids without padding, including the end token or stop string that ended the row."""
    texts: list[str]
    """Generated text only, without special tokens, cut before a stop string. Empty list if the model has no
    tokenizer."""
    finish_reasons: list[str]
    """"stop" (end token or stop string), "length", or "cancelled"."""
    logprobs: list[list[TokenLogprob]] | None
    """Log-probabilities of each generated token per row, if `SamplingConfig.logprobs` asked for them."""
    prompt_logprobs: list[list[TokenLogprob | None]] | None
    """Log-probabilities of each prompt token per row, if `SamplingConfig.prompt_logprobs` asked for them. None for the
    first token, which has no context, and for tokens that a cancelled row had not read."""
    metrics: Metrics
    request_metrics: list[Metrics]
    """Metrics of each row. A later sample of a prompt waits while the first one reads it."""
    captures: list[dict[str, list[Capture]]] | None = None
    """Captures per row, by name and in order: the parts of the text that the grammar's rules with `[capture]` matched.
    None for a grammar without captures. For equal captures of one name in a row, llguidance only reports the first."""
    sequence_scores: list[float] | None = None
    """Beam search scores per row. A score is the sum of the generated tokens' log-probabilities, after the processors,
    divided by the number of tokens to the power of `length_penalty`."""

    @classmethod
    def of(
        cls,
        rows: list[Sequence],
        config: SamplingConfig,
        prompts: Tensor,
        tokenizer: Any,
        captures: list[dict[str, list[Capture]]] | None,
    ) -> GenerateOutput:
        """Makes the output of finished sequences. `prompts [prompts, S]` are padded; each has `num_return_sequences`
        rows."""
        generated = [row.generated for row in rows]
        pad, longest = pad_token_of(config), max(map(len, generated))
        padded = [tokens + [pad] * (longest - len(tokens)) for tokens in generated]
        prompts = prompts.repeat_interleave(config.num_return_sequences, dim=0)
        logprobs = prompt_logprobs = None
        if config.logprobs is not None:  # drafts may have been scored beyond the token that ended the row
            logprobs = [with_texts(row.logprobs[: row.num_generated], tokenizer) for row in rows]
        if config.prompt_logprobs is not None:
            prompt_logprobs = [with_texts(row.prompt_logprobs, tokenizer) for row in rows]
        return cls(
            output_token_ids=torch.cat([prompts, torch.tensor(padded, dtype=torch.int64)], dim=1),
            generated_token_ids=generated,
            texts=[row.stopping.text.text_of(row.generated) for row in rows] if tokenizer else [],
            finish_reasons=[row.finish_reason for row in rows],
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            captures=captures,
            metrics=Metrics.of(rows),
            request_metrics=[Metrics.of([row]) for row in rows],
            sequence_scores=None if config.num_beams == 1 else [row.score for row in rows],
        )

    def __repr__(self) -> str:
        """The beginnings of the first texts, and counts."""
        texts = self.texts or [f"tokens {tokens}" for tokens in self.generated_token_ids]
        rows = [
            f"  {_beginning(text)} ({len(tokens)} tokens, {reason!r})"
            for text, tokens, reason in zip(texts[:SHOWN_ROWS], self.generated_token_ids, self.finish_reasons)
        ]
        rows += [f"  and {len(texts) - SHOWN_ROWS} more"] if len(texts) > SHOWN_ROWS else []
        return "\n".join([f"GenerateOutput of {counted(len(texts), 'text')}:", *rows])

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError that suggests a field."""
        known = [field.name for field in fields(self)]
        raise AttributeError(f"GenerateOutput has no attribute {name!r}{meant(_ELSEWHERE.get(name, name), known)}")

    def __getitem__(self, row: Any) -> Any:
        """Raises TypeError that names the lists with a row."""
        raise TypeError(
            f"GenerateOutput is not a list: texts[{row!r}] has the text of a row, and generated_token_ids[{row!r}] its "
            "tokens"
        )


_ELSEWHERE = {"text": "texts", "generated_text": "texts", "outputs": "texts", "choices": "texts"}
_ELSEWHERE |= {"sequences": "output_token_ids", "token_ids": "generated_token_ids"}
"""Other tools' names, and the field that has the same."""


SHOWN_ROWS, SHOWN_CHARACTERS = 5, 80


def _beginning(text: str) -> str:
    return repr(text[:SHOWN_CHARACTERS]) + ("..." if len(text) > SHOWN_CHARACTERS else "")


@dataclass(frozen=True, repr=False)
class MemoryReport:
    """Memory of a model, in bytes. `print(report)` shows it as a table."""

    weights: dict[str, int]
    """Resident weights by part of the model: the class of a layer, such as "Attention"."""
    weight_counts: dict[str, int]
    """Number of weights in each part."""
    cache_used: int
    """Keys, values and states of sequences and sessions."""
    cache_kept: int
    """Keys, values and states that only the prefix cache keeps, until sequences need the memory."""
    cache_touched: int
    """Memory of the cache that was written at least once, which is resident."""
    cache_budget: int
    """Maximum size of the cache."""
    cache_tokens: int
    """Capacity of the budget in tokens of all sequences together; of one sequence, if layers with a window free
    blocks."""
    cache_token_bytes: float
    """Bytes of keys and values that one more token of a long sequence adds. Layers with a window add none: they free as
    much as they take."""
    process: int
    """Resident memory of the whole process; 0 if the system does not report it."""
    cache_slot_bytes: int = 0
    """Bytes of the states of one sequence, which do not grow with its length; 0 for a model without states."""
    cache_slots: int = 0
    """Number of states of whole sequences that fit into the budget, besides the tokens."""
    mapped: int = 0
    """Bytes of the weights that stay in a file (`weights="mapped"`), cached in memory if there is room. Also those of
    tables that are read row by row."""
    head: HeadCost | None = None
    """Size of the LM head, and its share of the weights that a token reads."""

    @property
    def total(self) -> int:
        """Weights and touched cache."""
        return sum(self.weights.values()) + self.cache_touched

    def compression(self, part: str | None = None, bits: int = 16) -> float:
        """Compression ratio of the weights of a part, or of all. It is their size at `bits` bits each (16 for bfloat16,
        32 for float32), divided by their actual size. 1.0 without weights."""
        parts = self.weights if part is None else [part]
        taken, count = (sum(sizes[part] for part in parts) for sizes in (self.weights, self.weight_counts))
        return count * bits / 8 / taken if taken else 1.0

    def __repr__(self) -> str:
        return (
            f"MemoryReport(weights: {format_bytes(sum(self.weights.values()))}, cache: "
            f"{format_bytes(self.cache_touched)} of "
            f"{format_bytes(self.cache_budget)}, process: {format_bytes(self.process)})"
        )

    def __str__(self) -> str:
        lines = [f"{'times smaller than':>75}\n{'':<56}{'float32':>10}{'bfloat16':>10}"]
        for part in [*sorted(self.weights, key=lambda part: -self.weights[part]), None]:
            name, size = (
                ("all weights", sum(self.weights.values()))
                if part is None
                else (f"weights: {part}", self.weights[part])
            )
            lines.append(
                f"{name:<40}{size / 2**20:>12,.1f} "
                f"MiB{self.compression(part, 32):>10.2f}{self.compression(part, 16):>10.2f}"
            )
        rows = [
            ("cache, in use", self.cache_used),
            ("cache, kept prefixes", self.cache_kept),
            ("cache, touched", self.cache_touched),
        ]
        rows += [(f"cache, budget ({self.cache_tokens:,} tokens)", self.cache_budget)]
        rows += [("cache, 1,000 more tokens of a long text", 1000 * self.cache_token_bytes)]
        states = f"cache, states of one text ({self.cache_slots:,} fit)"
        rows += [(states, self.cache_slot_bytes)] if self.cache_slot_bytes else []
        rows += [("of the weights, in a file", self.mapped)] if self.mapped else []
        rows += [("weights and touched cache", self.total), ("process, resident", self.process)]
        lines += [f"{name:<40}{size / 2**20:>12,.1f} MiB" for name, size in rows]
        return "\n".join(lines + ([] if self.head is None else [str(self.head)]))
