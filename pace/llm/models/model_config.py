"""A strict reader of config.json: every field is checked by type and range, and unsupported values are refused by
name.

Each architecture declares a frozen dataclass whose fields are its hyperparameters under the names of config.json, with
the defaults that `transformers` documents for it:

    hidden_size: int = count(4096)
    rms_norm_eps: float = number(1e-6, 0.0, 1.0)

`from_dict` then treats the fields of a config.json in four ways:

- declared: read and checked. A wrong type or value is a ValueError with the field, its value and what is allowed.
- `only`: changes the mathematics, and only the listed values are implemented. Another one is a NotImplementedError.
- `HARMLESS`: does not affect inference (training, bookkeeping, tokens); ignored.
- anything else: ignored as `transformers` ignores it, with one warning in the log that lists the names.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar

from pace._C import MAX_HEAD_DIM
from pace.checkpoints.quantized import Method, read_quant_method
from pace.naming import shown

logger = logging.getLogger("pace")

MAX_COUNT = 2**24
"""Upper bound of every size but positions. The largest vocabulary of a real model is 2^18.6, the largest MLP 2^18."""
MAX_LAYERS = 2**12
"""Layers are Python objects that exist before the checkpoint is checked; the deepest known model has 126."""
MAX_KERNEL = 2**8
"""Width of a causal convolution; the widest of a known model is 7."""
MAX_POSITIONS = 2**31 - 1
"""Positions are int32 in the kernels."""

HARMLESS = re.compile(
    r"""architectures|model_type|auto_map|transformers_version|(_name_or|name_or|_)path|_.*|torch_dtype|dtype|use_cache
    |(bos|eos|pad|sep|cls|unk|mask|decoder_start|forced_[be]os)_token_id|(forced|suppress|begin_suppress)_(bos_|eos_)?token(s|_id)?
    |.*(drop|dropout|dropout_prob|pdrop|layerdrop)|attn_implementation|initializer_range|init_std|gradient_checkpointing|is_decoder|return_dict.*|output_.*
    |tokenizer_class|torchscript|task_specific_params|problem_type|id2label|label2id|num_labels|finetuning_task|summary_.*
    |prefix|use_bfloat16|tf_legacy_loss|unsloth_.*|temperature|top_[kp]|typical_p|min_p|num_beams|num_beam_groups|do_sample
    |repetition_penalty|length_penalty|diversity_penalty|encoder_no_repeat_ngram_size|no_repeat_ngram_size|bad_words_ids
    |early_stopping|max_length|min_length|num_return_sequences|remove_invalid_values|exponential_decay_length_penalty
    |sentence_transformers|sbert_ce_default_activation_function|(is_)?matryoshka(_dimensions)?|is_original_qwen3_reranker
    |classifier_from_token|chunk_size_feed_forward|neftune_.*|router_(aux|z)_loss_coef|router_jitter_noise|compression_config|pretraining_tp|pard_token|spd_type""",
    re.VERBOSE,
)
"""Fields that do not affect a forward pass, as written by transformers and common training code."""

OF_THE_WHOLE = frozenset(
    """architectures model_type tie_word_embeddings bos_token_id eos_token_id pad_token_id quantization_config
    compression_config""".split()
)
"""Fields at the top level, outside of `text_config`, that also apply to the text part."""


# -----------------------------------------------------------------------------------------------------------
# kinds of field


def declared(default: Any, read: Callable[[Any], Any]) -> Any:
    """A dataclass field of config.json. `read(value)` returns the value, or raises a ValueError with what is
    allowed."""
    return dataclasses.field(default=default, metadata={"read": read})


def count(default: int | None, maximum: int = MAX_COUNT, minimum: int = 1, optional: bool = False) -> Any:
    """An integer in `minimum..maximum`; null if `optional`."""

    def read(value: Any) -> int | None:
        if optional and value is None:
            return None
        if type(value) is not int or not minimum <= value <= maximum:
            raise ValueError(f"an integer in {minimum}..{maximum}" + (" or null" if optional else ""))
        return value

    return declared(default, read)


def number(default: float | None, low: float, high: float, optional: bool = False) -> Any:
    """A finite number with `low <= x <= high`; null if `optional`."""

    def read(value: Any) -> float | None:
        if optional and value is None:
            return None
        try:
            return read_number(value, low, high)
        except ValueError as error:
            raise ValueError(f"{error} or null" if optional else error) from None

    return declared(default, read)


def flag(default: bool) -> Any:
    """A boolean: true or false."""

    def read(value: Any) -> bool:
        if type(value) is not bool:
            raise ValueError("true or false")
        return value

    return declared(default, read)


def choice(default: str, values: tuple[str, ...]) -> Any:
    """One of some strings."""

    def read(value: Any) -> str:
        if value not in values:
            raise ValueError(f"one of {', '.join(values)}")
        return value

    return declared(default, read)


def activation(default: str) -> Any:
    """The name of an activation, converted to the name in `pace.ops`."""
    return declared(default, read_activation)


def token_ids(default: int | tuple[int, ...] | None) -> Any:
    """A token id, a list of them or null. Ids outside of the vocabulary (some checkpoints write -1) are left to the
    caller."""

    def read(value: Any) -> int | tuple[int, ...] | None:
        if value is None or type(value) is int:
            return value
        if isinstance(value, list) and all(type(item) is int for item in value):
            return tuple(value)
        raise ValueError("an integer, a list of integers or null")

    return declared(default, read)


ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_fast",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
}
"""transformers' name -> name in `pace.ops`, for all implemented activations."""


