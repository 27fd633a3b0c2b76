"""Pieces of text add up to the whole text. They hold only whole characters, and no part of a stop string."""

from __future__ import annotations

import copy
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pace.llm.sequence import TextRules
from pace.llm.text.detokenizer import (
    Detokenizer,
    context_of,
    decode,
    decode_after,
    decoder_of,
)
from pace.llm.text.reader import TextReader, find_first
from tests.llm.text.tokenizer_zoo import CORPUS, DECODERS, ZOO

TEXTS = [*CORPUS[:3], "🦊", "a🦊b é", "   leading and trailing   ", "naïve café\n\n日本", "don't . ' , x !"]


def up_to_stop(text: str, stops: list[str]) -> str:
    found = find_first(text, stops)
    return text if found is None else text[: found[0]]


@pytest.mark.parametrize("kind", ZOO)
@pytest.mark.parametrize("text", TEXTS)
def test_real_text_comes_in_whole_characters(kind: str, text: str) -> None:
    tokenizer = ZOO[kind]()
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    follower = Detokenizer(tokenizer)
    pieces = [follower.push(token) for token in tokens] + [follower.flush()]
    assert "".join(pieces) == follower.text == decode(tokenizer, tokens) == text
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", ZOO)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_tokens_in_pieces_are_the_tokens_at_once(kind: str, data: st.DataObject) -> None:
    """Random tokens: broken characters, special tokens, lone spaces."""
    tokenizer = ZOO[kind]()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=25))
    follower = Detokenizer(tokenizer)
    pieces = [follower.push(token) for token in tokens] + [follower.flush()]
    assert "".join(pieces) == decode(tokenizer, tokens)


def test_the_tokenizers_package_decodes_only_where_nothing_else_has_a_say() -> None:
    tokenizer = ZOO["byte_level"]()
    tokens = tokenizer("a🦊b", add_special_tokens=False)["input_ids"]

    class Shouting(type(tokenizer)):
        def _decode(self, *arguments, **named) -> str:
            return super()._decode(*arguments, **named).upper()

    assert decoder_of(tokenizer).__closure__[0].cell_contents is tokenizer.backend_tokenizer
    assert decoder_of(tokenizer)(tokens) == "a🦊b"
    loud = copy.copy(tokenizer)
    loud.__class__ = Shouting
    assert decoder_of(loud)(tokens) == decode(loud, tokens) == "A🦊B"


@pytest.mark.parametrize("kind", ZOO)
def test_a_character_is_held_back_until_it_is_whole(kind: str) -> None:
    tokenizer = ZOO[kind]()
    tokens = tokenizer("x𝄞y", add_special_tokens=False)["input_ids"]
    assert len(tokens) >= 6, "the character takes several tokens"
    follower = Detokenizer(tokenizer)
    pieces = [follower.push(token) for token in tokens]
    assert [piece for piece in pieces if piece] in (["x", "𝄞", "y"], ["x", "𝄞y"])


@pytest.mark.parametrize("kind", ZOO)
def test_half_a_character_at_the_end_is_flushed(kind: str) -> None:
    tokenizer = ZOO[kind]()
    tokens = tokenizer("x𝄞", add_special_tokens=False)["input_ids"][:-1]
    follower = Detokenizer(tokenizer)
    assert "".join(follower.push(token) for token in tokens) == "x"
    assert set(follower.flush()) == {"\ufffd"}


@pytest.mark.parametrize(
    "stops",
    [["fox"], ["a fox", "fox,"], ["time there", "zzz"], ["\n\nNew"], ["é"], ["O"], ["nowhere"], ["line.", "New line."]],
)
@pytest.mark.parametrize("kind", ZOO)
def test_pieces_end_before_the_first_stop_string(kind: str, stops: list[str]) -> None:
    tokenizer = ZOO[kind]()
    for text in CORPUS[:3]:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        pieces = TextReader(tokenizer, stops)
        shown = "".join([pieces.push(token) for token in tokens] + [pieces.flush()])
        assert shown == up_to_stop(text, stops)


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    pieces = TextReader(ZOO["byte_level"](), ["end"])
    encode = lambda text: ZOO["byte_level"]()(text)["input_ids"]
    shown = ""
    for token in encode("the e"):
        shown += pieces.push(token)
    assert shown == "the "
    assert "".join(pieces.push(token) for token in encode("x")) == "ex"


