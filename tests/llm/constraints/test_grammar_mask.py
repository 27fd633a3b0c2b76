"""The methods of a grammar's mask agree with each other, and texts under the mask match the grammar."""

from __future__ import annotations

import functools
import gc
import json
import random
import re
import threading

import jsonschema
import numpy as np
import pytest
import torch

from pace.assets import TINY
from pace.grammar import Grammar
from pace.llm.constraints import grammars
from pace.llm.constraints.grammar_mask import GrammarMask
from pace.llm.constraints.grammars import GrammarCompiler
from pace.memory import allocated_bytes
from pace.tokenizer.loading import load_tokenizer
from tests.llm.text.tokenizer_zoo import metaspace
from tests.waiting import wait_until

VOCAB = 2064
"""Larger than the tokenizer's vocabulary, as in many models."""
END, OTHER_END = 7, 6
"""The tokenizer's end token, and another special token that also ends a sequence."""

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"city": {"type": "string"}}}]},
        "born": {"type": "string", "format": "date"},
    },
    "required": ["name", "age", "born"],
    "additionalProperties": False,
}
DIGITS = 'start: part ("," part)*\npart: /[0-9]{1,3}/ | "(" start ")"\n'
GRAMMARS = {
    "json_schema": Grammar.json_schema(PERSON), "spaced": Grammar.json_schema(PERSON, whitespace="spaced"),
    "compact": Grammar.json_schema(PERSON, whitespace="compact"), "json": Grammar.json(),
    "regex": Grammar.regex(r"(yes|no|[ab]{2,4})! [0-9]{1,3}"), "lark": Grammar.lark(DIGITS),
    "gbnf": Grammar.gbnf('root ::= [a-c]+ ("-" root)? "."'),
    "choices": Grammar.choices(["red", "reddish", "green", 'say "hi"\n', "été"]),
}  # fmt: skip


def satisfies(name: str, text: str) -> bool:
    if "json" in name or name in ("spaced", "compact"):
        schema = {"type": "object"} if name == "json" else PERSON
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
        return name != "spaced" or text == json.dumps(json.loads(text), ensure_ascii=False) or "\\" in text
    if name == "choices":
        return text in ("red", "reddish", "green", 'say "hi"\n', "été")
    pattern = {
        "regex": r"(yes|no|[ab]{2,4})! [0-9]{1,3}",
        "lark": r"[0-9(][0-9,()]*",
        "gbnf": r"([a-c]+(-[a-c]+)*)\.+",
    }[name]
    return re.fullmatch(pattern, text) is not None


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(load_tokenizer(TINY), VOCAB)


def mask_of(name: str, end_tokens: tuple[int, ...] = (END,)) -> GrammarMask:
    return compiler().mask(GRAMMARS[name], list(end_tokens)).fork()


