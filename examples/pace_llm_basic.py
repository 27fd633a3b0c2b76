"""Load a model, generate text, look at the numbers. Runs without arguments on the small model that comes with pace:

python examples/pace_llm_basic.py
python examples/pace_llm_basic.py --model Qwen/Qwen2.5-0.5B-Instruct --prompt "Why is the sky blue?"
"""

import argparse

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Generate text with pace.")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument("--prompt", default="Tell me a story about a little fox.")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--num-threads", type=int, help="default: one per physical core that this process may use")
    parser.add_argument("--max-new-tokens", type=int, default=300)
    parser.add_argument(
        "--do-sample", action="store_true", help="draw tokens at random instead of taking the most likely"
    )
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    model = LLMModel(args.model, dtype=args.dtype, num_threads=args.num_threads)

    # A chat model needs its template around a question; a base model continues the unchanged text.
    inputs = args.prompt
    if model.tokenizer.chat_template:
        messages = [{"role": "user", "content": args.prompt}]
        inputs = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    # A field that is None takes its value from the model's generation_config.json.
    config = SamplingConfig(
        max_new_tokens=args.max_new_tokens,
        do_sample=args.do_sample or None,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
    )
    output = model.generate(inputs, config)

    print(f"prompt: {args.prompt}\n")
    print(output.texts[0])
    print(f"\n{output.metrics}")


if __name__ == "__main__":
    main()