def test_random_stops_never_leak() -> None:
    chance = random.Random(0)
    tokenizer = ZOO["byte_level"]()
    text = "abababcabcababcc"
    tokens = tokenizer(text)["input_ids"]
    for _ in range(200):
        stops = [
            "".join(chance.choice("abc") for _ in range(chance.randint(1, 6))) for _ in range(chance.randint(1, 3))
        ]
        pieces = TextReader(tokenizer, stops)
        shown = "".join([pieces.push(token) for token in tokens] + [pieces.flush()])
        prefixes = [decode(tokenizer, tokens[:count]) for count in range(1, len(tokens) + 1)]
        first = next((prefix for prefix in prefixes if find_first(prefix, stops)), text)
        assert shown == up_to_stop(first, stops), stops


# -- after a prompt ----------------------------------------------------------------------------------------------------


def check_continuation(
    tokenizer, prompt: list[int], generated: list[int], hidden: frozenset[int] | None = None
) -> bool:
    """True if the whole text begins with the prompt's text. Asserts that the detokenized text is then the rest, at once
    and in pieces."""
    rules = TextRules(context_of(prompt, tokenizer), hidden=hidden)
    assert len(rules.context) <= 5 or "\ufffd" in decode(tokenizer, list(rules.context)), "bounded for real text"
    follower = Detokenizer(tokenizer, rules)
    text = "".join([follower.push(token) for token in generated] + [follower.flush()])
    assert text == follower.text == decode_after(tokenizer, generated, rules)
    before, whole = (decode(tokenizer, tokens, hidden is None) for tokens in (prompt, prompt + generated))
    if whole.startswith(before) and set(prompt) - set(tokenizer.all_special_ids):
        assert before + text == whole, (before, text)
        return True
    return False


@pytest.mark.parametrize("kind", DECODERS)
def test_a_text_cut_anywhere_goes_on_as_it_was(kind: str) -> None:
    tokenizer = DECODERS[kind]()
    for text in TEXTS:
        tokens = [tokenizer.bos_token_id or 0, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        num_checked = sum(
            check_continuation(tokenizer, tokens[:cut], tokens[cut:], hidden)
            for cut in range(2, len(tokens) + 1)
            for hidden in (None, frozenset())
        )
        assert num_checked >= min(len(text.encode()), len(tokens)) / 2


@pytest.mark.parametrize("kind", DECODERS)
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_tokens_go_on_with_any_others(kind: str, data: st.DataObject) -> None:
    tokenizer = DECODERS[kind]()
    tokens = st.lists(st.integers(0, len(tokenizer) - 1), max_size=12)
    check_continuation(tokenizer, data.draw(tokens), data.draw(tokens))


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_a_blank_is_kept_after_text_only(kind: str) -> None:
    tokenizer = DECODERS[kind]()
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]
    bos, word = tokenizer.bos_token_id, encode("fox")
    for prompt in ([], [bos], [bos, bos], [tokenizer.eos_token_id]):
        assert decode_after(tokenizer, word, TextRules(context_of(prompt, tokenizer))) == "fox"
    for prompt in (encode("a"), encode("a \n"), encode("🦊"), [bos, *encode("a")], [*encode("a"), bos], encode("▁")):
        assert decode_after(tokenizer, word, TextRules(context_of(prompt, tokenizer))) == " fox"


@pytest.mark.parametrize("kind", DECODERS)
def test_a_character_that_a_prompt_breaks_off_is_completed(kind: str) -> None:
    tokenizer = DECODERS[kind]()
    tokens = tokenizer("a𝄞𝄞b", add_special_tokens=False)["input_ids"]
    ends = [cut for cut in range(1, len(tokens)) if not decode(tokenizer, tokens[:cut]).endswith("\ufffd")]
    for cut in range(1, len(tokens)):
        whole = max(end for end in ends if end <= cut)
        rules = TextRules(context_of(tokens[:cut], tokenizer))
        rest = decode(tokenizer, tokens)[len(decode(tokenizer, tokens[:whole])) :]
        assert decode_after(tokenizer, tokens[cut:], rules) == rest


@pytest.mark.parametrize("kind", DECODERS)
def test_hidden_tokens_are_no_text(kind: str) -> None:
    tokenizer = DECODERS[kind]()
    tokens = tokenizer("the fox who", add_special_tokens=False)["input_ids"]
    mark = tokenizer.eos_token_id
    for place in range(len(tokens) + 1):
        mixed = [*tokens[:place], mark, *tokens[place:]]
        texts = [decode_after(tokenizer, mixed, TextRules(hidden=hidden)) for hidden in (None, frozenset([mark]))]
        assert texts == 2 * [decode(tokenizer, tokens)]
        assert tokenizer.convert_ids_to_tokens(mark) in decode_after(tokenizer, mixed, TextRules(hidden=frozenset()))
