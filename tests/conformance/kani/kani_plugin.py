"""Plugin for kani's tests of engines, with `PaceEngine` and the bundled model instead of the Hub's models. The engine
parses calls itself, or leaves them to kani's parser. Answers that the bundled model cannot give are scripted."""

from __future__ import annotations

import json

import kani.engines.huggingface
import pytest
from kani.model_specific.qwen3 import Qwen3Parser
from script import Script  # from the folder above: `tests` is kani's package here

from pace.assets import TINY
from pace.integrations.kani import PaceEngine
from pace.llm import LLMModel


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def weather(location: str) -> str:
    return call("get_weather", location=location, unit="fahrenheit")


SCRIPT = {
    # Results of calls, the last ones first.
    "<|tool|>42<": "15 plus 27 is 42.",
    "<|tool|>50<": "(8 times 5) plus 10 is 50.",
    "<|tool|>40<": call("add", a=40, b=10),
    "Sunny, 75 degrees": "In San Francisco it is foggy, 65 degrees, and in New York sunny, 75 degrees.",
    "<|tool|>1225<": "Alice has ordered for 1225.",
    "'name': 'Alice'": call("get_order_total", user_id=1),
    "3-day forecast for Miami": "In Miami it is humid, 85 degrees. Then come clouds, sun and rain.",
    "<|tool|>13<": "5 times 9 times 13 is 585.",
    "Success! x = 42": "It worked the second time.",
    "CUSTOM ERROR HANDLER": "The time is not known: the time API is offline.",
    # Questions.
    "What is 15 plus 27?": call("add", a=15, b=27),
    "(8 times 5) plus 10": call("multiply", a=8, b=5),
    "San Francisco and New York": weather("San Francisco, CA") + weather("New York, NY"),
    "Find all users in San Francisco": call("search_users", city="San Francisco"),
    "Send an email": call(
        "send_email", recipient="john@example.com", subject="Meeting Tomorrow", body="See you at 3pm"
    ),
    "current weather in Miami": weather("Miami, FL") + call("get_forecast", location="Miami, FL"),
    "(2+3) * (4+5) * (6+7)": call("add", a=2, b=3) + call("add", a=4, b=5) + call("add", a=6, b=7),
    "Call the flaky_function": call("flaky_function", x=42),
    "What time is it?": call("get_time"),
    "calculate a factorial": "ABRACADABRA\ndef factorial(n): return 1 if n < 2 else n * factorial(n - 1)",
    "<|user|>crab<": "kani",
}


def scripted(**options: object) -> PaceEngine:
    model = LLMModel(TINY, dtype="float32", progress=False)
    return PaceEngine(model=model, logits_processors=[Script(model.tokenizer, SCRIPT)], **options)


def pytest_configure() -> None:
    kani.engines.huggingface.HuggingEngine = lambda model_id, **options: PaceEngine(TINY, **options)


@pytest.fixture(scope="session", params=["pace parses", "kani parses"])
def e2e_huggingface_engine(request: pytest.FixtureRequest) -> object:
    """Replaces this engine. `-k` deselects kani's other engines."""
    return scripted() if request.param == "pace parses" else Qwen3Parser(scripted(parser=None))
