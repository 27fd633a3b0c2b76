"""Beam search: follows several texts at once and returns the texts with the highest total likelihood. Greedy decoding
takes the likeliest token each time, which may lead to a less likely text.

    python examples/pace_llm_beam.py
    python examples/pace_llm_beam.py "The capital of France" --num-beams 8 --num-return-sequences 4
"""

import argparse

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig


def main() -> None:
    parser = argparse.ArgumentParser(description="Continue a prompt by beam search with pace.")
    parser.add_argument("prompt", nargs="?", default="Once upon a time, there was a", help="the text to continue")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    parser.add_argument("--max-new-tokens", type=int, default=16)
    parser.add_argument("--num-beams", type=int, default=4)
    parser.add_argument("--num-return-sequences", type=int, default=3)
    parser.add_argument(
        "--length-penalty", type=float, default=1.0, help="above 0 favours long texts, below 0 short ones"
    )
    args = parser.parse_args()

    model = LLMModel(args.model)
    greedy = model.generate(args.prompt, SamplingConfig(num_beams=1, max_new_tokens=args.max_new_tokens, logprobs=True))
    beams = model.generate(
        args.prompt,
        SamplingConfig(
            num_beams=args.num_beams,
            num_return_sequences=args.num_return_sequences,
            length_penalty=args.length_penalty,
            max_new_tokens=args.max_new_tokens,
            logprobs=True,
        ),
    )

    print(f"prompt: {args.prompt}")
    for name, output in (("greedy", greedy), (f"{args.num_beams} beams", beams)):
        for text, tokens in zip(output.texts, output.logprobs):
            print(
                f"{name}: log-probability {sum(token.logprob for token in tokens):7.3f} in {len(tokens):2} "
                f"tokens: {text!r}"
            )
    print("scores: " + ", ".join(f"{score:.4f}" for score in beams.sequence_scores))


if __name__ == "__main__":
    main()
