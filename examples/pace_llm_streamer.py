"""Print a text while it is generated: `model.stream` yields it in pieces of whole characters.

python examples/pace_llm_streamer.py "Tell me a story about a robot."
"""

import argparse

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig


def main() -> None:
    parser = argparse.ArgumentParser(description="Stream text with pace.")
    parser.add_argument("prompt", nargs="?", default="Tell me a story about a little fox.")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument("--max-new-tokens", type=int, default=200)
    args = parser.parse_args()

    model = LLMModel(args.model)
    messages = [{"role": "user", "content": args.prompt}]
    inputs = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    for piece in model.stream(inputs, SamplingConfig(max_new_tokens=args.max_new_tokens)):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
