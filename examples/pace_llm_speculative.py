"""The same text in fewer steps: draft tokens are proposed cheaply, and one step verifies several of them.

python examples/pace_llm_speculative.py
python examples/pace_llm_speculative.py --model Qwen/Qwen2.5-7B-Instruct --draft Qwen/Qwen2.5-0.5B-Instruct
"""

import argparse

from pace.assets import TINY, TINY_DRAFT
from pace.llm import DraftModelConfig, LLMModel, PromptLookupConfig, SamplingConfig

PROMPTS = [
    "Tell me a story about a little fox.",
    "Copy this sentence: Every morning Ludwig waters his seven cactus plants before breakfast.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode with and without drafts with pace.")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument(
        "--draft", default=TINY_DRAFT, help="a smaller model of the same tokenizer (default: the bundled one)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=120)
    parser.add_argument(
        "--do-sample", action="store_true", help="with a seed: drafts do not change what is drawn either"
    )
    args = parser.parse_args()

    ways = {"without drafts": None, "prompt lookup": PromptLookupConfig(), "draft model": DraftModelConfig(args.draft)}
    models = {way: LLMModel(args.model, spec_config=spec_config) for way, spec_config in ways.items()}
    config = SamplingConfig(max_new_tokens=args.max_new_tokens, do_sample=args.do_sample, seed=1)
    tokenizer = models["without drafts"].tokenizer

    for prompt in PROMPTS:
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        expected = models["without drafts"].generate(inputs, config)
        print(f"{prompt}\n  {expected.texts[0]}")
        for way, model in models.items():
            model.generate(inputs, config)  # the engine learns the best draft length while it runs
            output = model.generate(inputs, config)
            metrics = output.metrics
            print(
                f"  {way:<15}{metrics.decode_tokens_per_second:>7,.0f} tokens/s, {metrics.num_accepted_tokens} of "
                f"{metrics.num_drafted_tokens} "
                f"drafts accepted, same text: {output.texts == expected.texts}"
            )


if __name__ == "__main__":
    main()
