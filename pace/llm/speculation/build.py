"""Builds an engine's drafter from the caller's `spec_config`."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch

from pace.checkpoints.reader import CheckpointReader
from pace.llm.cache.groups import by_lifetime
from pace.llm.cache.manager import STEP_TOKENS, CacheManager, spec_of
from pace.llm.cache.state_cache import budget_for
from pace.llm.configs import KVCacheType
from pace.llm.engine.drafter import Drafter, NoDraft
from pace.llm.loading.checkpoint import Checkpoint
from pace.llm.loading.find import find_checkpoint
from pace.llm.loading.model import fill_model, make_model
from pace.llm.loading.names import name_in_model
from pace.llm.models.base_model import BaseModelForCausalLM
from pace.llm.models.drafter import DraftHeadModel
from pace.llm.models.eagle3 import Eagle3Config, Eagle3ForCausalLM, is_eagle3
from pace.llm.models.families.gemma4_assistant import (
    Gemma4AssistantForCausalLM,
    assistant_config,
    is_gemma4_assistant,
)
from pace.llm.models.mtp import MultiTokenDrafter, MultiTokenForCausalLM
from pace.llm.operators import OperatorConfig
from pace.llm.runners import make_runner
from pace.llm.speculation.configs import DraftModelConfig, MtpConfig, PardConfig, PromptLookupConfig, SpecConfig
from pace.llm.speculation.draft_assistant import DraftAssistant
from pace.llm.speculation.draft_head import DraftHead
from pace.llm.speculation.draft_length import AdaptiveLength, FixedLength
from pace.llm.speculation.draft_model import DraftModel, ParallelDraftModel, most_read
from pace.llm.speculation.drafter import SpeculativeDrafter
from pace.llm.speculation.prompt_lookup import PromptLookup
from pace.llm.speculation.source import DraftSource
from pace.ops.protocol import Ops
from pace.quant import QuantizationConfig


@dataclass
class Speculation:
    """The drafting setup of `LLMModel(spec_config=...)`, from before the weights are read until the engine is made."""

    config: SpecConfig | None
    model: BaseModelForCausalLM | None = None
    """The draft model, if there is one."""
    checkpoint: Checkpoint | None = None
    """The files of the draft model; None if it is a part of the target."""
    mask_token_id: int | None = None

    @classmethod
    def prepare(
        cls,
        config: SpecConfig | None,
        target: BaseModelForCausalLM,
        target_checkpoint: Checkpoint,
        tokenizer: Any,
        ops: Ops,
        hub: dict[str, Any],
    ) -> Speculation:
        """Finds and checks the draft model; its weights are not read yet. Sets the `taps` of a target whose rows are
        read. `hub` are arguments of `find_checkpoint`.

        Raises the errors of `LLMModel` for a checkpoint. Raises ValueError for a draft model with other tokens than the
        target's, and for a draft head of another model."""
        if config is None or isinstance(config, PromptLookupConfig):
            return cls(config)
        if isinstance(config, MtpConfig):
            check_has_mtp(target, target_checkpoint)
            return cls._of_head(config, MultiTokenDrafter(target), None, target)
        quantization = target.quantization and target.quantization.without_overrides()

        def make(checkpoint: Checkpoint) -> BaseModelForCausalLM:
            arguments = target.dtype, ops, target.kv_dtype, quantization
            head = make_head(checkpoint.config, target, *arguments) if isinstance(config, DraftModelConfig) else None
            return head or make_model(checkpoint, *arguments)

        found = find_checkpoint(
            config.model, **hub | {"revision": config.revision}, check=lambda path: make(Checkpoint(path))
        )
        checkpoint = Checkpoint(found)
        model = make(checkpoint)
        if isinstance(model, DraftHeadModel):
            return cls._of_head(config, model, checkpoint, target)
        own_tokenizer = checkpoint.load_tokenizer(model.vocab_size, required=False)
        checkpoint.forget_vocabulary()
        check_vocabularies(target.vocab_size, tokenizer, model.vocab_size, own_tokenizer)
        is_parallel = isinstance(config, PardConfig)
        mask_token_id = read_mask_token(config, checkpoint, model.vocab_size) if is_parallel else None
        return cls(config, model, checkpoint, mask_token_id)

    @classmethod
    def _of_head(
        cls, config: SpecConfig, model: DraftHeadModel, checkpoint: Checkpoint | None, target: BaseModelForCausalLM
    ) -> Speculation:
        target.taps, target.kept_before = model.target_taps, model.positions_before
        return cls(config, model, checkpoint)

    def load(self, target: BaseModelForCausalLM, threads: int, progress: bool) -> None:
        """Reads the draft model's weights; those of `target` were read."""
        if self.model is not None and self.checkpoint is not None:
            fill_model(self.model, self.checkpoint, threads, progress)
        if isinstance(self.model, DraftHeadModel):
            self.model = self.model.of_target(target)

    def cache_share(self, target: BaseModelForCausalLM, kv_cache_type: KVCacheType | str) -> Fraction:
        """Returns the draft model's fraction of the cache bytes: its share of both models' caches for the longest
        sequence. `kv_cache_type` is the target's."""
        if self.model is None or self._sees_target:
            return Fraction(0)
        length = target.max_position_embeddings
        own = budget_for(by_lifetime(self.model.kv_spec), length, STEP_TOKENS, self._max_masks)
        spec = spec_of(target.kv_spec, kv_cache_type)
        return Fraction(own, own + budget_for(spec, length, STEP_TOKENS, self.config.num_draft_tokens))

    @property
    def _sees_target(self) -> bool:
        """True if the draft model has no cache of its own."""
        return isinstance(self.model, DraftHeadModel) and self.model.target_layers is not None

    @property
    def _max_masks(self) -> int:
        """Maximum number of mask tokens of a sequence in a step of the draft model."""
        return 0 if self.mask_token_id is None else self.config.num_draft_tokens - 1

    def drafter(
        self,
        target: BaseModelForCausalLM,
        ops: Ops,
        backend: str | OperatorConfig,
        cache_bytes: int,
        keeps_prefixes: bool = True,
    ) -> Drafter:
        """Returns the drafter for an engine that runs `target`; the weights must be loaded. `cache_bytes` are the draft
        model's own. `keeps_prefixes` is False if the target has no prefix cache."""
        if self.config is None:
            return NoDraft()
        most = self.config.num_draft_tokens
        lengths = AdaptiveLength(most) if self.config.adaptive else FixedLength(most)
        source = self._source(target, ops, backend, cache_bytes, keeps_prefixes)
        return SpeculativeDrafter(source, lengths, most, target.recompute_length)

    def _source(
        self,
        target: BaseModelForCausalLM,
        ops: Ops,
        backend: str | OperatorConfig,
        cache_bytes: int,
        keeps_prefixes: bool,
    ) -> DraftSource:
        if self.model is None:
            return PromptLookup(self.config.min_ngram, self.config.max_ngram)
        is_head = isinstance(self.model, DraftHeadModel)
        weights, counts = (
            {f"draft {part}": size for part, size in found.items()}
            for found in (self.model.resident_bytes(), self.model.weight_counts())
        )
        runner = make_runner(self.model, backend)
        if self._sees_target:
            return DraftAssistant(runner, ops, target.vocab_size, weights, counts)
        cache = CacheManager(
            self.model.kv_spec,
            cache_bytes,
            prefix_cache_bytes=None if is_head and keeps_prefixes else 0,
            rope_regime=self.model.rope_regime,
            step_tokens=most_read(self.config.num_draft_tokens),
            max_drafts=self._max_masks,
        )
        arguments = runner, ops, cache, target.vocab_size, weights, counts
        if is_head:
            return DraftHead(*arguments)
        return (
            DraftModel(*arguments) if self.mask_token_id is None else ParallelDraftModel(self.mask_token_id, *arguments)
        )


