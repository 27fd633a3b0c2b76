"""The soak for a model whose layers keep states: a tiny random Qwen3.5 with drafts, few slots and common prefixes.

python -m tests.server.faults.state_soak --seconds 3600 [--honest 64] [--faulty 16] [--seed 1]
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pace.assets import TINY
from pace.llm.generator import Generator
from pace.llm.loading import load
from pace.llm.loading.options import LoadOptions
from pace.llm.speculation.configs import PromptLookupConfig
from tests.server.faults.soak import PROMPTS, Soak, main, soak

STORY = "Once upon a time there was a little fox who lived in a small house by the river. "


class StateSoak(Soak):
    """Prompts that begin alike and part in many places, so that states are marked, shared, evicted and computed
    again."""

    def make_questions(self) -> list[Any]:
        return [STORY * times + prompt for times, prompt in zip((0, 3, 3, 9, 9), PROMPTS)]

    def check_idle(self) -> None:
        super().check_idle()
        engine = self.serving.generator.engine
        engine.cache.check_integrity([])  # no slot is held, except by the index of prefixes
        self.counts["slots in the index"] = engine.cache.states.pool.num_idle


def make_hybrid() -> Generator:
    """An engine of a tiny random Qwen3.5 with the bundled tokenizer. Its cache has fewer slots than there are clients,
    and the drafts are copies of earlier text."""
    with TemporaryDirectory() as folder:
        config = AutoConfig.for_model(
            "qwen3_5_text", vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32, linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32, max_position_embeddings=2048,
            initializer_range=0.1, eos_token_id=2, bos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(TINY / name, Path(folder) / name)
        loaded = load.open_model(
            LoadOptions(
                folder, dtype="float32", progress=False, kv_cache_bytes="48MiB", spec_config=PromptLookupConfig()
            )
        )
    return Generator(loaded.engine, loaded.tokenizer, loaded.defaults)


def state_soak(seconds: float, num_honest: int, num_faulty: int, seed: int, **least: int) -> dict[str, Any]:
    """Runs the soak with a hybrid model; see `soak`."""
    return soak(seconds, num_honest, num_faulty, seed, StateSoak, make_hybrid, least)


if __name__ == "__main__":
    main(state_soak)
