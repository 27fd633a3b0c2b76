"""Base class of causal language models: the forward pass, the names of its tensors, and strict loading."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Container, Mapping
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from pace.batch import ForwardBatch, KVSpec
from pace.llm.layers import (
    Block,
    Embedding,
    Layer,
    LayerNorm,
    LMHead,
    NoNorm,
    RMSNorm,
    Rotary,
    Temperature,
    TiedLMHead,
    WeightTarget,
)
from pace.llm.layers.rotary import Angles
from pace.llm.layers.weight_target import Piece, check_targets
from pace.llm.models.filling import TensorReader, fill_targets
from pace.llm.models.model_config import ModelConfig
from pace.llm.models.packed_weights import ExpertFile, WeightsFile
from pace.llm.models.weight_plan import StoredQuantized, plan_weights
from pace.memory import available_memory_bytes
from pace.ops import native
from pace.ops.blocks import BlockRows
from pace.ops.weight_layout import QuantizedRows, WeightLayout
from pace.quant import QuantizationConfig

logger = logging.getLogger("pace")

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_LISTED = 50
"""Maximum number of tensors listed per kind of mistake; a wrong config.json can cause thousands."""


class BaseModelForCausalLM(Layer):
    """Embedding, decoder layers, final norm and LM head, which a subclass makes in its initialiser.

    Each decoder layer is called as `layer(ops, x [T, hidden], angles, batch, kv) -> x`. A loaded model is immutable, so
    that several threads may call `forward` if their batches write different slots of the cache."""

    Config: ClassVar[type[ModelConfig]]
    prefix: ClassVar[str] = "model."
    """Prefix of all names but the head's. Checkpoints of the bare decoder lack it and load as well."""
    embedding_name: ClassVar[str] = "model.embed_tokens"
    ignored_tensors: ClassVar[tuple[str, ...]] = (r".*\.rotary_emb\.inv_freq",)
    """Regular expressions of tensors in checkpoints that are ignored, such as buffers that are computed here."""

    other_names: ClassVar[Mapping[str, str]] = {}
    """Regular expressions of other names for tensors, and the name used here."""
    text_prefixes: ClassVar[Mapping[str, str]] = {}
    """Prefixes of names in checkpoints that name a part differently or also take images or sound, and the prefix used
    here. An example is `lm_head.` for the head."""
    other_parts: ClassVar[tuple[str, ...]] = ()
    """Prefixes of tensors that are ignored in such checkpoints: encoders of images and sound."""

    embedding: Embedding
    rotaries: tuple[Rotary | Temperature, ...] = ()
    """The rotations of its layers: number i makes table i of a step's angles. Empty if positions are learned."""
    layers: list[Block]
    final_norm: RMSNorm | LayerNorm | NoNorm
    lm_head: LMHead | TiedLMHead
    stored_as: str | None = None
    """The weight file's own name for its quantisation."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, ops: ModuleType):
        """Takes no memory yet: `load_weights` allocates after checking that the checkpoint fits. Matrices are stored in
        `dtype`, and so are keys and values unless `kv_dtype` is changed. `ops` is the implementation that packs and
        computes."""
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(map(str, FLOAT_DTYPES))}; got {dtype}")
        self.config = config
        self.dtype = dtype
        self.kv_dtype = dtype
        """Dtype of keys and values: a float dtype, or int8. May be changed until a cache is made for `kv_spec`."""
        self.ops = ops
        self.quantization: QuantizationConfig | None = None
        self.weights_file: WeightsFile | None = None
        """The file from which `load_weights` maps packed weights; None for weights in memory."""

    # -------------------------------------------------------------------------------------------------------------
    # the engine's interface

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        """Maximum sequence length of the model's config."""
        return self.config.max_length

    @property
    def recompute_length(self) -> int | None:
        """Length at which a sequence that started shorter is recomputed as a prompt, because the angles of its earlier
        tokens change there. None for never."""
        return None

    def rope_regime(self, length: int) -> int:
        """Identifies the angles of a prompt of this length. Prompts with the same number have the same angles at each
        position, so a shared prefix has the same keys and values. `RopeConfig` lists the kinds that depend on the
        length."""
        # No regime decreases with the length: if the sums are equal, all regimes are.
        return sum(rotary.regime(length) for rotary in self.rotaries)

    @property
    def kv_spec(self) -> KVSpec:
        """The cache of the model: what each layer's attention keeps."""
        return KVSpec(tuple(layer.cache for layer in self.layers), self.kv_dtype)

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Returns logits `[R, V]` of `batch.logit_rows`, op by op; writes the batch's slots of the cache."""
        return self.compute(self.ops, batch, self.angles(batch))

    def angles(self, batch: ForwardBatch) -> Angles:
        """The angles of every token of the step for each of `rotaries`; plain torch."""
        return tuple([rotary.angles(batch.positions, batch.rope_lengths) for rotary in self.rotaries])

    def compute(self, ops: ModuleType, batch: ForwardBatch, angles: Angles) -> Tensor:
        """`forward` after the angles are computed: only `ops`, views, sums and the choice of rows, so that it can be
        recorded (pace/graph). The final norm and the head run only on the logit rows."""
        x = self.embed(ops, batch)
        for layer, kv in zip(self.layers, batch.kv, strict=True):
            x = layer(ops, x, angles, batch.of_layer(kv), kv)
        return self.head(ops, x[batch.logit_rows])

    def embed(self, ops: ModuleType, batch: ForwardBatch) -> Tensor:
        """Returns `[T, hidden]`: the input of the first layer."""
        x = self.embedding(ops, batch.tokens)
        if self.embedding_scale != 1.0:
            ops.scale_(x, self.embedding_scale)
        return x

    def head(self, ops: ModuleType, x: Tensor) -> Tensor:
        """Returns the logits of the last layer's output `x [R, hidden]`."""
        logits = self.lm_head(ops, self.final_norm(ops, x))
        if self.config.logits_scale != 1.0:
            ops.scale_(logits, self.config.logits_scale)
        if self.config.logits_softcap is not None:
            ops.softcap_(logits, self.config.logits_softcap)
        return logits

    @property
    def embedding_scale(self) -> float:
        """Factor of the embeddings."""
        return self.config.embedding_scale

    def make_head(self, k: int, bias: bool = False) -> LMHead | TiedLMHead:
        """Makes the LM head over `k` elements, tied or not by the config; for initialisers, after `self.embedding`."""
        if self.config.tie_word_embeddings:
            return TiedLMHead("lm_head", self.embedding, self.config.vocab_size, bias)
        return LMHead("lm_head", self.config.vocab_size, k, bias)

    # -------------------------------------------------------------------------------------------------------------
    # loading

    def quantize(self, config: QuantizationConfig | None) -> None:
        """Sets how `load_weights` quantises the matrices of a float checkpoint; None for not at all. Raises ValueError
        for a config that does not fit this model."""
        plan_weights(self, self.lm_head, config, {})
        self.quantization = config

    def load_weights(
        self, reader: TensorReader, workers: int = 1, progress: Callable[[int], object] = lambda num_bytes: None
    ) -> None:
        """Fills every weight from a checkpoint, `workers` pieces at a time; `progress` is called with the bytes of each
        piece.

        At most `workers` pieces (`reader.row_ranges`) are in memory at once, plus the packed weights. Nothing is
        allocated before every name and shape is checked. Raises one ValueError that lists all tensors that are missing,
        unexpected or of a wrong shape. Raises MemoryError if they do not fit into memory, and with `weights_file`, the
        errors of its `choose` and `map`."""
        names, targets = self.plan_layout(reader)
        self.fill(reader, names, targets, workers, progress)

    def fill(
        self,
        reader: TensorReader,
        names: Mapping[str, str],
        targets: dict[str, list[WeightTarget]],
        workers: int = 1,
        progress: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        """The part of `load_weights` after `plan_layout`, which returns `names` and `targets`. Tensors without a target
        are ignored."""
        in_file = self.weights_file.choose(self) if self.weights_file else []
        self.check_memory()
        wanted = {name: targets[names[name]] for name in reader.tensors if names[name] in targets}

        def fill(tensors: Container[str]) -> None:
            some = {name: found for name, found in wanted.items() if names[name] in tensors}
            fill_targets(reader, some, workers, progress)

        filled = self.weights_file.map(reader.files, in_file, self.dtype, fill) if self.weights_file else set()
        self.allocate(self.ops, self.dtype)
        fill(targets.keys() - filled)

    def plan_layout(self, reader: TensorReader) -> tuple[dict[str, str], dict[str, list[WeightTarget]]]:
        """Decides how each matrix is stored, from the checkpoint's contents and `quantize`; allocates nothing. Returns
        the result of `match_names`, and the targets. Raises ValueError if the tensors do not match the config."""
        self.stored_as = getattr(reader, "file_type", None)
        names = self.match_names(reader)
        for stack in self.stacks():
            stack.choose(set(names.values()))
        targets = self.targets()
        for name, claims in targets.items():
            check_targets(name, claims)
        self.check_coverage(reader, names, targets)
        if left_out := [name for name in names if self.is_beside_text(name)]:
            logger.info(
                "left out %d tensors of %s: this model reads text only",
                len(left_out),
                ", ".join(sorted({name.removeprefix("model.").split(".")[0] for name in left_out})),
            )
        for warning in plan_weights(
            self, self.lm_head, self.quantization, self.quantized_tensors(reader, names, targets)
        ):
            logger.warning("%s", warning)
        return names, targets

    def match_names(self, reader: TensorReader) -> dict[str, str]:
        """Name in the checkpoint -> name here. Unties the head if the checkpoint has two different matrices."""
        names = {name: name if self.is_beside_text(name) else self._of_text(name) for name in reader.tensors}
        if not any(here.startswith(self.prefix) for name, here in names.items() if not self.is_beside_text(name)):
            names = {
                name: here if here.startswith("lm_head.") or self.is_beside_text(name) else self.prefix + here
                for name, here in names.items()
            }
        if isinstance(self.lm_head, TiedLMHead):
            given = {name: source for source, name in names.items()}
            head, embedding = given.get("lm_head.weight"), given.get(f"{self.embedding_name}.weight")
            if head and not embedding:
                names[head] = f"{self.embedding_name}.weight"  # only one of the two was saved, under the other name
            elif head and self._differ(reader, head, embedding):
                logger.warning("tie_word_embeddings is true, but %s and %s differ: they are not tied", head, embedding)
                bias = bool(self.lm_head.bias.lengths)
                self.lm_head = LMHead("lm_head", self.config.vocab_size, self.embedding.k, bias)
        return names

    def is_beside_text(self, name: str) -> bool:
        """True if a tensor of a checkpoint belongs to one of `other_parts`."""
        return name.startswith(self.other_parts)

    def _of_text(self, name: str) -> str:
        for prefix, here in self.text_prefixes.items():
            if name.startswith(prefix):
                name = here + name.removeprefix(prefix)
                break
        for pattern, here in self.other_names.items():
            name = re.sub(pattern, here, name)
        return name

    def _differ(self, reader: TensorReader, head: str, embedding: str) -> bool:
        """True if the head differs from the embedding. Like transformers, treats two equal matrices as one, because
        `.bin` files save both."""
        if reader.tensors[head] != reader.tensors[embedding]:
            return True
        for start, stop in reader.row_ranges(head):
            a, b = reader.read(head, start, stop), reader.read(embedding, start, stop)
            differ = not _equal(a, b)
            del a, b
            reader.release(head, start, stop)
            reader.release(embedding, start, stop)
            if differ:
                return True
        return False

    def check_coverage(
        self, reader: TensorReader, names: dict[str, str], targets: dict[str, list[WeightTarget]]
    ) -> None:
        """Raises ValueError unless every target has a tensor of its shape, and every tensor has a target or a reason to
        be ignored."""
        ignored = list(self.ignored_tensors)
        if isinstance(self.lm_head, TiedLMHead):
            ignored.append(
                r"lm_head\.weight(_scale)?"
            )  # a tied int8 head, for which transformers needs the scales twice (pace/calibrate/encoding.py)
        missing = sorted(targets.keys() - names.values())
        unexpected = sorted(
            name
            for name in names
            if names[name] not in targets
            and not self.is_beside_text(name)
            and not any(re.fullmatch(p, names[name]) for p in ignored)
            and not _is_bias_without_effect(reader, name)
        )
        wrong = []
        for name, (dtype, shape) in reader.tensors.items():
            target, *_ = targets.get(names[name], (None,))
            if target and target.transposed and isinstance(dtype, WeightLayout):
                raise NotImplementedError(
                    f"{name} is stored as {dtype} where the model wants its columns, and codes are not turned; "
                    "load the checkpoint of floats"
                )
            if target and tuple(shape) != target.shape:
                wrong.append(f"{name} has shape {list(shape)}, the config demands {list(target.shape)}")
            elif target and dtype not in FLOAT_DTYPES and not (isinstance(dtype, WeightLayout) and len(shape) >= 2):
                wrong.append(f"{name} is {dtype}, not a floating-point tensor")
        problems = [("missing", missing), ("unexpected", unexpected), ("not as the config demands", wrong)]
        if lines := [f"{title} ({len(found)}): {_listed(found)}" for title, found in problems if found]:
            raise ValueError(
                f"the checkpoint does not fit {type(self).__name__} as config.json describes it:\n  "
                + "\n  ".join(lines)
            )

    def quantized_tensors(
        self, reader: TensorReader, names: dict[str, str], targets: dict[str, list[WeightTarget]]
    ) -> dict[str, StoredQuantized]:
        """The checkpoint's quantised tensors, by their names here."""
        return {
            names[name]: StoredQuantized(dtype, reader.column_order(name))
            for name, (dtype, _) in reader.tensors.items()
            if isinstance(dtype, WeightLayout) and names[name] in targets
        }

    def check_memory(self) -> None:
        """Raises MemoryError if the weights need more than the available memory, except those of an ExpertFile.
        Otherwise the system would kill the process."""
        mapped = self.weights_file.choose(self) if isinstance(self.weights_file, ExpertFile) else []
        of_mapped = sum(stack.matrix_nbytes(self.ops, self.dtype) for stack in mapped)
        needed, available = self.planned_nbytes(self.ops, self.dtype) - of_mapped, available_memory_bytes()
        if needed <= available:
            return
        kind, advice = f"as {str(self.dtype).removeprefix('torch.')}", ""
        if any(matrix.plan.layouts for matrix in self.matrices()):
            kind = "as they are quantised"
        elif self.dtype == torch.float32:
            advice = "load with dtype=bfloat16, which takes half, or quantization='int4', an eighth; or "
        else:
            advice = "load with quantization='int4', which takes a quarter; or "
        could_be = sum(
            stack.matrix_nbytes(self.ops, self.dtype) for stack in self.stacks() if stack.is_quantised and not mapped
        )
        if mapped:
            kind += f" besides {of_mapped / 2**30:.2f} GiB of experts, which are mapped"
        elif self.ops is native and 0 < needed - could_be <= available:
            advice = f'load with weights="mapped", which leaves {could_be / 2**30:.2f} GiB of experts in a file; or '
        raise MemoryError(
            f"the weights take {needed / 2**30:.2f} GiB {kind}, and {available / 2**30:.2f} GiB of memory are left; {advice}free some memory or "
            f"take a smaller model"
        )

    # -------------------------------------------------------------------------------------------------------------
    # reports

    def resident_bytes(self) -> dict[str, int]:
        """Bytes of the loaded weights by part of the model: embedding, attention, MLP, norms, LM head. A tied matrix
        counts for the embedding."""
        return self._totals(lambda part: part.nbytes)

    @property
    def mapped_nbytes(self) -> int:
        """Bytes of the weights that are in a file."""
        return sum(layer.in_file.nbytes for layer in [*self.stacks(), *self.matrices()] if layer.in_file)

    @property
    def usual_layout(self) -> WeightLayout | None:
        """The code layout with the most bytes; None if all weights are floats."""
        sizes: Counter[WeightLayout] = Counter()
        for matrix in self.matrices():
            for part, layout in matrix.plan.layouts.items():
                sizes[layout] += self.ops.weight_nbytes(matrix.parts[part], matrix.k, layout)
        return sizes.most_common(1)[0][0] if sizes else None

    @property
    def storage_name(self) -> str:
        """Name of the format of most weights: the requested format, that of a quantised checkpoint, or a dtype. A GGUF
        file's own name is used, such as "Q4_K_M"."""
        asked, stored = self.quantization and self.quantization.format, self.usual_layout
        return str(asked or (stored and self.stored_as) or stored or self.dtype).removeprefix("torch.")

    def weight_counts(self) -> dict[str, int]:
        """Elements of the weights by part, as in `resident_bytes`."""
        return self._totals(lambda part: part.num_weights)

    def _totals(self, size: Callable[[Layer], int]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for child in self.children():
            inside = child.children() if child in self.layers else [child]
            for part in inside:
                totals[type(part).__name__] += size(part)
        return dict(totals)


def _equal(a: Piece, b: Piece) -> bool:
    """Compares tensors of the same dtype and shape, or rows in the same layout."""
    if isinstance(a, BlockRows):
        return torch.equal(a.data, b.data)
    if isinstance(a, QuantizedRows):
        return all(
            one is other or (one is not None and other is not None and torch.equal(one, other))
            for one, other in zip(a.tensors(), b.tensors())
        )
    return a.data_ptr() == b.data_ptr() or torch.equal(a, b)


def _is_bias_without_effect(reader: TensorReader, name: str) -> bool:
    """True for zeros that early writers of GPTQ, and some of Cohere's, stored as the bias of modules without one."""
    module = name.removesuffix(".bias")
    if module == name or f"{module}.weight" not in reader.tensors or reader.tensors[name][0] not in FLOAT_DTYPES:
        return False
    return not reader.read(name).any()


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return ", ".join(names[:MAX_LISTED]) + more
