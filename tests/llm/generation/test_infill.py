"""Infill prompts, and the end of the generated middle."""

from __future__ import annotations

import copy

import pytest

from pace.llm.generator import Generator
from pace.llm.infill import Infill
from tests.llm.bundled import bundled
from tests.llm.generation.infill_tokenizers import DEEPSEEK, FALCON, GEMMA, QWEN, STARCODER, with_tokens
from tests.llm.text import tokenizer_zoo

FAMILIES = {"qwen": QWEN, "gemma": GEMMA, "starcoder": STARCODER, "deepseek": DEEPSEEK, "falcon": FALCON}
MARKS = {
    "qwen": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    "gemma": ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    "starcoder": ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    "deepseek": ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    "falcon": ["<|prefix|>", "<|suffix|>", "<|middle|>"],
}
BEFORE, AFTER = "def f(x):\n    ", "\n    return y\n"


def generator_of(family: str) -> tuple[Generator, object]:
    """Returns the bundled model with a tokenizer that has infill marks, and this tokenizer. Do not close the model."""
    tokenizer = with_tokens(FAMILIES[family])
    given = bundled().generator
    generator = Generator.__new__(Generator)
    generator.__dict__.update(given.__dict__, tokenizer=tokenizer)
    return generator, tokenizer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_the_text_around_the_gap(family):
    generator, tokenizer = generator_of(family)

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    prefix, suffix, middle = map(tokenizer.convert_tokens_to_ids, MARKS[family])
    expected = [tokenizer.bos_token_id, prefix, *ids(BEFORE), suffix, *ids(AFTER), middle]
    for before in (BEFORE, ids(BEFORE), [BEFORE], [ids(BEFORE)]):
        (prompt,) = generator.prepare_with_suffix(before, suffix=AFTER).prompts
        assert prompt.tokens == expected
    prompts = generator.prepare_with_suffix(["", BEFORE], suffix=[AFTER, ""]).prompts
    assert prompts[0].tokens == [expected[0], prefix, suffix, *ids(AFTER), middle]
    assert prompts[1].tokens == [expected[0], prefix, *ids(BEFORE), suffix, middle]
    assert Infill.of(tokenizer).prompt(tokenizer, BEFORE, AFTER, add_special_tokens=False) == expected[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_filling_ends_where_the_next_file_would_begin(family):
    """Every end token, including the marks, ends the infill. None is in its text, special or not."""
    generator, tokenizer = generator_of(family)
    for name in FAMILIES[family]:
        token = tokenizer.convert_tokens_to_ids(name)
        out = generator.generate(BEFORE, suffix=AFTER, logit_bias={token: 100.0}, max_new_tokens=4)
        assert (out.finish_reasons, out.texts, out.generated_token_ids) == (["stop"], [""], [[token]]), name
        assert "".join(generator.stream(BEFORE, suffix=AFTER, logit_bias={token: 100.0}, max_new_tokens=4)) == ""
        plain = generator.generate(BEFORE, logit_bias={token: 100.0}, max_new_tokens=4)
        assert plain.finish_reasons == ["length"]
        on = generator.generate(BEFORE, suffix=AFTER, logit_bias={token: 100.0}, max_new_tokens=4, ignore_eos=True)
        assert on.finish_reasons == ["length"]
    own = generator.generate(BEFORE, suffix=AFTER, logit_bias={tokenizer.eos_token_id: 100.0}, stop_strings=["zq"])
    assert own.finish_reasons == ["stop"] and own.texts == [""]


def test_a_tokenizer_that_puts_a_blank_before_texts():
    """With CodeLlama's tokenizer no extra blank is added to the text around the gap."""
    tokenizer = tokenizer_zoo.sentencepiece()
    tokenizer = type(tokenizer)(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str()),
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", additional_special_tokens=["▁<PRE>", "▁<SUF>", "▁<MID>",
        "▁<EOT>"],
    )  # fmt: skip
    infill = Infill.of(tokenizer)
    prompt = infill.prompt(tokenizer, "the end", "\nfox")
    places = [prompt.index(mark) for mark in infill.marks]
    before, after = prompt[places[0] + 1 : places[1]], prompt[places[1] + 1 : places[2]]
    names = tokenizer.convert_ids_to_tokens
    assert "".join(names(before)) == "the▁end" and "".join(names(after)).replace("<0x0A>", "\n") == "\nfox"
    assert tokenizer.convert_tokens_to_ids("▁<EOT>") in infill.end_tokens


def test_marks_that_are_not_implemented_are_said():
    """Codestral supports infilling, so the error must not claim that the model was not trained for it."""
    tokenizer = copy.copy(bundled().tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[PREFIX]", "[MIDDLE]", "[SUFFIX]"]})
    with pytest.raises(
        ValueError, match=r"suffix: this model's marks of a gap are \[SUFFIX\] and \[PREFIX\], by which pace"
    ):
        Infill.of(tokenizer)


def test_what_cannot_be_filled_is_said():
    model = bundled()
    with pytest.raises(ValueError, match="suffix: this model was not trained to fill a gap.*fim_prefix"):
        model.generate(BEFORE, suffix=AFTER)
    generator, tokenizer = generator_of("qwen")
    for inputs, suffix, error in (
        ([BEFORE], [AFTER, AFTER], "2 texts for 1 prompts"),
        (BEFORE, 5, "suffix must be"),
        (BEFORE, [5], "suffix must be"),
        ([], AFTER, "inputs must be"),
        ([[1.5]], AFTER, "inputs must be"),
        (tokenizer(BEFORE), AFTER, "tokenizer's output"),
        ([[5000]], AFTER, "token id 5000"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            generator.prepare_with_suffix(inputs, suffix=suffix)
    generator.tokenizer = None
    with pytest.raises(ValueError, match="no tokenizer"):
        generator.prepare_with_suffix([5], suffix=AFTER)
