"""A kani chat on a pace model that calls your Python function, and two chats at once.

    python examples/pace_llm_kani.py
    python examples/pace_llm_kani.py "What is the weather in Paris?"
    python examples/pace_llm_kani.py --model Qwen/Qwen2.5-1.5B-Instruct

Needs kani: pip install "pace-llm[kani]".
"""

import argparse
import asyncio

from kani import ChatRole, Kani, ai_function

from pace.assets import TINY
from pace.integrations.kani import PaceEngine

QUESTIONS = ["What is the capital of Japan?", "What is the capital of Egypt?"]


class WeatherKani(Kani):
    @ai_function()
    def get_weather(self, city: str):
        """The weather in a city, now."""
        return f"sunny, {20 + len(city)} degrees"


async def main() -> None:
    parser = argparse.ArgumentParser(description="Chat by kani with a model in pace.")
    parser.add_argument("question", nargs="?", default="What is the weather in Rome?")
    parser.add_argument("--model", default=TINY, help="a directory or a Hub id (default: the bundled model)")
    args = parser.parse_args()

    engine = PaceEngine(args.model)
    async for stream in WeatherKani(engine).full_round_stream(args.question):
        async for piece in stream:
            print(piece, end="", flush=True)
        message = await stream.message()
        for call in message.tool_calls or ():
            print(f"{call.function.name}({call.function.arguments}) -> ", end="")
        if message.role is ChatRole.FUNCTION or not message.tool_calls:
            print()

    answers = await asyncio.gather(*[Kani(engine).chat_round(question) for question in QUESTIONS])
    for answer in answers:
        print(answer.text, f"[{answer.extra['pace']['completion_tokens']} tokens]")
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
