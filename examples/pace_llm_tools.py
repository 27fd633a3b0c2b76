"""A model that calls your Python function: the model makes a call, the program runs it, the model reports the result.

    python examples/pace_llm_tools.py
    python examples/pace_llm_tools.py "What is the weather in Paris?"

Needs llguidance: pip install "pace-llm[grammar]".
"""

import argparse
import json

from pace.assets import TINY
from pace.llm import LLMModel

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city, now.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def get_weather(city: str) -> str:
    return f"sunny, {20 + len(city)} degrees"


FUNCTIONS = {"get_weather": get_weather}


def main() -> None:
    parser = argparse.ArgumentParser(description="Let a model in pace call a function.")
    parser.add_argument("question", nargs="?", default="What is the weather in Rome?")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    args = parser.parse_args()

    model = LLMModel(args.model)
    messages = [{"role": "user", "content": args.question}]
    answer = model.chat(messages, tools=TOOLS)
    while answer.finish_reason == "tool_calls":
        messages.append(answer.message)
        for call in answer.tool_calls:
            result = FUNCTIONS[call.name](**json.loads(call.arguments))
            print(f"{call.name}({call.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
        answer = model.chat(messages, tools=TOOLS)
    print(answer.text)


if __name__ == "__main__":
    main()
