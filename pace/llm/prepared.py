"""A call that is checked and settled: what the generator makes of inputs and a config."""

from __future__ import annotations

from dataclasses import dataclass

from pace.llm.configs import SamplingConfig
from pace.llm.guides import Guide
from pace.llm.inputs import Prompts


@dataclass(frozen=True)
class Prepared:
    """One call, ready to run."""

    prompts: Prompts
    config: SamplingConfig
    """With every field settled: the caller's, the checkpoint's, or the default."""
    limits: list[int]
    """Tokens at which each prompt ends, its own included."""
    seeds: list[int]
    """Seed of each prompt."""
    guides: list[Guide]
    """What the continuations of each prompt are held to."""
    warnings: tuple[str, ...] = ()
    """What of a JSON schema is not enforced."""

    @property
    def num_rows(self) -> int:
        """`num_return_sequences` of each prompt, one prompt after the other."""
        return len(self.prompts.rows) * self.config.num_return_sequences

    @property
    def has_captures(self) -> bool:
        return self.guides[0].captures is not None

    @property
    def num_logprobs(self) -> int | None:
        """As in the config, or 0 where captures need those of the generated tokens."""
        return 0 if self.config.logprobs is None and self.has_captures else self.config.logprobs

    @property
    def row_prompts(self) -> list[list[int]]:
        """The prompt of each row."""
        return [row[:] for row in self.prompts.rows for _ in range(self.config.num_return_sequences)]

    @property
    def row_guides(self) -> list[Guide]:
        """The guide of each row."""
        return [guide for guide in self.guides for _ in range(self.config.num_return_sequences)]