def read_activation(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"one of {', '.join(ACTIVATION_NAMES)}")
    if value not in ACTIVATION_NAMES:
        raise NotImplementedError(
            f"the activation {value!r} is not implemented; implemented: {', '.join(ACTIVATION_NAMES)}"
        )
    return ACTIVATION_NAMES[value]


def read_number(value: Any, low: float, high: float) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        raise ValueError(f"a number in {low:g}..{high:g}")
    return float(value)


# -------------------------------------------------------------------------------------------------------------
# the reader


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Config of any architecture. Subclasses add their fields, and properties derived from them."""

    vocab_size: int = count(32000)
    max_position_embeddings: int = count(2048, MAX_POSITIONS)
    tie_word_embeddings: bool = flag(False)
    bos_token_id: int | tuple[int, ...] | None = token_ids(None)
    eos_token_id: int | tuple[int, ...] | None = token_ids(None)
    pad_token_id: int | tuple[int, ...] | None = token_ids(None)
    quantization_config: Method | None = None
    """The quantisation method of the checkpoint."""

    aliases: ClassVar[dict[str, str]] = {}
    """Other spellings of fields: name in config.json -> name of the field."""

    only: ClassVar[dict[str, tuple]] = {
        "is_encoder_decoder": (False,),
        "tie_encoder_decoder": (False,),
        "add_cross_attention": (False,),
        "cross_attention_hidden_size": (None,),
        "pruned_heads": (None, {}),
        "attn_logit_softcapping": (None,),
        "attn_logit_softcap": (None,),
        "logit_softcap": (None,),
        "clip_qkv": (None,),
        "final_logit_softcapping": (None,),
        "logit_scale": (None, 1.0, 1),
        "logits_scaling": (None, 1.0, 1),
        "embedding_multiplier": (None, 1.0, 1),
        "residual_multiplier": (None, 1.0, 1),
        "attention_multiplier": (None,),
        "query_pre_attn_scalar": (None,),
        "num_experts": (None, 0),
        "n_experts": (None, 0),
        "moe_num_experts": (None, 0),
        "num_local_experts": (None, 0),
        "num_experts_per_tok": (None, 0),
        "n_routed_experts": (None, 0),
        "moe_intermediate_size": (None,),
        "kv_lora_rank": (None,),
        "q_lora_rank": (None,),
        "sliding_window": (None,),
        "use_sliding_window": (None, False),
        "layer_types": (None,),
        "per_layer_config": (None, {}),
        "scoring_func": (None,),
        "topk_method": (None,),
        "n_group": (None, 0, 1),
        "topk_group": (None, 0, 1),
        "routed_scaling_factor": (None, 1.0, 1),
        "norm_type": (None,),
        "activation_function": (None,),
        "hidden_activation": (None,),
        "position_embedding_type": (None, "absolute", "learned_absolute", "rope", "rotary"),
        "alibi": (None, False),
        "use_alibi": (None, False),
        "no_rope_layers": (None,),
        "attention_chunk_size": (None,),
        "use_bidirectional_attention": (None, False),
        "is_causal": (None, True),
        "use_mrope": (None, False),
        "vision_config": (None,),
        "audio_config": (None,),
        "text_config": (None,),
    }
    """Fields that are only implemented for these values; a subclass lists its own in `only_here`."""
    only_here: ClassVar[dict[str, tuple]] = {}
    without_effect: ClassVar[dict[str, tuple]] = {}
    """Fields that `transformers` ignores for this architecture, and the values that match what it does anyway."""
    beside_text: ClassVar[frozenset[str]] = frozenset()
    """Fields about images and sound in families whose checkpoints may take these. Only the text part is read: the
    contents of `text_config`, if there is one."""

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """Returns the config of this architecture. Does not modify `raw`.

        Raises ValueError for a field of the wrong type or out of range, or fields that contradict each other. Raises
        NotImplementedError for a field with an unsupported value. The message names the field."""
        if not isinstance(raw, dict):
            raise ValueError(f"config.json must hold an object; got {type(raw).__name__}")
        fields = cls.with_effect(cls.with_one_spelling(cls.text_part(raw)))
        cls.refuse(fields)
        # Early checkpoints of compressed-tensors use the second name.
        method = read_quant_method(fields.get("quantization_config") or fields.get("compression_config"))
        config = cls(**cls.read_fields(fields), quantization_config=method)
        config.check()
        cls.warn_of_unknown(fields)
        return dataclasses.replace(config, **config.derived(fields))

    def with_media(self, raw: dict[str, Any]) -> ModelConfig:
        """Returns this config with what `raw`, a config.json, says about towers. Raises as `from_dict`."""
        return self

    @classmethod
    def text_part(cls, raw: dict[str, Any]) -> dict[str, Any]:
        """The fields about text, in the form of a flat config.json."""
        fields = {name: value for name, value in raw.items() if name not in cls.beside_text}
        if not cls.beside_text or fields.get("text_config") is None:
            return fields
        text = fields.pop("text_config")
        if not isinstance(text, dict):
            raise ValueError(f"config.json: text_config must be an object or null; got {shown(text)}")
        whole = {name: value for name, value in fields.items() if name in OF_THE_WHOLE and value is not None}
        if ignored := sorted(name for name in fields if name not in OF_THE_WHOLE and not HARMLESS.fullmatch(name)):
            logger.warning("config.json: ignored fields outside of text_config: %s", ", ".join(ignored))
        return text | whole

    @classmethod
    def with_one_spelling(cls, raw: dict[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for name, value in raw.items():
            field = cls.aliases.get(name, name)
            if field in fields and not same(fields[field], value):
                raise ValueError(
                    f"config.json: {name} = {shown(value)} contradicts its other spelling, {shown(fields[field])}"
                )
            fields[field] = value
        return fields

    @classmethod
    def with_effect(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Returns all fields but those in `without_effect`."""
        for name in sorted(cls.without_effect.keys() & fields.keys()):
            if not any(same(fields[name], value) for value in cls.without_effect[name]):
                logger.warning(
                    "config.json: %s = %s is ignored, as transformers does for %s",
                    name,
                    shown(fields[name]),
                    cls.__name__.removesuffix("Config"),
                )
        return {name: value for name, value in fields.items() if name not in cls.without_effect}

    @classmethod
    def read_fields(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """Checks and returns the declared fields that are present."""
        return read_declared(cls, fields)

    @classmethod
    def refuse(cls, fields: dict[str, Any]) -> None:
        for name, allowed in cls.implemented_values().items():
            if name in fields and not any(same(fields[name], value) for value in allowed):
                raise NotImplementedError(
                    f"config.json: {name} = {shown(fields[name])} is not implemented for "
                    f"{cls.__name__.removesuffix('Config')};"
                    f" implemented: {', '.join(shown(value) for value in allowed)}"
                )

    @classmethod
    def implemented_values(cls) -> dict[str, tuple]:
        """Merges `only` with the `only_here` of this class and its parents, nearest first, without fields that the
        class declares."""
        merged = dict(cls.only)
        for parent in reversed(cls.__mro__):
            merged.update(vars(parent).get("only_here", {}))
            for name in vars(parent).get("__annotations__", {}):
                merged.pop(name, None)
        return merged

    @classmethod
    def warn_of_unknown(cls, fields: dict[str, Any]) -> None:
        known = {field.name for field in dataclasses.fields(cls)} | cls.implemented_values().keys() | cls.also_read
        unknown = sorted(str(name) for name in fields if name not in known and not HARMLESS.fullmatch(str(name)))
        if unknown:
            logger.warning("config.json: ignored fields that %s does not know: %s", cls.__name__, ", ".join(unknown))

    also_read: ClassVar[frozenset[str]] = frozenset()
    """Names that `derived` reads in addition to the declared ones."""

    def check(self) -> None:
        """Raises ValueError if declared fields contradict each other."""

    @property
    def max_length(self) -> int:
        """Maximum sequence length of the config."""
        return self.max_position_embeddings

    @property
    def length_field(self) -> str:
        """Name of the field that sets `max_length`, for messages."""
        return "max_position_embeddings"

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return 1.0

    @property
    def logits_scale(self) -> float:
        """Factor of the logits."""
        return 1.0

    @property
    def logits_softcap(self) -> float | None:
        """Logits become `softcap * tanh(logit / softcap)`; None for no cap."""
        return None

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Values of this class's fields that are computed from others, or from several entries of config.json."""
        return {}


def read_declared(kind: type, fields: dict[str, Any], section: str = "") -> dict[str, Any]:
    """Checks and returns the fields of `kind` that are declared and present. `section` comes before their names in
    errors, such as `vision_config.`."""
    values = {}
    for field in dataclasses.fields(kind):
        if field.name in fields and "read" in field.metadata:
            name = section + field.name
            try:
                values[field.name] = field.metadata["read"](fields[field.name])
            except ValueError as error:
                raise ValueError(f"config.json: {name} must be {error}; got {shown(fields[field.name])}") from None
            except NotImplementedError as error:
                raise NotImplementedError(f"config.json: {name}: {error}") from None
    return values


def same(a: Any, b: Any) -> bool:
    """True if a equals b; true and 1 differ."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def check_divides(config: ModelConfig, part: str, whole: str) -> None:
    """Raises ValueError unless field `part` divides field `whole`."""
    if getattr(config, whole) % getattr(config, part):
        raise ValueError(
            f"config.json: {whole} must be a multiple of {part}; got {getattr(config, whole)} and "
            f"{getattr(config, part)}"
        )


def checked_head_dim(head_dim: int) -> int:
    """Returns a derived head_dim. Raises ValueError if it is wider than any model's."""
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(
            f"config.json: head_dim must be at most {MAX_HEAD_DIM}; got {head_dim} (hidden_size / num_attention_heads)"
        )
    return head_dim
