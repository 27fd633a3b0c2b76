"""A toy model, added by the steps of "A model" in CONTRIBUTING.md: `add(copy)`, then `add_row(copy)`."""

from __future__ import annotations

from tests.project.copied_sources import Copy

MODEL = '''\
"""Seed-OSS: Llama with one switch for the biases of queries, keys and values, and another for the output's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pace.llm.models.families.llama import LlamaConfig, LlamaForCausalLM
from pace.llm.models.model_config import flag


@dataclass(frozen=True, kw_only=True)
class SeedOssConfig(LlamaConfig):
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


def add(copy: Copy, fault: str = "") -> None:
    """The steps but the last one. `fault`: lines that belong into the class of the model, and are wrong."""
    # 1. One file
    copy.write("pace/llm/models/families/seed_oss.py", MODEL + fault)
    # 2. One line (and its import)
    models = "pace/llm/models/model_list.py"
    copy.add_before(
        models,
        "from pace.llm.models.model_config",
        "from pace.llm.models.families.seed_oss import SeedOssForCausalLM\n",
    )
    copy.add_after(models, "MODEL_LIST:", '    "SeedOssForCausalLM": SeedOssForCausalLM,\n')
    # 3. One tuple for each variant
    variants = "tests/llm/models/variants.py"
    copy.add_after(variants, "BASE = {", '    "seed_oss": {"num_key_value_heads": 2, "head_dim": 8},\n')
    copy.add_after(variants, "VARIANTS:", VARIANTS)
    copy.add_after("tests/fuzz/checkpoints.py", "ARCHITECTURES = [", '    ("seed_oss", {}),\n')


def add_row(copy: Copy) -> None:
    # 4. One row
    row = "| `SeedOssForCausalLM` | Seed-OSS | biases on queries, keys and values |\n"
    copy.add_after("docs/models.md", "| `LlamaForCausalLM`", row)