def check_has_mtp(target: BaseModelForCausalLM, checkpoint: Checkpoint) -> None:
    """Raises ValueError if a checkpoint has no layer for multi-token prediction."""
    assert isinstance(target, MultiTokenForCausalLM) and target.mtp is not None, "the layer was never asked for"
    if checkpoint.gguf is not None:
        names = set(checkpoint.gguf.tensors)
    else:
        with CheckpointReader(checkpoint.path) as reader:
            names = set(reader.tensors)
    module = next(iter(target.mtp.projection.parts))
    if not any(name_in_model(target, name).startswith(f"{module}.") for name in names):
        raise ValueError(
            f'spec_config="mtp" needs a checkpoint with a layer for multi-token prediction, and {checkpoint.path} has '
            f"none (no tensor is {module}.weight); leave spec_config out, or use PromptLookupConfig or DraftModelConfig"
        )


def make_head(
    raw: dict[str, Any],
    target: BaseModelForCausalLM,
    dtype: torch.dtype,
    ops: Ops,
    kv_dtype: torch.dtype,
    quantization: QuantizationConfig | None,
) -> DraftHeadModel | None:
    """Makes the draft head that a config.json describes, without weights; None for an ordinary model. Raises ValueError
    if it is for another target."""
    model: DraftHeadModel
    if is_eagle3(raw):
        config = Eagle3Config.of_target(raw, target)
        model = Eagle3ForCausalLM(config, dtype, ops, target.hidden_size, len(target.layers))
    elif is_gemma4_assistant(raw):
        model = Gemma4AssistantForCausalLM(assistant_config(raw, target), dtype, ops, target)
    else:
        return None
    model.kv_dtype = kv_dtype
    model.quantize(quantization)
    return model


