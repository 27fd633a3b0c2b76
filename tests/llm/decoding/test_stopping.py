"""Why a sequence ends, and where its text does."""

from __future__ import annotations

import pytest

from pace.llm.decoding.detokenizer import decode
from pace.llm.decoding.stopping_criteria import StoppingCriteria, StopStrings
from pace.llm.sequence import Sequence
from tests.llm.decoding.tokenizer_zoo import CORPUS, ZOO


def run(stopping: StoppingCriteria, prompt: list[int], generated: list[int]) -> tuple[str | None, list[int]]:
    """The reason and the tokens up to it."""
    sequence = Sequence(prompt, None, stopping, stopping.max_length)
    for token in generated:
        sequence.append(token)
        reason = stopping.stop_now(sequence)
        assert stopping.stop_now(sequence) == reason, "asking again changes nothing"
        if reason:
            return reason, sequence.generated
    return None, sequence.generated


@pytest.mark.parametrize(
    "max_length, end, generated, reason, count",
    [
        (10, [7], [5, 7, 5], "stop", 2),
        (10, [7, 8], [5, 8, 7], "stop", 2),
        (4, [7], [5, 5, 5], "length", 2),
        (4, [7], [5, 7, 5], "stop", 2),  # an end token at the last place is a stop
        (10, [], [7, 7], None, 2),
        (10, [1], [5, 5], None, 2),  # in the prompt
    ],
)
def test_end_tokens_and_length(
    max_length: int, end: list[int], generated: list[int], reason: str | None, count: int
) -> None:
    assert run(StoppingCriteria(max_length, end), [1, 2], generated) == (reason, generated[:count])


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("stop", ["fox", "a time there", ",", "e t", "upon", "O", "?", "naïve f", "ïv"])
def test_stop_strings_across_and_within_tokens(kind: str, stop: str) -> None:
    tokenizer = ZOO[kind]()
    text = CORPUS[0]
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    stopping = StoppingCriteria(1000, stop_strings=StopStrings(tokenizer, ["never said", stop]))
    reason, used = run(stopping, [3], tokens)
    assert reason == "stop"
    assert stop in decode(tokenizer, used) and stop not in decode(tokenizer, used[:-1]), "it stops at once"
    assert stopping.trim(decode(tokenizer, used)) == text[: text.index(stop)]


def test_a_stop_string_in_the_prompt_does_not_stop() -> None:
    tokenizer = ZOO["byte_level"]()
    prompt, generated = tokenizer("the fox and the f")["input_ids"], tokenizer("oxen")["input_ids"]
    reason, _ = run(StoppingCriteria(1000, stop_strings=StopStrings(tokenizer, ["fox"])), prompt, generated)
    assert reason is None


def test_without_a_match_the_text_is_whole() -> None:
    tokenizer = ZOO["byte_level"]()
    stopping = StoppingCriteria(1000, stop_strings=StopStrings(tokenizer, ["zebra"]))
    run(stopping, [3], tokenizer("a fox")["input_ids"])
    assert stopping.trim("a fox") == "a fox"
