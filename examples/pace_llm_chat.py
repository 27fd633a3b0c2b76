"""A conversation in 20 lines: the history is a list of messages, which the tokenizer's chat template turns into tokens.
`pace chat` is the full version of this.

    python examples/pace_llm_chat.py
    echo "What is the capital of France?" | python examples/pace_llm_chat.py
"""

import argparse
import sys

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with a model in pace.")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument("--system", help="what the model is told before the conversation")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    args = parser.parse_args()

    model = LLMModel(args.model)
    config = SamplingConfig(max_new_tokens=args.max_new_tokens)
    messages = [{"role": "system", "content": args.system}] if args.system else []

    print("Ask something; an empty line or Ctrl-D ends.", file=sys.stderr)
    for line in sys.stdin:
        if not line.strip():
            break
        messages.append({"role": "user", "content": line.strip()})
        inputs = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        answer = ""
        for piece in model.stream(inputs, config):
            print(piece, end="", flush=True)
            answer += piece
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