def allowed_by(mask: GrammarMask) -> list[int]:
    row = torch.empty(-(-VOCAB // 32), dtype=torch.int32)
    mask.fill(row)
    return np.flatnonzero(np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def walk(mask: GrammarMask, chance: random.Random, most: int = 60) -> list[int]:
    """Returns random tokens that the mask allows, until it is finished or `most` tokens are drawn."""
    tokens: list[int] = []
    while not mask.is_finished and len(tokens) < most:
        tokens.append(chance.choice(allowed_by(mask)))
        mask.accept(tokens[-1])
    return tokens


@pytest.mark.parametrize("name", GRAMMARS)
def test_whatever_is_allowed_leads_to_a_text_of_the_grammar(name: str) -> None:
    tokenizer, num_ended = load_tokenizer(TINY), 0
    for seed in range(40):
        mask = mask_of(name)
        tokens = walk(mask, random.Random(seed))
        if mask.is_finished:
            num_ended += 1
            assert satisfies(name, tokenizer.decode([token for token in tokens if token != END]))
    assert num_ended >= 3


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_methods_agree(name: str) -> None:
    """`fill`, `accept`, `count_allowed`, `forced`, `rollback` and `fork` agree on the allowed tokens."""
    chance = random.Random(name)
    mask = mask_of(name, (END, OTHER_END))
    tokens: list[int] = []
    for _ in range(60):
        if mask.is_finished:
            break
        allowed, forced = allowed_by(mask), mask.forced()
        if forced:
            assert allowed == forced[:1], "nothing else may come where a token is forced"
            assert mask.count_allowed(forced) == len(forced)
        for token in chance.sample(range(VOCAB), 30) + [END, OTHER_END]:
            twin = mask.fork()
            if token in allowed:
                twin.accept(token)
                twin.rollback(1)
            elif not forced:  # other tokens may begin a forced text
                with pytest.raises(ValueError, match="does not allow"):
                    twin.accept(token)
            assert allowed_by(twin) == allowed
            if token not in (END, OTHER_END) and not forced:
                assert mask.count_allowed([token]) == (token in allowed)
        tokens.append(chance.choice(allowed))
        mask.accept(tokens[-1])
    far = mask.fork()
    far.rollback(len(tokens))
    assert allowed_by(far) == allowed_by(mask_of(name, (END, OTHER_END)))


def test_ends_are_allowed_where_the_grammar_may_end() -> None:
    mask = mask_of("gbnf", (END, OTHER_END))
    letter, dot = (load_tokenizer(TINY).encode(text, add_special_tokens=False)[0] for text in ("a", "."))
    assert not {END, OTHER_END} & set(allowed_by(mask))
    mask.accept(letter)
    assert not {END, OTHER_END} & set(allowed_by(mask))
    mask = mask_of("regex", (OTHER_END,))
    for token in load_tokenizer(TINY).encode("yes! 1", add_special_tokens=False):
        mask.accept(token)
    assert OTHER_END in allowed_by(mask) and END not in allowed_by(mask), "ends are those of the sequence"
    mask.accept(OTHER_END)
    assert mask.is_finished and mask.count_allowed([dot]) == 0 and mask.forced() == []
    mask.rollback(1)
    assert not mask.is_finished and OTHER_END in allowed_by(mask)


def test_a_grammar_that_is_complete_ends_by_itself() -> None:
    mask = mask_of("choices")
    for token in load_tokenizer(TINY).encode("green", add_special_tokens=False):
        mask.accept(token)
    assert mask.is_finished


def test_work_for_a_token_is_bounded(monkeypatch) -> None:
    """A mask that needs too much work for a token raises an error with the reason."""
    monkeypatch.setitem(grammars._WORK, "step_lexer_fuel", 500)
    grammar = Grammar.lark("start: /(.|\\n)*a(.|\\n){60}b(.|\\n)*/")
    mask = GrammarCompiler(load_tokenizer(TINY), VOCAB).mask(grammar, [END]).fork()
    chance = random.Random(1)
    with pytest.raises(ValueError, match="too complex to go on"):
        for _ in range(300):
            mask.accept(chance.choice([token for token in allowed_by(mask) if token != END]))


# -- the compiler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "message"),
    [(lambda: Grammar.regex("(?<=a)b"), "look-around"), (lambda: Grammar.regex("(?=a)b"), "look-around"),
     (lambda: Grammar.regex("(a"), "unclosed|Expected|expected"), (lambda: Grammar.regex(""), "empty text"),
     (lambda: Grammar.lark('start: start "a"'), "cannot be used"),
     (lambda: Grammar.lark('start: nobody "a"'), 'unknown name: "nobody"'),
     (lambda: Grammar.lark('begin: "a"'), "start"), (lambda: Grammar.lark('start: ""'), "empty text"),
     (lambda: Grammar.json_schema({"$ref": "#"}), "cannot be used"),
     (lambda: Grammar.json_schema({"$ref": "http://example.com/x.json"}), "nothing is fetched"),
     (lambda: Grammar.json_schema({"$ref": "file:///etc/passwd"}), "nothing is fetched"),
     (lambda: Grammar.json_schema({"type": "nonsense"}), "nonsense"),
     (lambda: Grammar.json_schema({"type": "string", "minLength": 3, "maxLength": 2}), "cannot be used"),
     (lambda: Grammar.json_schema({"type": "string", "pattern": "(?!a)b"}), "look-around"),
     (lambda: Grammar.json_schema({"properties": {"a": {"items": {"not": {}}}}}), "#/properties/a/items/not"),
     (lambda: Grammar.json_schema({"properties": {"a/b": {"format": "nope"}}}), "#/properties/a~1b/format"),
     (lambda: Grammar.json_schema({"oneOf": [{"type": "object"}, {"minProperties": 1}]}),
       "#/oneOf: not supported")],
)  # fmt: skip
def test_what_cannot_be_compiled_says_where(grammar, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        compiler().mask(grammar(), [END])
    assert len(str(caught.value)) < 1000


def test_a_lenient_schema_names_what_it_passes_over() -> None:
    compiled = compiler().compile(Grammar.json_schema({"type": "array", "uniqueItems": True}, strict=False))
    assert any("uniqueItems" in warning for warning in compiled.warnings)


def test_equal_grammars_are_compiled_once() -> None:
    mine = GrammarCompiler(load_tokenizer(TINY), VOCAB)
    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(mine.compile(Grammar.json_schema(PERSON)))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16 and len(set(map(id, found))) == 1


def test_what_is_kept_is_bounded_and_failures_are_not() -> None:
    mine = GrammarCompiler(load_tokenizer(TINY), VOCAB, cache_bytes=10 * 2**16)
    for index in range(40):
        mine.compile(Grammar.choices([f"number {index}"]))
        with pytest.raises(ValueError):
            mine.compile(Grammar.regex(f"(?<=a)b{index}"))
    assert 5 <= len(mine._compiled) <= 10
    first = mine.compile(Grammar.choices(["number 39"]))
    assert mine.compile(Grammar.choices(["number 39"])) is first


def test_the_table_is_made_beside_the_caller() -> None:
    mine = GrammarCompiler(load_tokenizer(TINY), VOCAB)
    mine.start()
    wait_until(lambda: mine._table is not None and mine._table.done())
    mine.compile(Grammar.json())


def test_a_model_without_a_tokenizer_or_with_too_few_tokens() -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        GrammarCompiler(None, VOCAB).compile(Grammar.json())
    with pytest.raises(ValueError, match="tokenizer"):
        GrammarCompiler(load_tokenizer(TINY), 100).compile(Grammar.json())


class PlainTokenizer:
    """A tokenizer without a Rust part, whose tokens are bytes and some words."""

    eos_token_id, bos_token_id, all_special_ids = 256, None, [256]
    added_tokens_decoder = {256: "<end>"}

    def __len__(self) -> int:
        return 259

    def convert_ids_to_tokens(self, token: int) -> str:
        return ["yes", "no"][token - 257] if token > 256 else f"<0x{token:02X}>"

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


def test_a_tokenizer_written_in_python() -> None:
    mask = GrammarCompiler(PlainTokenizer(), 260).mask(Grammar.choices(["yes", "no", "yet"]), [256]).fork()
    row = torch.empty(9, dtype=torch.int32)
    mask.fill(row)
    allowed = {token for token in range(260) if int(row[token >> 5]) >> (token & 31) & 1}
    assert allowed == {ord("y"), ord("n"), 257, 258}


@pytest.mark.parametrize("is_bare", [True, False], ids=["bare", "sequence"])
@pytest.mark.parametrize(("prepend", "blank"), [("always", "▁"), ("first", "▁"), ("never", "_")])
def test_a_tokenizer_whose_decoder_knows_blanks_alone(prepend: str, blank: str, is_bare: bool) -> None:
    """llguidance itself cannot read such a tokenizer."""
    tokenizer = metaspace(prepend, blank, is_bare)
    end, size = tokenizer.eos_token_id, len(tokenizer) + 5
    mine = GrammarCompiler(tokenizer, size)
    spoken = Grammar.regex("(yes|no), the (fox|end) of [a-z]{1,4}! <0x0A> [0-9]+")
    for grammar, holds in (
        (Grammar.json_schema(PERSON), lambda text: satisfies("json", text)),
        (Grammar.choices(["the end", "the fox, who said"]), lambda text: text in ("the end", "the fox, who said")),
        (spoken, lambda text: re.fullmatch("(yes|no), the (fox|end) of [a-z]{1,4}! <0x0A> [0-9]+", text)),
    ):
        num_ended = 0
        for seed in range(15):
            mask, chance, tokens = mine.mask(grammar, [end]).fork(), random.Random(seed), []
            row = torch.empty(-(-size // 32), dtype=torch.int32)
            while not mask.is_finished and len(tokens) < 120:
                forced = mask.forced()
                mask.fill(row)
                bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")[:size]
                token = forced[0] if forced else chance.choice(np.flatnonzero(bits).tolist())
                tokens.append(token)
                mask.accept(token)
            if mask.is_finished:
                num_ended += 1
                assert holds(tokenizer.decode([token for token in tokens if token != end])), tokens
        assert num_ended >= 3


def test_forced_text_has_no_blank_before_it() -> None:
    tokenizer = metaspace("always")
    mask = GrammarCompiler(tokenizer, len(tokenizer)).mask(Grammar.regex("the end of the café"), [1]).fork()
    forced = mask.forced()
    assert "".join(tokenizer.convert_ids_to_tokens(forced)) == "the▁end▁of▁the▁café"


# -- large schemas -----------------------------------------------------------------------------------------------------


def optional(count: int, prefix: str = "p", **more) -> dict:
    names = [f"{prefix}{index}" for index in range(count)]
    return {"type": "object", "properties": dict.fromkeys(names, {"type": "integer"}), **more}


LARGE = {
    "open": optional(900), "closed": optional(900, additionalProperties=False),
    "half required": optional(900, required=[f"p{index}" for index in range(0, 900, 2)]),
    "nested": {"type": "object", "properties": {"a": optional(700)}, "required": ["a"]},
    "list": {"type": "array", "items": optional(700), "minItems": 1},
    "allOf": {"allOf": [optional(400), optional(400, "q")]},
    "anyOf": {"anyOf": [optional(90, f"u{index}x") for index in range(10)]},
    "$ref": {"$defs": {"a": optional(700)}, "$ref": "#/$defs/a"},
    "two": {"type": "object", "properties": {"a": optional(600), "b": optional(600)}, "required": ["a", "b"]},
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_a_schema_with_many_optional_properties_goes_on_after_its_first_token(name: str) -> None:
    mask = compiler().mask(Grammar.json_schema(LARGE[name]), [END]).fork()
    tokenizer, taken = load_tokenizer(TINY), ""
    for text in ("[", "{", '"a"', ":", "{", '"', "}", "}", "]"):  # those that are allowed
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if not mask.is_finished and mask.count_allowed(tokens) == len(tokens):
            for token in tokens:
                mask.accept(token)
            taken += text
            assert mask.is_finished or allowed_by(mask)
    assert "{" in taken


MANY = {
    "#": optional(1500), "#/properties/a": {"properties": {"a": optional(1001)}},
    "#/items": {"items": {"anyOf": [optional(300, f"u{index}x") for index in range(4)]}},
    "#/anyOf/1": {"anyOf": [{}, {"$ref": "#/$defs/x"}], "$defs": {"x": {"allOf": [optional(600), optional(500, "q")]}}},
}  # fmt: skip


@pytest.mark.parametrize("place", MANY)
def test_too_many_optional_properties_are_refused_at_once(place: str) -> None:
    with pytest.raises(ValueError, match=r"optional properties may come at one place; at most 1000") as caught:
        Grammar.json_schema(MANY[place])
    assert place in str(caught.value) or place == "#/anyOf/1"


def test_a_long_chain_of_references_is_refused() -> None:
    parts = {f"d{index}": {"allOf": [{"$ref": f"#/$defs/d{index + 1}"}]} for index in range(2000)}
    with pytest.raises(ValueError, match="in a chain"):
        Grammar.json_schema({"$defs": parts, "$ref": "#/$defs/d0"})


def test_what_counting_does_not_see_is_refused_before_the_first_token() -> None:
    parts = {f"d{index}": optional(2, f"u{index}x") for index in range(400)}
    schema = {"$defs": parts, "anyOf": [{"$ref": f"#/$defs/{name}"} for name in parts]}
    with pytest.raises(ValueError, match="too many properties or alternatives may come at one place"):
        compiler().compile(Grammar.json_schema(schema))


# -- memory ------------------------------------------------------------------------------------------------------------

KEPT = {
    "choices": lambda number: Grammar.choices([f"number {number} {index}" for index in range(400)]),
    "optional": lambda number: Grammar.json_schema(optional(300, f"p{number}x")),
    "required": lambda number: Grammar.json_schema(optional(400, f"p{number}x",
    required=[f"p{number}x{i}" for i in range(400)])),
    "nested": lambda number: Grammar.json_schema({"properties": {f"p{number}{i}": optional(20,
    f"{i}") for i in range(20)}}),
    "multiple": lambda number: Grammar.json_schema({"type": "integer", "multipleOf": 2001 + number}),
    "long": lambda number: Grammar.json_schema({"const": f"{number}" * 5000}),
    "merged": lambda number: Grammar.json_schema(
        {
            "$defs": {"x": optional(60, f"{number}x")},
            "properties": {f"q{i}": {"allOf": [{"$ref": "#/$defs/x"},
            {"properties": {f"z{i}": {}}}]} for i in range(10)},
        }
    ),
}  # fmt: skip


@pytest.mark.alone
@pytest.mark.parametrize("kind", KEPT)
def test_a_grammar_takes_what_it_is_estimated_to(kind: str) -> None:
    """Four grammars of a kind, so that shared and leftover memory counts little."""
    if not allocated_bytes():
        pytest.skip("malloc does not say what it has given")
    mine = GrammarCompiler(load_tokenizer(TINY), VOCAB, cache_bytes=2**40)
    mine.compile(KEPT[kind](0))
    grammars_of_kind = [KEPT[kind](number) for number in range(1, 5)]
    gc.collect()  # what earlier tests left is not freed meanwhile
    before = allocated_bytes()
    kept = [mine.compile(grammar) for grammar in grammars_of_kind]
    taken, estimated = allocated_bytes() - before, sum(compiled.num_bytes for compiled in kept)
    assert taken / 1.5 <= estimated <= 2 * taken + 4 * 2**17, f"{taken} bytes taken, {estimated} estimated"


def test_use_adds_to_the_estimate() -> None:
    mine = GrammarCompiler(load_tokenizer(TINY), VOCAB)
    compiled = mine.compile(Grammar.json_schema(PERSON))
    before = compiled.num_bytes
    num_tokens = len(walk(mine.mask(Grammar.json_schema(PERSON), [END]).fork(), random.Random(3)))
    assert compiled.num_bytes == before + 2048 * num_tokens
    compiled.usage.num_tokens = 10**9
    assert compiled.num_bytes == before + 2**21


def test_a_grammar_whose_lexer_is_full_is_compiled_anew(monkeypatch) -> None:
    """Masks of one grammar share its lexer. Once the lexer is full, it would fail all later masks too."""
    monkeypatch.setitem(grammars._WORK, "max_lexer_states", 1200)
    grammar = Grammar.json_schema({"type": "string", "maxLength": 5000})
    mine = GrammarCompiler(load_tokenizer(TINY), VOCAB)
    first = mine.compile(grammar)
    with pytest.raises(ValueError, match="too complex to go on"):
        for seed in range(100):
            walk(mine.mask(grammar, [END]).fork(), random.Random(seed))
    assert mine.find(grammar) is None
    assert mine.compile(grammar) is not first
    assert walk(mine.mask(grammar, [END]).fork(), random.Random(0), 10)
