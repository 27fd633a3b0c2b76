"""jina-embeddings-v3: XLM-RoBERTa with rotations instead of positions, and an adapter for each task."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pace.llm.adapters.tasks import read_tasks
from pace.llm.adapters.weights import AdapterWeights
from pace.llm.layers import PlainMLP
from pace.llm.loading.fill import TensorReader
from pace.llm.models.encoders.rotary_encoder import RotaryEncoder, RotaryEncoderConfig
from pace.llm.models.model_config import MAX_LAYERS, MAX_POSITIONS, count, number
from pace.naming import shown

logger = logging.getLogger("pace")


@dataclass(frozen=True, kw_only=True)
class JinaEmbeddingsV3Config(RotaryEncoderConfig):
    vocab_size: int = count(250002)
    hidden_size: int = count(1024)
    num_hidden_layers: int = count(24, MAX_LAYERS)
    num_attention_heads: int = count(16)
    intermediate_size: int = count(4096)
    max_position_embeddings: int = count(8194, MAX_POSITIONS)
    layer_norm_eps: float = number(1e-5, 0.0, 1.0)
    lora_alpha: float = number(1.0, 0.0, 1e6)
    lora_rank: int = count(4)
    tasks: tuple[tuple[str, str], ...] = ()
    """Tasks, in the order of the adapters, and the text that is put before a text for each."""

    default_theta = 20000.0
    aliases: ClassVar[dict[str, str]] = {"rotary_emb_base": "rope_theta"}
    only_here: ClassVar[dict[str, tuple]] = {"position_embedding_type": (None, "rotary", "rope")}
    without_effect: ClassVar[dict[str, tuple]] = {
        "load_trained_adapters": (True, False),
        "lora_main_params_trainable": (True, False),
        "use_flash_attn": (True, False),
        "use_reentrant": (True, False),
    }
    also_read: ClassVar[frozenset[str]] = RotaryEncoderConfig.also_read | {
        "lora_adaptations",
        "lora_dropout_p",
        "matryoshka_dimensions",
        "task_instructions",
        "truncate_dim",
    }

    def derived(self, fields: dict[str, Any]) -> dict[str, Any]:
        tasks, texts = fields.get("lora_adaptations") or [], fields.get("task_instructions") or {}
        if not isinstance(tasks, list) or not all(isinstance(task, str) and task for task in tasks):
            raise ValueError(f"config.json: lora_adaptations must be names of tasks; got {shown(tasks)}")
        if len(set(tasks)) < len(tasks):
            raise ValueError(f"config.json: lora_adaptations names a task twice: {shown(tasks)}")
        if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
            raise ValueError(f"config.json: task_instructions must map tasks to texts; got {shown(texts)}")
        if unknown := texts.keys() - set(tasks):
            raise ValueError(f"config.json: task_instructions has {shown(min(unknown))}, which is not a task")
        return super().derived(fields) | {"tasks": tuple((task, texts.get(task, "")) for task in tasks)}


class JinaEmbeddingsV3Model(RotaryEncoder):
    Config = JinaEmbeddingsV3Config
    prefix = "roberta."
    other_names: ClassVar[dict[str, str]] = {
        r"\.parametrizations\.weight\.original(\.weight)?$": ".weight",
        r"(^|\.)encoder\.layers\.": r"\1layers.",
        r"(^|\.)emb_ln\.": r"\1embeddings.LayerNorm.",
        r"\.mixer\.Wqkv\.": ".self_attn.qkv_proj.",
        r"\.mixer\.out_proj\.": ".self_attn.o_proj.",
        r"\.norm1\.": ".post_attention_layernorm.",
        r"\.norm2\.": ".post_mlp_layernorm.",
    }
    head_names = ("classifier.dense", "classifier.out_proj")
    tensors_apart = (r".*\.parametrizations\.weight\.0\.lora_[AB]",)

    @property
    def instructions(self) -> Mapping[str, str]:
        return dict(self.config.tasks)

    def read_tasks(self, reader: TensorReader) -> list[AdapterWeights]:
        tasks = list(self.instructions)
        found = read_tasks(reader, tasks, self.config.lora_alpha, self.config.lora_rank) if tasks else []
        if tasks and not found:
            logger.warning("the checkpoint has no adapters for %s: texts are embedded without a task", tasks)
        return found

    def make_feed_forward(self, name: str, index: int) -> PlainMLP:
        return self.make_plain(f"{name}.fc1", f"{name}.fc2")


class RotaryXLMRobertaModel(JinaEmbeddingsV3Model):
    """The same in the spelling of the Hub's own code, which calls itself XLM-RoBERTa."""

    @classmethod
    def describes(cls, raw: Mapping[str, Any]) -> bool:
        return raw.get("position_embedding_type") == "rotary"
