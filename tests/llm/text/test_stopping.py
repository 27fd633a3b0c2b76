"""The finish reason of a sequence, and the place where its text ends."""

from __future__ import annotations

import pytest

from pace.llm.clients.streamer import CallbackStreamer
from pace.llm.configs import SamplingConfig
from pace.llm.sequence import Sequence
from pace.llm.text.detokenizer import Detokenizer, decode
from pace.llm.text.reader import TextReader
from pace.llm.text.stopping_criteria import StoppingCriteria
from tests.llm.fake_model import FakeTokenizer
from tests.llm.generators import make_generator
from tests.llm.speculation import drafters
from tests.llm.text.tokenizer_zoo import CORPUS, ZOO


def run(stopping: StoppingCriteria, prompt: list[int], generated: list[int]) -> tuple[str | None, list[int]]:
    """Returns the finish reason and the tokens generated up to there."""
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
        (4, [7], [5, 7, 5], "stop", 2),  # an end token in the last place is a stop
        (10, [], [7, 7], None, 2),
        (10, [1], [5, 5], None, 2),  # stop tokens in the prompt do not count
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
    stopping = StoppingCriteria(1000, text=TextReader(tokenizer, ["never said", stop]))
    reason, used = run(stopping, [3], tokens)
    assert reason == "stop"
    assert stop in decode(tokenizer, used) and stop not in decode(tokenizer, used[:-1]), "it stops at once"
    assert stopping.text.text_of(used) == text[: text.index(stop)]


def test_a_stop_string_in_the_prompt_does_not_stop() -> None:
    tokenizer = ZOO["byte_level"]()
    prompt, generated = tokenizer("the fox and the f")["input_ids"], tokenizer("oxen")["input_ids"]
    reason, _ = run(StoppingCriteria(1000, text=TextReader(tokenizer, ["fox"])), prompt, generated)
    assert reason is None


def test_without_a_match_the_text_is_whole() -> None:
    tokenizer = ZOO["byte_level"]()
    stopping = StoppingCriteria(1000, text=TextReader(tokenizer, ["zebra"]))
    run(stopping, [3], tokenizer("a fox")["input_ids"])
    assert "a fox"[: stopping.text.cut] == "a fox"


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("ends", [False, True])
def test_a_stop_string_in_the_text_of_an_end_token_is_cut(kind: str, ends: bool) -> None:
    tokenizer = ZOO[kind]()
    tokens = tokenizer("Once upon a time", add_special_tokens=False)["input_ids"]
    stopping = StoppingCriteria(1000, tokens[-1:] if ends else [], TextReader(tokenizer, ["ime", "time"]))
    reason, used = run(stopping, [3], tokens)
    pieces = TextReader(tokenizer, ["ime", "time"])
    streamed = "".join([pieces.push(token) for token in used] + [pieces.flush()])
    assert reason == "stop" and stopping.text.text_of(used) == streamed == "Once upon a "


def test_generate_and_stream_agree_about_the_text_of_an_end_token() -> None:
    """The end token here is a letter that is also a stop string."""
    generator = make_generator()
    tokens = generator.generate([2, 2], SamplingConfig(max_new_tokens=12, ignore_eos=True)).generated_token_ids[0]
    end, letter = tokens[5], chr(97 + tokens[5] % 26)
    assert end not in (0, *tokens[:5]) and letter not in generator.tokenizer.decode(tokens[:5])
    config = SamplingConfig(max_new_tokens=12, eos_token_id=end, stop_strings=[letter])
    out = generator.generate([2, 2], config)
    assert out.generated_token_ids == [tokens[:6]]
    assert out.texts == ["".join(generator.stream([2, 2], config))] == [generator.tokenizer.decode(tokens[:5])]


@pytest.mark.parametrize("kind", ZOO)
def test_tokens_that_are_dropped_do_not_cut_the_text(kind: str) -> None:
    tokenizer = ZOO[kind]()
    tokens = tokenizer("Once upon a time there was", add_special_tokens=False)["input_ids"]
    for kept in range(len(tokens)):
        stopping = StoppingCriteria(1000, text=TextReader(tokenizer, ["time"]))
        reason, used = run(stopping, [3], tokens)
        assert reason == "stop"
        stopping.rewind(kept)
        text = decode(tokenizer, tokens[:kept])
        assert stopping.text.text_of(tokens[:kept]) == text.partition("time")[0]
        if kept < len(used):
            again = Sequence([3], None, stopping, 1000)
            again.tokens += tokens[:kept]
            assert stopping.stop_now(again) is None
            again.tokens += used[kept:]
            assert stopping.stop_now(again) == "stop", "and what stays is followed again"
            assert stopping.text.text_of(used) == "Once upon a "


