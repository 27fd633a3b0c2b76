"""A model, added by the steps of "A model" in CONTRIBUTING.md: `add(copy)`, then `add_row(copy)`. It is Seed-OSS, which
is taken out of the copy before."""

from __future__ import annotations

from tests.project.recipes.copied_sources import Copy

MODEL = '''\
"""Seed-OSS: Llama with one switch for the biases of queries, keys and values, and another for the output's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import MAX_HEAD_DIM, MAX_LAYERS, MAX_POSITIONS, count, flag, token_ids


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
    vocab_size: int = count(155136)
    intermediate_size: int = count(27648)
    num_hidden_layers: int = count(64, MAX_LAYERS)
    num_attention_heads: int = count(80)
    num_key_value_heads: int | None = count(8, optional=True)
    head_dim: int | None = count(128, MAX_HEAD_DIM, optional=True)
    max_position_embeddings: int = count(524288, MAX_POSITIONS)
    bos_token_id: int | tuple[int, ...] | None = token_ids(0)
    pad_token_id: int | tuple[int, ...] | None = token_ids(1)
    attention_bias: bool = flag(True)
    attention_out_bias: bool = flag(False)

    only_here: ClassVar[dict[str, tuple]] = {**LlamaConfig.only_here, "clip_qkv": (None,)}

    @property
    def output_bias(self) -> bool:
        return self.attention_out_bias


class SeedOssForCausalLM(LlamaForCausalLM):
    Config = SeedOssConfig
'''

VARIANTS = """\
    ("seed_oss", "default", {}),
    ("seed_oss", "out-bias", {"attention_out_bias": True}),
"""


PLACES = ("pace/llm/models/model_list.py", "tests/llm/models/families/dense_variants.py", "docs/models.md")
"""Files with lines about Seed-OSS that the steps add."""


def add(copy: Copy, fault: str = "") -> None:
    """Applies all steps except the last one. `fault`: wrong lines that are added to the model's class."""
    copy.remove("pace/llm/models/families/seed_oss.py")
    for path in PLACES:
        copy.remove_lines(path, r"seed_oss|SeedOss")
    # 1. One file
    copy.write("pace/llm/models/families/seed_oss.py", MODEL + fault)
    # 2. One line (and its import)
    models = "pace/llm/models/model_list.py"
    copy.add_before(
        models,
        "from pace.llm.models.model_config",
        "from pace.llm.models.families.seed_oss import SeedOssForCausalLM\n",
    )
    copy.add_after(models, "MODEL_CLASSES:", "    SeedOssForCausalLM,\n")
    # 3. One tuple for each variant
    variants = "tests/llm/models/variants.py"
    copy.add_after(variants, "BASE = {", '    "seed_oss": {"num_key_value_heads": 2, "head_dim": 8},\n')
    copy.add_after(variants, "VARIANTS:", VARIANTS)
    copy.add_after("tests/fuzz/checkpoints.py", "ARCHITECTURES = [", '    ("seed_oss", {}),\n')


def add_row(copy: Copy) -> None:
    # 4. One row
    row = "| `SeedOssForCausalLM` | Seed-OSS | biases on queries, keys and values |\n"
    copy.add_after("docs/models.md", "| `LlamaForCausalLM`", row)
