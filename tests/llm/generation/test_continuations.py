"""The blank between a prompt and its continuation, in every API that returns text."""

from __future__ import annotations

import asyncio
import io

import pytest

from pace.llm import CallbackStreamer, SamplingConfig, StepFeedback, TextStreamer
from pace.llm.chat.template import ChatTemplate
from pace.llm.chat.turn import plan_turn
from tests.llm.generation.scripted import say, scripted
from tests.llm.text.tokenizer_zoo import DECODERS

PROMPT, TEXT = "the fox", " who said 🦊  café"
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.fixture(params=DECODERS)
def kind(request) -> str:
    return request.param


@pytest.fixture
def generator(kind: str):
    return scripted(DECODERS[kind]())


def ids(generator, text: str) -> list[int]:
    return generator.tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def prompt(generator) -> list[int]:
    """Returns the tokens of PROMPT, and makes the model generate TEXT after them."""
    tokens, prompt = ids(generator, PROMPT + TEXT), ids(generator, PROMPT)
    assert tokens[: len(prompt)] == prompt
    say(generator, prompt, tokens[len(prompt) :])
    return prompt


def test_generate_and_beams_and_samples(generator, prompt) -> None:
    for given in (prompt, PROMPT):
        assert generator.generate(given).texts == [TEXT]
    assert generator.generate([PROMPT, PROMPT]).texts == [TEXT, TEXT]
    assert generator.generate(PROMPT, SamplingConfig(num_beams=2, num_return_sequences=2)).texts[0] == TEXT
    assert generator.generate(PROMPT, do_sample=True, num_return_sequences=2, top_k=1).texts == [TEXT, TEXT]


def test_streams_requests_and_callbacks(generator, prompt) -> None:
    assert "".join(generator.stream(PROMPT)) == TEXT
    request = generator.add_request(PROMPT)
    assert request.result().texts == [TEXT] == [request.text] == ["".join(request)]

    async def astream() -> str:
        return "".join([piece async for piece in generator.astream(PROMPT)])

    assert asyncio.run(astream()) == TEXT
    events = []
    generator.generate([PROMPT, PROMPT], streamer=CallbackStreamer(events.append, generator.tokenizer))
    assert ["".join(event.text for event in events if event.row == row) for row in (0, 1)] == [TEXT, TEXT]


def test_streamers_also_by_hand(generator, prompt) -> None:
    import torch

    begin = generator.tokenizer.decode(prompt)
    for skip_prompt in (True, False):
        expected = ("" if skip_prompt else begin) + TEXT + "\n"
        file = io.StringIO()
        generator.generate(PROMPT, streamer=TextStreamer(generator.tokenizer, skip_prompt, file))
        assert file.getvalue() == expected
        file = io.StringIO()
        streamer = TextStreamer(generator.tokenizer, skip_prompt, file)
        streamer.put(torch.tensor([prompt]))
        for token in generator.engine.model.script:
            streamer.put(torch.tensor([token]))
        streamer.end()
        assert file.getvalue() == expected


def test_stop_strings_see_the_blank(generator, prompt) -> None:
    for stop in (" who", " s", "fé"):
        config = SamplingConfig(stop_strings=[stop, "never"])
        expected = TEXT[: TEXT.index(stop)]
        out = generator.generate(PROMPT, config)
        assert out.texts == [expected] == ["".join(generator.stream(PROMPT, config))] and out.finish_reasons == ["stop"]
        assert stop in generator.tokenizer.decode(prompt + out.generated_token_ids[0])
        assert generator.generate(PROMPT, config, num_beams=2).texts == [expected]
    assert generator.generate(PROMPT, stop_strings=["the", "fox", "x "]).texts == [TEXT]


def test_texts_of_log_probabilities_joined_are_the_text(generator, prompt) -> None:
    out = generator.generate(PROMPT, logprobs=1)
    *entries, end = out.logprobs[0]
    assert "".join(entry.text for entry in entries).startswith(" who said ")
    assert end.token == generator.tokenizer.eos_token_id


