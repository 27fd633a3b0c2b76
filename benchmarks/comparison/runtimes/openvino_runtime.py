"""OpenVINO GenAI: `LLMPipeline` on a model exported by optimum-intel, given token ids. Its own metrics have the time of
each token."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from benchmarks.comparison.runtimes.base import Prompts, Runtime, Timing, Variant, median_step

QUANTIZATION = {"int8": {"bits": 8, "sym": False}, "int4": {"bits": 4, "sym": True, "group_size": 32}}

BATCHED_TOKENS = 4096
"""Tokens of prompts processed at once: all of a scenario's. The default of 256 would split a prompt."""


def device_settings(threads: int, precision: str) -> dict[str, object]:
    """The CPU plugin quantises activations if it detects VNNI, regardless of oneDNN's limit. But oneDNN limited to AVX2
    has no product for them. So activations stay floats then, as on a CPU without VNNI."""
    settings: dict[str, object] = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision}
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2":
        settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 0
    return settings


class OpenVINO(Runtime):
    name = "openvino-genai"
    packages = ("openvino-genai", "openvino")
    modules = ("openvino", "openvino_genai")
    variants = (
        Variant("fp16", "fp16", 16, 8),
        Variant("bf16", "bf16", 16, 8),
        Variant("int8", "int8", 8, 8),
        Variant("int4", "int4", None, 8),
    )

    @classmethod
    def refusal(cls, variant: str) -> str | None:
        import openvino

        capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if variant == "bf16" and "BF16" not in capabilities:
            return f"its precisions on this CPU are {', '.join(sorted(capabilities))}"
        return None

    @classmethod
    def conversion(cls, variant: str) -> tuple[str, str]:
        return cls.name, "fp16" if variant == "bf16" else variant  # the CPU plugin rounds to bf16 when it compiles

    @classmethod
    def convert(cls, checkpoint: Path, variant: str, target: Path) -> None:
        if variant in QUANTIZATION:
            from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

            config = OVWeightQuantizationConfig(**QUANTIZATION[variant])
            OVModelForCausalLM.from_pretrained(
                checkpoint, export=True, compile=False, quantization_config=config
            ).save_pretrained(target)
        else:
            from optimum.exporters.openvino import main_export
            from optimum.intel import OVConfig

            main_export(
                str(checkpoint),
                target,
                task="text-generation-with-past",
                ov_config=OVConfig(dtype="fp16"),
                convert_tokenizer=False,
            )

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        import openvino_genai

        precision = "bf16" if variant == "bf16" else "f32"
        schedule = openvino_genai.SchedulerConfig()
        schedule.enable_prefix_caching = False
        schedule.max_num_batched_tokens = BATCHED_TOKENS
        settings = device_settings(threads, precision)
        self.pipeline = openvino_genai.LLMPipeline(
            str(source), "CPU", scheduler_config=schedule, PERFORMANCE_HINT="LATENCY", **settings
        )
        self.source, self.precision, self.threads = source, precision, threads

    def settings(self) -> dict[str, str]:
        return {
            **{name: str(value) for name, value in device_settings(self.threads, self.precision).items()},
            "KV": "u8, its default",
            "max_num_batched_tokens": str(BATCHED_TOKENS),
        }

    def run(self, prompts: Prompts, generated: int) -> Timing:
        import openvino
        import openvino_genai

        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = generated + 1, False
        config.ignore_eos, config.eos_token_id = True, 0  # without an end token it uses -1, which it rejects
        began = time.perf_counter()
        result = self.pipeline.generate(inputs, config)
        elapsed = time.perf_counter() - began
        lengths = {len(tokens) for tokens in result.tokens}
        if lengths != {generated + 1}:
            raise RuntimeError(f"OpenVINO GenAI was asked for {generated + 1} tokens and made {sorted(lengths)}")
        metrics = result.perf_metrics.raw_metrics
        prefill = metrics.m_times_to_first_token[0] / 1e6
        times = [time / 1e3 for time in metrics.m_new_token_times]  # milliseconds, contrary to the documentation
        if not 0.8 * elapsed < prefill + times[-1] - times[0] < 1.05 * elapsed:
            raise RuntimeError(
                f"OpenVINO GenAI's clock tells {prefill:.3f} + {times[-1] - times[0]:.3f} s of {elapsed:.3f} s"
            )
        return Timing(prefill, median_step([after - before for before, after in zip(times, times[1:])]))

    def logits(self, prompt: list[int]) -> np.ndarray:
        """Runs the exported model without the pipeline, which returns no logits."""
        import openvino

        model = openvino.Core().compile_model(
            str(self.source / "openvino_model.xml"), "CPU", device_settings(self.threads, self.precision)
        )
        count = len(prompt)
        given = {"input_ids": [prompt], "attention_mask": [[1] * count], "position_ids": [list(range(count))]}
        inputs = {
            name: np.array(value, np.int64)
            for name, value in given.items()
            if name in {n for i in model.inputs for n in i.names}
        }
        outputs = model(inputs | {"beam_idx": np.zeros(1, np.int32)})
        return outputs["logits"][0, -1]
