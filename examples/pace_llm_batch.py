"""Several prompts of different lengths at once. There is no padding inside, and each row stops independently.
The texts are the same as one by one, and together they take less time.

    python examples/pace_llm_batch.py
"""

import argparse
import time

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig

QUESTIONS = [
    "What is 7 + 8?",
    "What is the capital of Japan?",
    "Count from 3 to 9.",
    "Tell me a short story about a dog.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Answer several prompts in one batch with pace.")
    parser.add_argument("prompts", nargs="*", default=QUESTIONS, help="any number of prompts")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument("--max-new-tokens", type=int, default=120)
    args = parser.parse_args()

    model = LLMModel(args.model)
    config = SamplingConfig(max_new_tokens=args.max_new_tokens)
    inputs = [
        model.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        for prompt in args.prompts
    ]

    start = time.perf_counter()
    together = model.generate(inputs, config)
    seconds_together = time.perf_counter() - start

    start = time.perf_counter()
    one_by_one = [model.generate(row, config).texts[0] for row in inputs]
    seconds_one_by_one = time.perf_counter() - start

    for prompt, text, reason in zip(args.prompts, together.texts, together.finish_reasons):
        print(f"- {prompt}\n  {text} [{reason}]")
    print(
        f"\ntogether: {seconds_together:.2f} s, one by one: {seconds_one_by_one:.2f} s, same texts: "
        f"{together.texts == one_by_one}"
    )


if __name__ == "__main__":
    main()
