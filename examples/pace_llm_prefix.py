"""Several questions about one text: their common prefix is computed once, and every answer is the same as without
sharing.

    python examples/pace_llm_prefix.py
    python examples/pace_llm_prefix.py "Who is Ben?" --prefix-cache-bytes 0
"""

import argparse

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig

QUESTIONS = ["Tell me a story about a little fox.", "Count from 3 to 9.", "What is the capital of Japan?"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Share what prompts begin with.")
    parser.add_argument("questions", nargs="*", default=QUESTIONS)
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument(
        "--system",
        default="You are a helpful assistant. " * 12,
        help="what every conversation begins with (default: something long)",
    )
    parser.add_argument(
        "--prefix-cache-bytes", default="auto", help="what may be kept of earlier texts, such as 64MiB; 0 for nothing"
    )
    parser.add_argument("--max-new-tokens", type=int, default=60)
    args = parser.parse_args()

    model = LLMModel(args.model, prefix_cache_bytes=args.prefix_cache_bytes)
    config = SamplingConfig(max_new_tokens=args.max_new_tokens)
    for question in args.questions:
        messages = [{"role": "system", "content": args.system}]
        for turn in (question, "And one more."):
            messages.append({"role": "user", "content": turn})
            prompt = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            output = model.generate(prompt, config)
            metrics = output.metrics
            told = (
                f"{metrics.num_prompt_tokens} tokens, {metrics.num_reused_tokens} reused, first token after "
                f"{metrics.seconds_to_first_token * 1e3:.1f} ms"
            )
            print(f"- {turn} [{told}]\n  {output.texts[0]}")
            messages.append({"role": "assistant", "content": output.texts[0]})
    print(f"\n{model.memory_report()}")


if __name__ == "__main__":
    main()
