"""Captures: the texts that a grammar names, their positions and their log-probabilities."""

from __future__ import annotations

import math

import pytest

from pace.assets import TINY
from pace.llm import LLMModel, PromptLookupConfig, SamplingConfig
from pace.llm.constraints.captures import CaptureReader
from pace.llm.constraints.grammars import GrammarCompiler, make_table
from pace.llm.sequence import TokenLogprob

llguidance = pytest.importorskip("llguidance")
if not hasattr(llguidance.LLMatcher, "get_captures"):
    pytest.skip("this llguidance tells no captures", allow_module_level=True)

PERSON = """
start: "Name: " name ", age " age ("," item)+ "."
name[capture]: /[A-Z][a-z]{2,8}/
age[capture="years"]: /[0-9]{1,2}/
item[capture]: /[a-z]{1,3}/
"""


@pytest.fixture(scope="module")
def model() -> LLMModel:
    return LLMModel(TINY, dtype="float32", progress=False)


def read(model: LLMModel, grammar: str, text: str) -> dict[str, list[tuple[str, range, float]]]:
    """Returns the captures of a text whose i-th token has the log-probability -2 ** i."""
    tokenizer = model.tokenizer
    table = make_table(tokenizer, model.config.vocab_size)
    matcher = llguidance.LLMatcher(table, llguidance.grammar_from("lark", grammar))
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    logprobs = [TokenLogprob(token, -(2.0**index)) for index, token in enumerate(tokens)]
    captures = CaptureReader(matcher, table, tokenizer).read(tokens, logprobs)
    for parts in captures.values():
        for part in parts:
            assert part.text in tokenizer.decode(tokens[part.tokens.start : part.tokens.stop])
            assert part.logprob == -sum(2.0**index for index in part.tokens)
    return {name: [(part.text, part.tokens) for part in parts] for name, parts in captures.items()}


def num_tokens(model: LLMModel, text: str) -> int:
    return len(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def test_where_they_are(model: LLMModel) -> None:
    found = read(model, PERSON, "Name: Ben, age 23,ab,cd.")
    assert [part for part, _ in found["name"]] == ["Ben"] and [part for part, _ in found["years"]] == ["23"]
    assert [part for part, _ in found["item"]] == ["ab", "cd"]
    # a repeated text: the capture is the first occurrence
    found = read(model, 'start: name " " /[a-z]+/\nname[capture]: /[a-z]+/', "foo foo")
    assert found["name"] == [("foo", range(found["name"][0][1].stop))] and found["name"][0][1].stop == 2
    # an equal text just before it
    for grammar, text in [
        ('start: "1" n ","\nn[capture]: /[0-9]/', "11,"),
        ('start: "dog" n\nn[capture]: /[a-z]{3}/', "dogdog"),
        ('start: "aba" n\nn[capture]: /[a-z]{2}/', "ababa"),
    ]:
        assert read(model, grammar, text)["n"][0][1].stop >= num_tokens(model, text.rstrip(",")), text
    # a capture that is only known at the end of the text, and one within another
    found = read(model, 'start: all\nall[capture]: "a " word\nword[capture]: /[a-z]+/', "a fox")
    assert found["all"][0] == ("a fox", range(len(model.tokenizer("a fox", add_special_tokens=False)["input_ids"])))
    assert found["word"][0][0] == "fox"
    # a capture that ends at a suffix, which is not part of it
    found = read(model, 'start: word "!"\nword[capture, suffix=". . ."]: /.*/', "hello there. . .!")
    assert found["word"][0][0].startswith("hello there") and found["word"][0][1].start == 0
    # incomplete parts are not captured
    assert "item" not in read(model, PERSON, "Name: Ben, age 23,ab")


def test_log_probabilities_are_those_of_the_tokens(model: LLMModel) -> None:
    out = model.generate(["Tell me. ", "A person. "], SamplingConfig(grammar=PERSON, logprobs=0, max_new_tokens=60))
    for row, captures in enumerate(out.captures):
        assert set(captures) == {"name", "years", "item"}
        for parts in captures.values():
            for part in parts:
                expected = sum(out.logprobs[row][index].logprob for index in part.tokens)
                assert part.logprob == expected and math.isfinite(expected)
        assert any(part.logprob < 0 for part in captures["name"])
    without = model.generate(["Tell me. ", "A person. "], SamplingConfig(grammar=PERSON, max_new_tokens=60))
    assert without.captures == out.captures and without.logprobs is None


def test_samples_drafts_and_beams(model: LLMModel) -> None:
    config = SamplingConfig(grammar=PERSON, do_sample=True, seed=3, top_k=0, num_return_sequences=4, max_new_tokens=60)
    out = model.generate("Tell me. ", config)
    assert len({captures["name"][0].text for captures in out.captures}) > 1
    for text, captures in zip(out.texts, out.captures):
        assert text.startswith(f"Name: {captures['name'][0].text}, age {captures['years'][0].text},")
    with LLMModel(TINY, dtype="float32", progress=False, spec_config=PromptLookupConfig(adaptive=False)) as drafting:
        assert drafting.generate("Tell me. ", config).captures == out.captures
    beams = model.generate("Tell me. ", SamplingConfig(grammar=PERSON, num_beams=3, max_new_tokens=60))
    assert beams.captures[0]["name"][0].text in beams.texts[0]


def test_none_where_nothing_is_captured(model: LLMModel) -> None:
    assert model.generate("x", SamplingConfig(max_new_tokens=2)).captures is None
    assert model.generate("x", SamplingConfig(regex="[ab]", max_new_tokens=2)).captures is None
    assert model.generate("x", SamplingConfig(regex=r"\[capture\]", max_new_tokens=9)).captures is None


def test_an_llguidance_that_cannot_tell_is_refused(model: LLMModel, monkeypatch) -> None:
    class Old:
        pass

    monkeypatch.setattr(
        GrammarCompiler, "compile", lambda self, grammar: type("", (), {"matcher": Old(), "warnings": ()})
    )
    from pace.llm import Grammar

    compiler = GrammarCompiler(model.tokenizer, model.config.vocab_size)
    with pytest.raises(ValueError, match="llguidance 1.7"):
        compiler.captures(Grammar.lark(PERSON))
