"""Prompts to sequences, steps until they are done, sequences to outputs."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pace.llm.configs import SamplingConfig
from pace.llm.detokenizer import TextPieces, decode
from pace.llm.engine import Engine
from pace.llm.inputs import Prompts, read_prompts
from pace.llm.logits import build_filters, build_processors
from pace.llm.outputs import GenerateOutput, Metrics
from pace.llm.sampler import Greedy, Policy, Sampling, mix
from pace.llm.sequence import Sequence
from pace.llm.stopping_criteria import StoppingCriteria, StopStrings
from pace.llm.streamer import Feed, make_feed

logger = logging.getLogger("pace")

DEFAULT_MAX_NEW_TOKENS = 256
"""Where neither the caller nor the checkpoint says: enough for an answer, short enough to wait for on a slow machine."""


@dataclass(frozen=True)
class Prepared:
    """One call, ready to run."""

    prompts: Prompts
    config: SamplingConfig
    """With every field settled: the caller's, the checkpoint's, or the default."""
    sequences: list[Sequence]
    """`num_return_sequences` of each prompt, one prompt after the other."""


class Generator:
    """Drives an engine for one call at a time; any number of threads may use one generator."""

    def __init__(self, engine: Engine, tokenizer: Any = None, defaults: SamplingConfig | None = None) -> None:
        """`defaults` holds what the checkpoint says: its generation config, end and pad tokens. Without a tokenizer prompts are
        token ids, and there are no texts and no stop strings."""
        self.engine = engine
        self.tokenizer = tokenizer
        self.defaults = defaults or SamplingConfig()

    # -- before --------------------------------------------------------------------------------------------------------

    def prepare_for_generate(self, inputs: Any, sampling_config: SamplingConfig | None = None) -> Prepared:
        """Checks everything that can be checked before any work is done. Raises TypeError, ValueError, NotImplementedError."""
        if sampling_config is not None and not isinstance(sampling_config, SamplingConfig):
            raise TypeError(f"sampling_config must be a SamplingConfig, got {type(sampling_config).__name__}")
        asked = sampling_config or SamplingConfig()
        config = asked.copy().merge_from(self.defaults)
        config.check_consistent(asked.explicit_fields)
        self._check_against_model(config)
        prompts = read_prompts(inputs, self.tokenizer, self.engine.model.vocab_size)
        limits = [self._max_length(config, len(row), index) for index, row in enumerate(prompts.rows)]
        seed = int(torch.randint(2**63 - 1, ())) if config.seed is None else config.seed
        sequences: list[Sequence] = []
        for index, (row, limit) in enumerate(zip(prompts.rows, limits)):
            # Without a seed every prompt draws from a stream of its own; with one, as if it were alone.
            row_seed = mix((seed + index) % 2**64) if config.seed is None else seed
            sequences += self._sequences_of(row, limit, config, row_seed)
        return Prepared(prompts, config, sequences)

    def _sequences_of(self, row: list[int], limit: int, config: SamplingConfig, seed: int) -> list[Sequence]:
        """One sequence per sample of a prompt; the later ones wait to share the first one's prompt."""
        end_tokens = self._end_tokens(config)
        samples: list[Sequence] = []
        for sample in range(config.num_return_sequences):
            policy = self._policy(config, len(row), end_tokens, seed if sample == 0 else mix(seed ^ mix(sample)))
            stops = StopStrings(self.tokenizer, config.stop_strings) if config.stop_strings else None
            samples.append(Sequence(row, policy, StoppingCriteria(limit, end_tokens, stops), limit))
        samples[0].prompt_sharers = samples[1:]
        for sharer in samples[1:]:
            sharer.waits_for_prompt = True
        return samples

    def _policy(self, config: SamplingConfig, num_prompt_tokens: int, end_tokens: list[int], seed: int) -> Policy:
        processors = build_processors(config, num_prompt_tokens, end_tokens)
        if not processors and not config.do_sample and config.logprobs is None:
            return Greedy()
        return Sampling(processors, build_filters(config), seed if config.do_sample else None, config.logprobs)

    def _end_tokens(self, config: SamplingConfig) -> list[int]:
        return [] if config.ignore_eos or config.eos_token_id is None else config.eos_token_id

    def _max_length(self, config: SamplingConfig, num_prompt_tokens: int, index: int) -> int:
        """Tokens, prompt included, at which a row ends. Raises ValueError where the prompt leaves no room for one more."""
        most = self.engine.max_length
        if num_prompt_tokens >= most:
            raise ValueError(
                f"prompt {index} has {num_prompt_tokens} tokens, and prompt and output together may have {most}: "
                f"{self.engine.what_bounds(num_prompt_tokens + 1)}"
            )
        if config.max_new_tokens is not None:
            wanted = num_prompt_tokens + config.max_new_tokens
        elif config.max_length is not None:
            wanted = config.max_length
            if wanted <= num_prompt_tokens:
                raise ValueError(f"prompt {index} has {num_prompt_tokens} tokens, which max_length={wanted} leaves nothing of; set max_new_tokens")
        else:
            return min(most, num_prompt_tokens + DEFAULT_MAX_NEW_TOKENS)
        if wanted > most:
            why = self.engine.what_bounds(wanted)
            logger.warning("prompt %d with its new tokens may reach %d tokens; it ends with 'length' at %d: %s", index, wanted, most, why)
        return min(most, wanted)

    def _check_against_model(self, config: SamplingConfig) -> None:
        """Raises ValueError for token ids that the model does not have, and for stop strings without a tokenizer."""
        vocab_size = self.engine.model.vocab_size
        asked = {
            "logit_bias": config.logit_bias or (),
            "bad_words_ids": [token for word in config.bad_words_ids or () for token in word],
            "eos_token_id": self._end_tokens(config),
        }
        for name, tokens in asked.items():
            beyond = [token for token in tokens if token >= vocab_size]
            if beyond:
                raise ValueError(f"{name} names the token {beyond[0]}; this model's ids are 0 to {vocab_size - 1}")
        if config.logprobs is not None and config.logprobs > vocab_size:
            raise ValueError(f"logprobs={config.logprobs} asks for more tokens than the vocabulary's {vocab_size}")
        if config.stop_strings and self.tokenizer is None:
            raise ValueError("stop_strings need text, and this model has no tokenizer; give eos_token_id, or a tokenizer")

    # -- the run -------------------------------------------------------------------------------------------------------

    def generate(self, inputs: Any, sampling_config: SamplingConfig | None = None, streamer: Any = None) -> GenerateOutput:
        """Continues the prompts; see `LLMModel.generate`. An exception, KeyboardInterrupt included, or one of the streamer's
        frees what this call held and leaves the calls of other threads running."""
        try:
            prepared = self.prepare_for_generate(inputs, sampling_config)
            feed = make_feed(streamer, prepared.config, len(prepared.sequences))
            self._feed(feed, prepared.sequences)
        except BaseException:
            self._end_quietly(streamer)
            raise
        feed.end()
        return self._output(prepared)

    def _feed(self, feed: Feed, sequences: list[Sequence]) -> None:
        """Runs the sequences and tells `feed` as they go. However it ends, nothing of them stays in the engine."""
        feed.start([sequence.tokens[:] for sequence in sequences])
        try:
            for row, token in run(self.engine, sequences):
                if token is None:
                    feed.finished(row, sequences[row].finish_reason)
                else:
                    feed.token(row, token)
        finally:
            self.engine.abort(sequences)

    def stream(self, prompt: Any, sampling_config: SamplingConfig | None = None) -> Iterator[str]:
        """Yields the text of one prompt's continuation in pieces, which joined are its text in `generate`'s output. The model
        works when the next piece is asked for; closing the iterator ends the generation."""
        if self.tokenizer is None:
            raise ValueError("streaming text needs a tokenizer, and this model has none; use generate with a CallbackStreamer")
        prepared = self.prepare_for_generate(prompt, sampling_config)
        if len(prepared.sequences) != 1:
            raise ValueError(f"stream continues one prompt once, and this call makes {len(prepared.sequences)} texts; use generate with a CallbackStreamer")
        return Stream(self.engine, prepared.sequences[0], TextPieces(self.tokenizer, prepared.config.stop_strings))

    def _end_quietly(self, streamer: Any) -> None:
        """Lets whoever reads from the streamer know that nothing more comes; the generation's own error is the one to tell."""
        try:
            if streamer is not None:
                streamer.end()
        except Exception as error:
            logger.debug("the streamer's end() failed after a failed generation: %s", error)

    # -- after ---------------------------------------------------------------------------------------------------------

    def _output(self, prepared: Prepared) -> GenerateOutput:
        config, sequences = prepared.config, prepared.sequences
        generated = [sequence.generated for sequence in sequences]
        pad = self._pad_token(config)
        longest = max(map(len, generated))
        continuation = torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in generated], dtype=torch.int64)
        prompts = prepared.prompts.padded(pad).repeat_interleave(config.num_return_sequences, dim=0)
        texts = [sequence.stopping.trim(decode(self.tokenizer, sequence.generated)) for sequence in sequences] if self.tokenizer else []
        return GenerateOutput(
            output_token_ids=torch.cat([prompts, continuation], dim=1),
            generated_token_ids=generated,
            texts=texts,
            finish_reasons=[sequence.finish_reason for sequence in sequences],
            logprobs=None if config.logprobs is None else [sequence.logprobs for sequence in sequences],
            metrics=Metrics.of(sequences),
        )

    def _pad_token(self, config: SamplingConfig) -> int:
        if config.pad_token_id is not None:
            return config.pad_token_id
        return config.eos_token_id[0] if config.eos_token_id else 0


