"""Random models in random formats, compared with transformers on the dequantised weights, and with themselves in other
batches. Run it by hand after a change in kernels, formats or packing.

    python -m tests.llm.quantization_sweep --cases 300 --first-seed 0      # takes minutes
"""

from __future__ import annotations

import json
import logging
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from pace.llm import LLMModel, PromptLookupConfig, QuantizationConfig, SamplingConfig
from pace.quant import FORMATS
from tests.llm import sweep
from tests.llm.models.variants import FAMILIES, save_tiny
from tests.llm.test_quantization import dequantized

GROUPS = {
    "int8": [16, 48, 128, None],
    "int4": [16, 32, 48, 64, 128, None],
    "nf4": [16, 64, 128],
    "fp4": [16, 64, 128],
    "fp8": [16, 32, 128],
}
NOISE = 0.08
"""Bound of the relative error of the kernels' logits. 9 successive products round their inputs to max / 127 (0.5 to 1 %
each), and keys and values may be in int8."""


def random_fields(choose: random.Random, family: str) -> dict[str, Any]:
    """Returns sizes that are no multiples of groups, panels or vectors, with grouped heads, biases, or a tied head."""
    heads, head_dim, inner = (
        choose.choice([2, 4, 6]),
        choose.choice([8, 16, 20, 40, 80]),
        choose.choice([24, 56, 96, 100, 144, 272]),
    )
    fields = {
        "vocab_size": choose.choice([99, 101, 128, 257]),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "max_position_embeddings": 128,
    }
    fields["tie_word_embeddings"] = choose.random() < 0.5 and family != "phi"
    if family == "opt":
        return fields | {"ffn_dim": inner}
    if family == "gptj":
        return fields | {"n_inner": inner, "rotary_dim": choose.choice([4, 8])}
    if family == "gpt2":
        return fields | {"n_inner": inner}
    fields |= {
        "intermediate_size": inner,
        "num_key_value_heads": choose.choice([n for n in (1, 2, 3, 6) if heads % n == 0]),
    }
    if family == "chatglm":
        del fields["tie_word_embeddings"]
        fields |= {"multi_query_group_num": fields.pop("num_key_value_heads"), "kv_channels": head_dim}
    if family == "llama":
        fields |= {"attention_bias": choose.random() < 0.5, "mlp_bias": choose.random() < 0.5}
    if family == "qwen3":
        fields["head_dim"] = choose.choice([8, 16, 80])
    if family == "mistral":
        fields["sliding_window"] = choose.choice([None, 7, 33])
    return fields


def random_config(choose: random.Random) -> QuantizationConfig:
    def format(name: str) -> dict[str, Any]:
        options: dict[str, Any] = {"group": choose.choice(GROUPS[name])} if name in GROUPS else {}
        if name == "int4" and options["group"]:
            options["symmetric"] = choose.random() < 0.5
        if name in ("nf4", "fp4"):
            options["double_quantization"] = choose.random() < 0.5
        return {"format": name, **options}

    def choice() -> dict[str, Any] | None:
        return choose.choice([None, *map(format, FORMATS)])

    more: dict[str, Any] = {}
    if choose.random() < 0.3:
        more["embedding"] = more["lm_head"] = choice()
    if choose.random() < 0.4:
        more["overrides"] = {choose.choice(["*.0.*", "*.1.*", "*.[01].*", "*"]): choice() for _ in range(2)}
    return QuantizationConfig(**format(choose.choice(list(FORMATS))), **more)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def check_case(seed: int) -> str | None:
    """Returns an error message for a random model in a random format, or None."""
    choose = random.Random(seed)
    family = FAMILIES[seed % len(FAMILIES)]
    fields, config, kv = random_fields(choose, family), random_config(choose), choose.choice(["auto", "int8"])
    with tempfile.TemporaryDirectory() as folder:
        wrong = _check_model(family, fields, config, kv, Path(folder), choose)
    return wrong and f"{wrong}: {family} {fields}, {config}, kv_cache_dtype={kv}"


def _check_model(
    family: str, fields: dict[str, Any], config: QuantizationConfig, kv: str, folder: Path, choose: random.Random
) -> str | None:
    oracle = save_tiny(folder, family, fields)
    state = dequantized(
        json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors"), config
    )
    oracle.load_state_dict(state, strict=False)  # a tied head is not in the file
    oracle.tie_weights()
    rows = [[choose.randrange(2, 90) for _ in range(length)] for length in (5, choose.randint(40, 100), 33)]
    with torch.no_grad():
        expected = oracle(torch.tensor([rows[1]])).logits[0]
    options = {"dtype": "float32", "quantization": config, "num_threads": 1, "progress": False}
    with LLMModel(folder, backend="torch", **options) as model, model.session() as session:
        error = relative(session.append(rows[1], logits="all"), expected)
        if not error < 1e-4:
            return f"on torch, logits are off by {error:.2g}"
    options["kv_cache_dtype"] = kv
    greedy, beams = (
        SamplingConfig(max_new_tokens=16, ignore_eos=True),
        SamplingConfig(max_new_tokens=10, num_beams=3, num_return_sequences=2),
    )
    with LLMModel(folder, **options) as model:
        with model.session() as session:
            error = relative(session.append(rows[1], logits="all"), expected)
        if not error < NOISE:
            return f"on the kernels, logits are off by {error:.2g}"
        texts = [model.generate(row, greedy).generated_token_ids[0] for row in rows]
        if model.generate(rows, greedy).generated_token_ids != texts:
            return "texts in a batch differ"
        if not all(
            torch.equal(scores, model.score(row)[0]) for row, scores in zip(rows, model.score(rows), strict=True)
        ):
            return "scores in a batch differ"
        searched = [text for row in rows for text in model.generate(row, beams).generated_token_ids]
        if model.generate(rows, beams).generated_token_ids != searched:
            return "beams in a batch differ"
    with LLMModel(folder, spec_config=PromptLookupConfig(), prefix_cache_bytes=0, **options) as model:
        if model.generate(rows, greedy).generated_token_ids != texts:
            return "texts with drafts differ"
        if model.generate(rows, beams).generated_token_ids != searched:
            return "beams without kept prefixes differ"
    return None


if __name__ == "__main__":
    logging.getLogger("pace").setLevel(logging.ERROR)  # hides warnings about parts that become floats
    sweep.main(
        "Compare random models in random formats with transformers on the dequantised weights.",
        check_case,
        num_cases=300,
    )
