"""The sequences of a prepared call."""

from __future__ import annotations

from typing import Any

from pace.llm.clients.beam_search import BeamSearch, BeamStrategy, candidates_per_beam
from pace.llm.clients.steps import RowSteps, Steps
from pace.llm.constraints.masks import SequenceMask
from pace.llm.defaults import end_tokens_of
from pace.llm.engine.driver import EngineDriver
from pace.llm.preparation import PreparedCall, PreparedPrompt
from pace.llm.sampling.filters import make_filter
from pace.llm.sampling.logits import Processors, build_processors
from pace.llm.sampling.sampler import Sampling, mix, prompt_logprobs_collector, rules_of
from pace.llm.sequence import Sequence, TokenLogprob
from pace.llm.text.reader import TextReader
from pace.llm.text.stopping_criteria import StoppingCriteria


def make_samples(call: PreparedCall, index: int, tokenizer: Any, driver: EngineDriver) -> list[Sequence]:
    """Makes one sequence per sample of a prompt. Later samples wait to share the prompt of the first. `driver` is for
    step callbacks."""
    config, prompt = call.config, call.prompts[index]
    processors, stopping = _processors(call, prompt), _stopping(call, prompt, tokenizer)
    samples: list[Sequence] = []
    for number in range(config.num_return_sequences):
        seed = mix(prompt.seed ^ mix(number)) if number else prompt.seed
        strategy = Sampling(processors.fork(), rules_of(config), seed, call.num_logprobs, config.unmasked_logprobs)
        sample = Sequence(prompt.tokens, strategy, stopping.fork(), prompt.max_length)
        sample.text_rules = prompt.constraints.text_rules
        sample.media, sample.adapter = prompt.media, call.adapter
        if prompt.constraints.mask is not None:
            sample.mask = SequenceMask(prompt.constraints.mask)
        if config.step_callback is not None:
            steps = Steps(config.step_callback, config.step_every, config.step_strings or [], tokenizer, driver)
            row = index * config.num_return_sequences + number
            sample.steps = RowSteps(steps, row, prompt.constraints.captures)
        samples.append(sample)
    first = samples[0]
    if config.prompt_logprobs is not None:
        record: list[TokenLogprob | None] = [None] * len(prompt.tokens)
        first.strategy = prompt_logprobs_collector(prompt.tokens, record, config.prompt_logprobs, first.strategy)
        first.wanted_from = 0
        for sample in samples:
            sample.prompt_logprobs = record
    first.share_prompt(samples[1:])
    return samples


def make_beam_search(call: PreparedCall, index: int, tokenizer: Any) -> BeamSearch:
    """Makes the beam search of a prompt."""
    config, prompt = call.config, call.prompts[index]
    num_spared = candidates_per_beam(len(end_tokens_of(config)))

    def make_strategy() -> BeamStrategy:
        num_kept = None if config.do_sample else num_spared * config.num_beams
        filter_ = make_filter(config, num_spared)
        return BeamStrategy(_processors(call, prompt), filter_, num_kept, call.num_logprobs)

    stopping, mask = _stopping(call, prompt, tokenizer), prompt.constraints.mask
    search = BeamSearch(prompt.tokens, prompt.max_length, config, stopping, make_strategy, prompt.seed, mask)
    for beam in search.rows:
        beam.text_rules = prompt.constraints.text_rules
        beam.media, beam.adapter = prompt.media, call.adapter
    return search


def _processors(call: PreparedCall, prompt: PreparedPrompt) -> Processors:
    return Processors(build_processors(call.config, len(prompt.tokens), end_tokens_of(call.config)))


def _stopping(call: PreparedCall, prompt: PreparedPrompt, tokenizer: Any) -> StoppingCriteria:
    text = TextReader(tokenizer, call.config.stop_strings, prompt.constraints.text_rules)
    return StoppingCriteria(prompt.max_length, end_tokens_of(call.config), text)