def check_vocabularies(target_size: int, target_tokenizer: Any, draft_size: int, draft_tokenizer: Any) -> None:
    """Raises ValueError unless a token id means the same to both models. Matrices padded to different sizes are allowed
    if both models have a tokenizer to compare."""
    if target_tokenizer is None or draft_tokenizer is None:
        if target_size != draft_size:
            which = "the draft model has" if draft_tokenizer is None else "the model has"
            raise ValueError(
                f"the draft model knows {draft_size} token ids and the model {target_size}, and {which} no "
                f"tokenizer to tell whether they "
                f"mean the same; give a draft model with the same tokenizer"
            )
        return
    ours, theirs = (
        {token: text for text, token in tokenizer.get_vocab().items()}
        for tokenizer in (target_tokenizer, draft_tokenizer)
    )
    for token in sorted(ours.keys() & theirs.keys()):
        if token < min(target_size, draft_size) and ours[token] != theirs[token]:
            raise ValueError(
                f"the draft model has another tokenizer: token {token} is {theirs[token]!r} to it and "
                f"{ours[token]!r} to the model; give a draft "
                f"model of the same family"
            )


def read_mask_token(config: PardConfig, checkpoint: Checkpoint, vocab_size: int) -> int:
    """Returns the mask token given by the caller, else that of config.json. Raises ValueError if there is none, or it
    is outside the vocabulary."""
    token, source, directory = config.mask_token_id, "mask_token_id", checkpoint.path
    if token is None:
        token, source = checkpoint.config.get("pard_token"), f"pard_token in {directory}/config.json"
    if token is None:
        raise ValueError(
            f"{directory}/config.json names no pard_token, so this is not a PARD model; give its mask token as "
            f"PardConfig(mask_token_id=...), or use "
            f"DraftModelConfig for an ordinary draft model"
        )
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
        raise ValueError(f"{source} must be a token id, 0 to {vocab_size - 1}; got {token!r}")
    return token