class Stream:
    """The text of one generation, piece by piece. Closing or dropping it ends the generation.

    No generator function: one that is dropped in a reference cycle is closed wherever the garbage collector strikes, be it in
    the middle of a step, and there it must not wait for the engine's lock.
    """

    def __init__(self, engine: Engine, sequence: Sequence, pieces: TextPieces) -> None:
        self._engine = engine
        self._sequence = sequence
        self._pieces = pieces
        self._events = run(engine, [sequence])

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> str:
        try:
            for _, token in self._events:
                piece = self._pieces.flush() if token is None else self._pieces.push(token)
                if piece:
                    return piece
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the generation, if it has not ended. Closing twice is harmless."""
        self._events = iter(())
        self._engine.abort([self._sequence])

    def __del__(self) -> None:
        self._engine.discard_later(self._sequence)


def run(engine: Engine, sequences: list[Sequence]) -> Iterator[tuple[int, int | None]]:
    """Submits the sequences and steps the engine until they are done; yields (row, token) as they come, and (row, None) as a
    row ends. To be followed by `engine.abort(sequences)`, however it ends."""
    num_told = [len(sequence.tokens) for sequence in sequences]
    live = list(range(len(sequences)))
    engine.submit(sequences)
    while live:
        engine.step()
        still_live = []
        for row in live:
            sequence = sequences[row]
            is_finished = sequence.is_finished  # before the tokens: another thread may be stepping
            while num_told[row] < len(sequence.tokens):
                num_told[row] += 1
                yield row, sequence.tokens[num_told[row] - 1]
            if sequence.error is not None:
                raise sequence.error
            if is_finished:
                yield row, None
            else:
                still_live.append(row)
        live = still_live