class Struck:
    """A tokenizer interrupted at its n-th call."""

    def __init__(self, tokenizer, strike_at: int) -> None:
        self.tokenizer, self.calls_left = tokenizer, strike_at
        self.all_special_ids, self.added_tokens_decoder = tokenizer.all_special_ids, tokenizer.added_tokens_decoder

    def _call(self, function, *arguments, **named):
        self.calls_left -= 1
        if self.calls_left == 0:
            raise KeyboardInterrupt
        return function(*arguments, **named)

    def decode(self, *arguments, **named) -> str:
        return self._call(self.tokenizer.decode, *arguments, **named)

    def convert_ids_to_tokens(self, token: int) -> str:
        return self._call(self.tokenizer.convert_ids_to_tokens, token)


@pytest.mark.parametrize("kind", ZOO)
def test_broken_off_at_any_call_and_asked_again(kind: str) -> None:
    """No token is processed twice, and none is skipped."""
    tokenizer = ZOO[kind]()
    tokens = tokenizer("Once upon a naïve 🦊 time there was", add_special_tokens=False)["input_ids"]
    strike_at, was_struck = 0, True
    while was_struck:
        strike_at += 1
        struck = Struck(tokenizer, strike_at)
        stopping = StoppingCriteria(1000, text=TextReader(struck, ["🦊 ti"]))
        sequence, reason = Sequence([3], None, stopping, 1000), None
        while reason is None:
            sequence.append(tokens[sequence.num_generated])
            try:
                reason = stopping.stop_now(sequence)
            except KeyboardInterrupt:
                reason = stopping.stop_now(sequence)
        was_struck = struck.calls_left <= 0
        assert reason == "stop"
        assert decode(tokenizer, sequence.generated)[: stopping.text.cut] == "Once upon a naïve ", f"call {strike_at}"
    assert strike_at > sequence.num_generated, "each token takes a call, and their number varies with the training"


@pytest.mark.parametrize("kind", ZOO)
def test_a_push_that_is_broken_off_has_not_been(kind: str) -> None:
    tokenizer = ZOO[kind]()
    tokens = tokenizer("a naïve 🦊", add_special_tokens=False)["input_ids"]
    for strike_at in range(1, 4 * len(tokens)):
        struck = Struck(tokenizer, strike_at)
        follower, pieces = Detokenizer(struck), []
        for token in tokens:
            try:
                pieces.append(follower.push(token))
            except KeyboardInterrupt:
                pieces.append(follower.push(token))
        struck.calls_left = -1  # no further interruptions
        assert "".join(pieces) + follower.flush() == decode(tokenizer, tokens), f"call {strike_at}"


@pytest.mark.parametrize("source", [None, "perfect"])
def test_a_callback_that_has_enough_sees_its_text_whole(source: str | None) -> None:
    """Later tokens may complete a stop string, in the same step or before the callback's answer takes effect."""
    plain = drafters.make_generator().generate([2, 2], SamplingConfig(max_new_tokens=12, ignore_eos=True))
    tokens, tokenizer = plain.generated_token_ids[0], FakeTokenizer()
    stop = tokenizer.decode(tokens[4:6])
    assert 0 not in tokens[:6] and stop not in tokenizer.decode(tokens[:5])
    config = SamplingConfig(max_new_tokens=12, ignore_eos=True, stop_strings=[stop])
    for enough in range(1, 6):
        generator = drafters.make_generator(source and drafters.make_source(source), 8)
        told = []

        def watch(event) -> bool:
            told.append(event)
            return len(told) < enough

        out = generator.generate([2, 2], config, CallbackStreamer(watch, tokenizer))
        assert out.generated_token_ids == [tokens[:enough]] and out.finish_reasons == ["cancelled"]
        assert out.texts == [tokenizer.decode(tokens[:enough])] == ["".join(event.text for event in told)]