def test_step_callbacks_see_and_change_the_text(generator, prompt) -> None:
    told = []
    generator.generate(PROMPT, step_every=1, step_callback=lambda context: told.append(context.text))
    assert told[0] == TEXT[: len(told[0])] and told[-1] == TEXT and all(text.startswith(" ") for text in told if text)

    def put_in(context):
        told.append(context)
        return StepFeedback(stop=True, take_back=len(context.token_ids), text=" fox") if len(told) == 1 else None

    for string in (" wh", "w"):
        told.clear()
        out = generator.generate(PROMPT, step_strings=[string], step_callback=put_in)
        assert told[0].string == string and TEXT.startswith(told[0].text) and string in told[0].text
        assert out.texts == [" fox"]
        told.clear()
        config = SamplingConfig(step_strings=[string], step_callback=put_in)
        text = ""
        for piece in generator.add_request(PROMPT, config):
            text = text[: len(text) - piece.taken_back] + piece
        assert text == " fox"


def test_grammars_give_what_they_ask_for(generator, prompt) -> None:
    pytest.importorskip("llguidance")
    if "Metaspace" in str(generator.tokenizer.backend_tokenizer.decoder):
        pytest.skip("llguidance does not take this decoder")
    for text in (" who", "who", " a b"):
        assert generator.generate(PROMPT, regex=text).texts == [text] == ["".join(generator.stream(PROMPT, regex=text))]
    out = generator.generate(PROMPT, grammar='start: " " word\nword[capture]: /[a-z]{3}/')
    assert out.texts == [" " + out.captures[0]["word"][0].text]


def test_healed_prompts_go_on_after_what_they_had(generator, kind) -> None:
    tokens = ids(generator, PROMPT + TEXT)
    for length in range(1, len(PROMPT + TEXT)):
        begin = (PROMPT + TEXT)[:length]
        healer = generator.constraints._prompt_healer()
        healed = healer.heal(ids(generator, begin))
        if healed.tokens != tokens[: len(healed.tokens)]:
            continue
        say(generator, healed.tokens, tokens[len(healed.tokens) :])
        expected = (PROMPT + TEXT)[length:]
        assert generator.generate(begin, token_healing=True).texts == [expected]
        assert "".join(generator.stream(begin, token_healing=True)) == expected


def test_a_prompt_of_special_tokens_is_no_text(generator, kind) -> None:
    end = generator.tokenizer.eos_token_id
    tokens = ids(generator, "fox")
    say(generator, [end], tokens)
    begins = " fox" if kind == "with_first_blank" else "fox"
    assert generator.generate([end]).texts == [begins] == ["".join(generator.stream([end]))]


def test_a_new_turn_begins_without_a_blank_and_one_that_goes_on_keeps_it(generator, kind) -> None:
    tokenizer = generator.tokenizer
    tokenizer.chat_template = TEMPLATE
    try:
        question = [{"role": "user", "content": "fox?"}]
        answer = ids(generator, "who said")
        turn = plan_turn(ChatTemplate(tokenizer), question)
        say(generator, ids(generator, turn.prompt), answer)
        begins = " who said" if kind == "with_first_blank" else "who said"
        assert generator.chat(question).output.text == begins
        assert generator.generate_turn(turn, ids(generator, turn.prompt)).texts == [begins]
        assert generator.chat(question, stop_strings=["id"]).output.text == begins[:-2]
        messages = [*question, {"role": "assistant", "content": "the fox"}]
        turn = plan_turn(ChatTemplate(tokenizer), messages, begin_answer=False, continue_answer=True)
        prompt = ids(generator, turn.prompt)
        say(generator, prompt, ids(generator, PROMPT + TEXT)[len(ids(generator, PROMPT)) :])
        assert generator.answer(turn, prompt, SamplingConfig()).output.text == TEXT
        assert generator.answer(turn, prompt, SamplingConfig(stop_strings=[" s"])).output.text == " who"
        empty = [*question, {"role": "assistant", "content": ""}]
        assert not plan_turn(ChatTemplate(tokenizer), empty, begin_answer=False, continue_answer=True).continues
    finally:
        tokenizer.chat_template = None
