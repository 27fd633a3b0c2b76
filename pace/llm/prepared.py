"""A checked call: inputs and config in final form, and the sequences that run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pace.llm.clients.beam_search import BeamSearch, Ranking, branching
from pace.llm.clients.steps import RowSteps, Steps
from pace.llm.configs import SamplingConfig
from pace.llm.constraints.masks import SequenceMask
from pace.llm.guides import Guide
from pace.llm.inputs import Prompts
from pace.llm.sampling.filters import make_filter
from pace.llm.sampling.logits import Processors, build_processors
from pace.llm.sampling.sampler import DecodingStrategy, Greedy, PromptLogprobs, Rules, Sampling, mix
from pace.llm.sequence import Sequence
from pace.llm.text.reader import TextReader
from pace.llm.text.stopping_criteria import StoppingCriteria


@dataclass(frozen=True)
class Prepared:
    """One call, ready to run."""

    prompts: Prompts
    config: SamplingConfig
    """The config with all fields set: by the caller, the checkpoint, or the default."""
    limits: list[int]
    """Maximum length of each prompt's rows, prompt included."""
    seeds: list[int]
    """Seed of each prompt."""
    guides: list[Guide]
    """Constraints on the continuations of each prompt."""
    warnings: tuple[str, ...] = ()
    """Parts of a JSON schema that are not enforced."""

    @property
    def num_rows(self) -> int:
        """Number of rows: `num_return_sequences` for each prompt."""
        return len(self.prompts.rows) * self.config.num_return_sequences

    @property
    def has_captures(self) -> bool:
        return self.guides[0].captures is not None

    @property
    def num_logprobs(self) -> int | None:
        """The config's number, or 0 if captures need the log-probabilities of the generated tokens."""
        return 0 if self.config.logprobs is None and self.has_captures else self.config.logprobs

    @property
    def row_prompts(self) -> list[list[int]]:
        """The prompt of each row."""
        return [row[:] for row in self.prompts.rows for _ in range(self.config.num_return_sequences)]

    @property
    def row_guides(self) -> list[Guide]:
        """The constraints of each row."""
        return [guide for guide in self.guides for _ in range(self.config.num_return_sequences)]

    def sequences(self, index: int, tokenizer: Any, driver: Any) -> list[Sequence]:
        """Makes one sequence per sample of a prompt. Later samples wait to share the prompt of the first one. `driver`
        runs the engine; step callbacks use it."""
        config, row = self.config, self.prompts.rows[index]
        seed, guide = self.seeds[index], self.guides[index]
        processors = Processors(build_processors(config, len(row), end_tokens_of(config)))
        stopping = self._stopping(index, tokenizer)
        samples: list[Sequence] = []
        for sample in range(config.num_return_sequences):
            own_seed = seed if sample == 0 else mix(seed ^ mix(sample))
            strategy = self._strategy(processors.fork(), own_seed)
            samples.append(Sequence(row, strategy, stopping.fork(), self.limits[index]))
            samples[-1].text_rules = guide.text_rules
            if guide.mask is not None:
                samples[-1].mask = SequenceMask(guide.mask)
            if config.step_callback is not None:
                steps = Steps(config.step_callback, config.step_every, config.step_strings or [], tokenizer, driver)
                samples[-1].steps = RowSteps(steps, index * config.num_return_sequences + sample, guide.captures)
        if config.prompt_logprobs is not None:
            samples[0].strategy = PromptLogprobs(samples[0].strategy, config.prompt_logprobs)
            samples[0].wanted_from, prompt_logprobs = 0, [None] * len(row)
            for sample in samples:
                sample.prompt_logprobs = prompt_logprobs
        samples[0].prompt_sharers = samples[1:]
        for sharer in samples[1:]:
            sharer.waits_for_prompt = True
        return samples

    def beam_search(self, index: int, tokenizer: Any) -> BeamSearch:
        """The beam search of a prompt."""
        config, row, guide = self.config, self.prompts.rows[index], self.guides[index]
        end_tokens = end_tokens_of(config)
        num_spared = branching(len(end_tokens))

        def make_strategy() -> Ranking:
            return Ranking(
                Processors(build_processors(config, len(row), end_tokens)),
                make_filter(config, num_spared),
                None if config.do_sample else num_spared * config.num_beams,
                self.num_logprobs,
            )

        stopping = self._stopping(index, tokenizer)
        search = BeamSearch(row, self.limits[index], config, stopping, make_strategy, self.seeds[index], guide.mask)
        for beam in search.rows:
            beam.text_rules = guide.text_rules
        return search

    def _stopping(self, index: int, tokenizer: Any) -> StoppingCriteria:
        text = TextReader(tokenizer, self.config.stop_strings, self.guides[index].text_rules)
        return StoppingCriteria(self.limits[index], end_tokens_of(self.config), text)

    def _strategy(self, processors: Processors, seed: int) -> DecodingStrategy:
        config = self.config
        if not processors and not config.do_sample and self.num_logprobs is None:
            return Greedy()
        return Sampling(processors, Rules.of(config), seed, self.num_logprobs, config.unmasked_logprobs)


def end_tokens_of(config: SamplingConfig) -> list[int]:
    """The tokens that end a sequence."""
    return [] if config.ignore_eos or config.eos_token_id is None else config.eos_token_id
