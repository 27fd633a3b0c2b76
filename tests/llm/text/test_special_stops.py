"""Stop strings that name special tokens, which do not appear in the text."""

from __future__ import annotations

import functools
import random

import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from pace.llm import SamplingConfig
from pace.llm.sequence import PLAIN_TEXT, Sequence, TextRules
from pace.llm.text.detokenizer import decode_after
from pace.llm.text.reader import TextReader
from pace.llm.text.stopping_criteria import StoppingCriteria
from tests.llm.generation.scripted import say, scripted
from tests.llm.text.tokenizer_zoo import ZOO

NAMES = ["<|im_end|>", "<|im_start|>", "</turn>", "[END]"]
TEMPLATE = "{% for message in messages %}{{ message['content'] + '\n' }}{% endfor %}"


@functools.cache
def with_special_tokens(kind: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of the zoo with NAMES as special tokens and <tool> as text. Its settings name none."""
    tokenizer = ZOO[kind]()
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=tokenizer.eos_token, bos_token=tokenizer.bos_token, unk_token="<unk>"
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture(params=ZOO, scope="module")
def generator(request):
    return scripted(with_special_tokens(request.param))


def parts(tokenizer, *texts: str) -> list[int]:
    """Returns the tokens of the texts, where each text continues the one before."""
    tokens: list[int] = []
    for text in texts:
        start = [] if text in NAMES else tokenizer("a", add_special_tokens=False)["input_ids"]
        whole = tokenizer(("a" if start else "") + text, add_special_tokens=False)["input_ids"]
        assert whole[: len(start)] == start
        tokens += whole[len(start) :] if text not in NAMES else [tokenizer.convert_tokens_to_ids(text)]
    return tokens


WORDS = [" fox", "<|im_end|>", "\n", "<|im_start|>", " who", "</turn>", " end", "<tool>", " x"]
TEXT = " fox\n who end<tool> x"
CASES = [
    # stop strings, text before the stop, index of the last generated word (None: no stop)
    (["<|im_end|>"], " fox", 1),
    (["never", "</turn>", " end"], " fox\n who", 5),
    (["x<|im_end|>"], " fo", 1),
    (["<|im_end|>\n"], " fox", 2),
    (["ox<|im_end|>\n"], " f", 2),
    (["\n<|im_start|> wh"], " fox", 4),
    (["<|im_end|>\n<|im_start|>"], " fox", 3),
    (["</turn> en"], " fox\n who", 6),
    (["</turn> end<tool>"], " fox\n who", 7),
    (["<tool>"], " fox\n who end", 7),
    (["fox\n"], " ", 2),  # as shown in the text
    (["who end"], " fox\n ", 6),
    (["[END]", "</s>", "<end>"], TEXT, None),  # never generated
    (["<|im_end|><|im_start|>", "<|im_start|>\n", "o<|im_end|>", "<|im_start|><|im_end|>"], TEXT, None),
    (["im_end", "<|im", "|>\n", "<|", "</", "urn"], TEXT, None),  # a name is one token or nothing
    (["<|im_end|>", "fox"], " ", 0),
]


@pytest.mark.parametrize("stops, text, last", CASES)
def test_generation_stops_at_the_token(generator, stops, text, last) -> None:
    tokenizer = generator.tokenizer
    prompt = parts(tokenizer, "the")
    script = parts(tokenizer, *WORDS)
    say(generator, prompt, script)
    end = [*script, tokenizer.eos_token_id] if last is None else parts(tokenizer, *WORDS[: last + 1])
    config = SamplingConfig(stop_strings=stops, max_new_tokens=60)
    out = generator.generate(prompt, config)
    assert out.texts == [text] and out.finish_reasons == ["stop"]
    generated = out.generated_token_ids[0]
    assert generated == script[: len(generated)] or last is None
    assert len(parts(tokenizer, *WORDS[: last or 0])) < len(generated) <= len(end)
    assert "".join(generator.stream(prompt, config)) == text
    request = generator.add_request(prompt, config)
    assert request.result().texts == [request.text] == [text]
    assert generator.generate(prompt, config, num_beams=2).texts == [text]


@pytest.mark.parametrize("stops, text, last", CASES)
def test_chat_stops_there_too(generator, stops, text, last) -> None:
    tokenizer = generator.tokenizer
    question = [{"role": "user", "content": "the"}]
    say(generator, tokenizer("the\n", add_special_tokens=False)["input_ids"], parts(tokenizer, *WORDS))
    answer = generator.chat(question, SamplingConfig(stop_strings=stops, max_new_tokens=60))
    output = answer.output
    assert output.text == (text if tokenizer.bos_token is None else text.removeprefix(" "))
    assert output.finish_reason == "stop"
    assert output.metrics.num_generated_tokens <= len(parts(tokenizer, *WORDS[: 99 if last is None else last + 1])) + 1


def test_a_character_on_its_way_comes_before_the_token(generator) -> None:
    tokenizer = generator.tokenizer
    note = tokenizer("a𝄞", add_special_tokens=False)["input_ids"][1:]
    mark = tokenizer.convert_tokens_to_ids("</turn>")
    say(generator, [5], [*note[:-1], mark])
    out = generator.generate([5], stop_strings=["</turn>"])
    assert out.generated_token_ids == [[*note[:-1], mark]] and set(out.texts[0]) == {"\ufffd"}
    assert "".join(generator.stream([5], stop_strings=["</turn>"])) == out.texts[0]


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("hides", [True, False])
def test_pieces_are_cut_where_the_engine_stops(kind: str, hides: bool) -> None:
    """Random tokens, with stop strings that are parts of their text."""
    tokenizer, chance = with_special_tokens(kind), random.Random(5)
    rules = PLAIN_TEXT if hides else TextRules(hidden=frozenset())
    some = [*map(tokenizer.convert_tokens_to_ids, NAMES), *parts(tokenizer, " fox\n who <tool>")]
    num_stopped = 0
    for _ in range(300):
        tokens = chance.choices(some, k=20)
        said = tokenizer.decode(tokens, skip_special_tokens=chance.random() < 0.3)
        begins = [chance.randrange(len(said)) for _ in range(3)]
        stops = [said[begin : begin + chance.randint(1, 14)] for begin in begins]
        stops += chance.choices(NAMES, k=chance.randint(0, 1))
        stopping, pieces = StoppingCriteria(100, (), TextReader(tokenizer, stops, rules)), []
        sequence, shown = Sequence([3], None, stopping, 100), TextReader(tokenizer, stops, rules)
        reason = None
        while reason is None and sequence.num_generated < len(tokens):
            sequence.append(tokens[sequence.num_generated])
            pieces.append(shown.push(sequence.tokens[-1]))
            reason = stopping.stop_now(sequence)
        pieces.append(shown.flush())
        text = decode_after(tokenizer, sequence.generated, rules)
        assert "".join(pieces) == stopping.text.text_of(sequence.generated) == text[: stopping.text.cut], (
            stops,
            tokens,
        )
        assert not any(stop in text[: stopping.text.cut] for stop in stops)
        at_once = TextReader(tokenizer, stops, rules)
        assert at_once.extend(sequence.generated) + at_once.flush() == "".join(pieces)
        if reason == "stop":
            num_stopped += 1
            assert stopping.text.matched in stops
            before = decode_after(tokenizer, sequence.generated[:-1], rules)
            assert not any(stop in before for stop in stops), "it stops at once"
        else:
            names = {name for name in NAMES if name in stops}
            assert not names & set(tokenizer.convert_ids_to_tokens(tokens))
    assert num_stopped > 200


def test_tokens_that_are_taken_back_do_not_stop(generator) -> None:
    tokenizer = generator.tokenizer
    tokens = parts(tokenizer, " fox", "</turn>", " who")
    stopping = StoppingCriteria(100, (), TextReader(tokenizer, ["</turn> who"]))
    sequence = Sequence([3], None, stopping, 100)
    for token in tokens[:-1]:
        sequence.append(token)
        stopping.stop_now(sequence)
    place = tokens.index(tokenizer.convert_tokens_to_ids("</turn>"))
    sequence.rollback(place)
    for token in tokens[place + 1 :]:
        sequence.append(token)
        assert stopping.stop_now(sequence) is None
