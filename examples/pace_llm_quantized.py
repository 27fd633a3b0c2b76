"""One checkpoint in fewer bits: memory, speed, and the loss of likelihood.

python examples/pace_llm_quantized.py
python examples/pace_llm_quantized.py --model Qwen/Qwen2.5-1.5B-Instruct --formats int8 int4
"""

import argparse

from pace.assets import TINY
from pace.llm import LLMModel, QuantizationConfig, SamplingConfig

FORMATS = {
    "bfloat16": None,
    "int8": "int8",
    "fp8": "fp8",
    "int4": "int4",
    "nf4": "nf4",
    "int4, but int8 down": QuantizationConfig("int4", group=32, overrides={"*.down_proj": "int8"}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Load a checkpoint in several formats with pace.")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument("--prompt", default="Tell me a story about a little fox.")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=list(FORMATS))
    parser.add_argument("--max-new-tokens", type=int, default=60)
    args = parser.parse_args()

    config, text = SamplingConfig(max_new_tokens=args.max_new_tokens), None
    for name in args.formats:
        with LLMModel(args.model, quantization=FORMATS[name]) as model:
            prompt = model.tokenizer.apply_chat_template(
                [{"role": "user", "content": args.prompt}], add_generation_prompt=True, return_dict=False
            )
            output, report = model.generate(prompt, config), model.memory_report()
            text = text or prompt + output.generated_token_ids[0]  # the first model's text, which all models score
            likelihood = model.score(text)[0].mean().item()
            print(
                f"{name}: {sum(report.weights.values()) / 2**20:.1f} MiB of weights, {report.compression():.2f} "
                f"times less than bfloat16, "
                f"{output.metrics.decode_tokens_per_second:,.0f} tokens/s, mean log-probability of the first text "
                f"{likelihood:.3f}\n  {output.texts[0]}"
            )


if __name__ == "__main__":
    main()
