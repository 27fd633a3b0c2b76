"""A guidance program: a conversation, a choice, numbers in a given form, and several programs at once.

    python examples/pace_llm_guidance.py
    python examples/pace_llm_guidance.py --model Qwen/Qwen2.5-0.5B-Instruct

Needs guidance: pip install "pace-llm[guidance]".
"""

import argparse

from guidance import assistant, gen, regex, select, user

from pace.assets import TINY
from pace.integrations.guidance import Pace

COUNTRIES = ["Japan", "Egypt", "Spain"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run programs of guidance on a model of pace.")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    args = parser.parse_args()

    lm = Pace(args.model, echo=False)
    chat = lm
    with user():
        chat += "What is the weather in Rome?"
    with assistant():
        chat += gen(tools=[get_weather])
        chat += gen("answer", max_tokens=30)
    print(chat["answer"])

    out = lm + "1, 2, 3, 4, " + regex(r"\d+", name="next") + ", and I like " + select(["dogs", "cats"], name="pet")
    print(out["next"], out["pet"])

    capitals = lm.batch([f"The capital of {country} is" + gen("city", regex=" [A-Z][a-z]+") for country in COUNTRIES])
    print(*[out["city"].strip() for out in capitals])


def get_weather(city: str) -> str:
    """The weather in a city, now."""
    return f"sunny, {20 + len(city)} degrees"


if __name__ == "__main__":
    main()
