"""A thinking budget: a maximum number of tokens of thought, then the closing mark, in any batch and with any drafts."""

from __future__ import annotations

import random

import pytest
import torch

from pace.llm import SamplingConfig
from pace.llm.chat.reasoning import HARMONY_ANALYSIS, THINK, Reasoning
from pace.llm.constraints.masks import AllowedTokens
from pace.llm.constraints.thinking import Place, ThinkingMask, Thoughts
from pace.llm.generator import Generator
from tests.llm.constraints.masks import FunctionMask
from tests.llm.fake_model import FakeModel, FakeTokenizer
from tests.llm.generators import check_idle
from tests.llm.speculation.drafters import SOURCES, make_engine, make_source
from tests.plugins.tiers import sample

SIZE = 50
NAMES = ["<end>", "<think>", "</think>", "</", "think", ">", "<", "<|channel|>", "analysis", "<|message|>", "<|end|>",
         "<|start|>", "assistant", "final", " ", "\n", "o</", "é"]  # fmt: skip
NAMES += [f"w{number}" for number in range(SIZE - len(NAMES))]
OPENING, CLOSING = NAMES.index("<think>"), NAMES.index("</think>")
PIECES = [NAMES.index(name) for name in ("</", "think", ">")]


class Words(FakeTokenizer):
    """Token i is `NAMES[i]`. Writes a text with the longest names, but none of those in `unwritten`."""

    chat_template = "{{ '<think>' }}{{ '</think>' }}"
    added_tokens_decoder: dict = {}
    all_special_ids = (0,)

    def __init__(self, *unwritten: str) -> None:
        self._names = sorted(set(NAMES) - set(unwritten), key=len, reverse=True)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        tokens = []
        while text:
            name = next(name for name in self._names if text.startswith(name))
            tokens.append(NAMES.index(name))
            text = text[len(name) :]
        return {"input_ids": tokens}

    def convert_ids_to_tokens(self, token: int) -> str:
        return NAMES[token]

    def decode(self, tokens, skip_special_tokens=False, clean_up_tokenization_spaces=True) -> str:
        return "".join(NAMES[token] for token in tokens if token or not skip_special_tokens)


class Ponders(FakeModel):
    """Now and then picks a mark, or a part of one."""

    def __init__(self, **options) -> None:
        super().__init__(SIZE, eos_bias=-50.0, **options)

    def logits_of(self, tokens: list[int]) -> torch.Tensor:
        logits = super().logits_of(tokens)
        logits[[OPENING, CLOSING, *PIECES]] += 2.0
        return logits


def make(source: str | None = None, tokenizer: FakeTokenizer | None = None, **options) -> Generator:
    drafts = None if source is None else make_source(source, **options)
    engine = make_engine(drafts, 5, model=Ponders(**options))
    return Generator(engine, tokenizer or Words(), SamplingConfig(eos_token_id=0))


def by_definition(prompt: list[int], budget: int, num_tokens: int, closing: list[int]) -> list[int]:
    """Returns the greedy tokens with a budget, from the whole text at each step."""
    model, tokens = Ponders(), []
    is_begun = "".join(NAMES[token] for token in prompt).rstrip().endswith("<think>")
    while len(tokens) < num_tokens:
        text = "".join(NAMES[token] for token in tokens)
        start = next((n for n in range(len(tokens) + 1) if "<think>" in "".join(NAMES[t] for t in tokens[:n])), None)
        start = 0 if is_begun else start if text.lstrip().startswith("<think>") else None
        within = start is not None and "</think>" not in "".join(NAMES[token] for token in tokens[start:])
        if within and len(tokens) - start >= budget:
            known = next((n for n in (2, 1) if tokens[start:][-n:] == closing[:n] and n < len(closing)), 0)
            tokens += closing[known:]
        else:
            tokens.append(int(model.logits_of(prompt + tokens).argmax()))
    return tokens[:num_tokens]


PROMPTS = [[20, 21, OPENING], [22, OPENING, 15], [23, 24], [OPENING, 25], [26, OPENING, CLOSING], [27, 6, 4, 5]]


@pytest.mark.parametrize("source", [None, *sample(SOURCES, lambda name: name == "half")])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_batch_with_or_without_drafts(source: str | None, is_whole: bool) -> None:
    """The closing mark is one token, or three."""
    tokenizer = Words() if is_whole else Words("</think>")
    generator = make(source, tokenizer)
    for budget in (0, 1, 5):
        config = SamplingConfig(thinking_budget=budget, max_new_tokens=20)
        out = generator.generate(PROMPTS, config)
        closing = [CLOSING] if is_whole else PIECES
        assert out.generated_token_ids == [by_definition(prompt, budget, 20, closing) for prompt in PROMPTS]
    check_idle(generator)


@pytest.mark.parametrize("source", ["half", pytest.param("pard-half", marks=pytest.mark.thorough)])
def test_a_model_with_states(source: str) -> None:
    """Its accepted drafts are in a journal."""
    plain, drafted = make(num_states=2), make(source, num_states=2)
    for config in (SamplingConfig(), SamplingConfig(do_sample=True, seed=5, top_k=0, num_return_sequences=3)):
        config = config.merge_from(SamplingConfig(thinking_budget=6, max_new_tokens=24))
        out = drafted.generate(PROMPTS, config)
        assert out.generated_token_ids == plain.generate(PROMPTS, config).generated_token_ids
        assert out.metrics.num_drafted_tokens > 0
        for tokens in out.generated_token_ids[: 2 * config.num_return_sequences]:
            assert "</think>" in Words().decode(tokens[:7])
    check_idle(drafted)


def test_nothing_changes_before_the_budget_is_spent() -> None:
    generator = make()
    config = SamplingConfig(do_sample=True, seed=3, top_k=0, max_new_tokens=12)
    free = generator.generate([20, OPENING], config).generated_token_ids[0]
    bounded = generator.generate([20, OPENING], config, thinking_budget=3).generated_token_ids[0]
    assert bounded[:3] == free[:3] and bounded[3] == CLOSING
    assert generator.generate([20, OPENING], config, thinking_budget=500).generated_token_ids[0] == free


def test_beams_have_the_budget_each() -> None:
    generator = make()
    config = SamplingConfig(num_beams=3, num_return_sequences=3, max_new_tokens=10)
    for tokens in generator.generate([20, OPENING], config, thinking_budget=4).generated_token_ids:
        assert "</think>" in Words().decode(tokens[:5])
    check_idle(generator)


def test_the_mask_is_gone_after_the_thought() -> None:
    engine = make().engine
    generator = Generator(engine, Words(), SamplingConfig(eos_token_id=0))
    seen = []
    engine.model.hook = lambda batch: seen.append(any(row.mask is not None for row in engine.scheduler.running))
    generator.generate([20, OPENING], SamplingConfig(thinking_budget=3, max_new_tokens=9))
    assert seen[:3] == [True] * 3 and seen[-3:] == [False] * 3


# -- the mask by itself ------------------------------------------------------------------------------------------------


def mask_of(budget: int, prompt: list[int], *unwritten: str, other=None, marks: Reasoning = THINK) -> ThinkingMask:
    return ThinkingMask(Thoughts(marks, Words(*unwritten)), budget, prompt, other)


def allowed(mask: ThinkingMask) -> set[int]:
    row = torch.zeros(2, dtype=torch.int32)
    mask.fill(row)
    return {token for token in range(SIZE) if row[token >> 5].item() >> (token & 31) & 1}


def accept(mask: ThinkingMask, *names: str) -> ThinkingMask:
    for name in names:
        mask.accept(NAMES.index(name))
    return mask


def test_a_mark_begun_in_time_is_completed() -> None:
    mask = accept(mask_of(2, [OPENING], "</think>"), "w0", "</")
    assert allowed(mask) == {PIECES[1]} and mask.forced() == PIECES[1:]
    assert not accept(mask, "think").is_open and accept(mask, ">").is_open
    mask = accept(mask_of(2, [OPENING], "</think>"), "w0", "<")
    assert mask.forced() == PIECES, "this beginning is no token of the mark"
    mask = accept(mask_of(9, [OPENING], "</think>"), "o</", "think", ">")
    assert mask.is_open, "a mark in other tokens ends the thought, too"


def test_a_thought_that_the_model_begins() -> None:
    assert accept(mask_of(1, [20]), " ", "\n").forced() == []
    assert accept(mask_of(1, [20]), "\n", "<think>", "w0").forced() == [CLOSING]
    assert accept(mask_of(0, [20]), "<think>").forced() == [CLOSING]
    assert accept(mask_of(1, [20]), "w0").is_open, "the answer has begun"
    assert accept(mask_of(1, [20]), "<", "think").forced() == []
    assert accept(mask_of(1, [20]), "<", "think", ">", "w0").forced() == [CLOSING]
    assert mask_of(1, [OPENING, CLOSING]).is_open, "the prompt has ended the thought"


def test_thoughts_that_may_follow_each_other() -> None:
    opening = ["<|channel|>", "analysis", "<|message|>"]
    closing = [NAMES.index(name) for name in ("<|end|>", "<|start|>", "assistant")]
    mask = accept(mask_of(3, [11, 12], marks=HARMONY_ANALYSIS), *opening, "w0")
    assert mask.forced() == []
    assert accept(mask, "w1", "w2").forced() == closing
    accept(mask, "<|end|>", "<|start|>", "assistant")
    assert NAMES.index("analysis") in allowed(mask)
    accept(mask, "<|channel|>")
    assert NAMES.index("analysis") not in allowed(mask), "no more thoughts"
    assert mask.count_allowed([NAMES.index("analysis")]) == 0 and not mask.is_open
    with pytest.raises(ValueError, match="thinking_budget=3 does not allow"):
        accept(mask, "analysis")
    again = accept(mask_of(9, [11, 12], marks=HARMONY_ANALYSIS), *opening, "w0", "<|end|>", "<|start|>", "assistant")
    assert NAMES.index("analysis") in allowed(accept(again, "<|channel|>")), "the budget has some left"


def test_no_more_thoughts_whose_opening_mark_is_one_token() -> None:
    """Solar-Open has such a format. Otherwise each thought would end at once, and the next one begin."""
    marks = Reasoning("<think>", "<|end|><|start|>assistant", repeats=True)
    mask = accept(mask_of(2, [11], marks=marks), "<think>", "w0", "w1", "<|end|>", "<|start|>", "assistant")
    assert OPENING not in allowed(mask) and mask.count_allowed([OPENING]) == 0
    assert OPENING in allowed(accept(mask_of(9, [11], marks=marks), "w0"))


def test_another_mask_holds_as_well() -> None:
    other = AllowedTokens([OPENING, CLOSING, 20, 21])
    mask = mask_of(2, [30, OPENING], other=other)
    assert allowed(mask) == {OPENING, CLOSING, 20, 21} and mask.count_allowed([20, 21, CLOSING, 22]) == 3
    mask.accept(20)
    mask.accept(21)
    assert allowed(mask) == {CLOSING} == set(mask.forced())
    mask.accept(CLOSING)
    assert allowed(mask) == {OPENING, CLOSING, 20, 21} and not mask.is_open
    mask = accept(mask_of(1, [30, OPENING], other=AllowedTokens([20])), NAMES[20])
    with pytest.raises(ValueError, match="thinking_budget=1 is spent, and the grammar or token_mask does not allow"):
        allowed(mask)


def test_the_methods_agree() -> None:
    """Random walks: `count_allowed` counts what `accept` takes, `rollback` goes back, and forks are independent."""
    for seed in range(30):
        chance = random.Random(seed)
        other = FunctionMask(lambda tokens: frozenset(range(1, SIZE))) if seed % 2 else None
        mask = mask_of(seed % 5, [20, OPENING][: 1 + seed % 3], *["</think>"][: seed % 2], other=other)
        tokens: list[int] = []
        for _ in range(40):
            options = sorted(allowed(mask) - {0})
            token = chance.choice([*options, *[t for t in (OPENING, CLOSING, *PIECES) if t in options]])
            ahead = [token, *(chance.randrange(1, SIZE) for _ in range(3))]
            fork, count = mask.fork(), mask.count_allowed(ahead)
            for taken in ahead[:count]:
                fork.accept(taken)
            if count < len(ahead):
                with pytest.raises(ValueError):
                    fork.accept(ahead[count])
            fork.rollback(count)
            assert allowed(fork) == allowed(mask)
            mask.accept(token)
            tokens.append(token)
            if chance.random() < 0.1:
                back = chance.randint(0, len(tokens))
                mask.rollback(back)
                del tokens[len(tokens) - back :]
        fresh = mask_of(seed % 5, [20, OPENING][: 1 + seed % 3], *["</think>"][: seed % 2], other=other)
        for token in tokens:
            fresh.accept(token)
        assert allowed(fresh) == allowed(mask) and fresh.is_open == mask.is_open


def test_a_character_is_completed_where_the_other_mask_has_no_place_for_the_mark() -> None:
    class Bytes(Words):
        def convert_ids_to_tokens(self, token: int) -> str:
            return {30: "<0xF0>", 31: "<0x9F>"}.get(token, NAMES[token])

    only = FunctionMask(lambda tokens: frozenset({31} if tokens and tokens[-1] >= 30 and len(tokens) < 4 else {30, 2}))
    mask = ThinkingMask(Thoughts(THINK, Bytes()), 1, [OPENING], only)
    for token in (30, 31, 31, 31):
        assert mask.forced() == [] and allowed(mask) == ({31} if token == 31 else {30, 2})
        mask.accept(token)
    assert mask.forced() == [CLOSING]
    free = ThinkingMask(Thoughts(THINK, Bytes()), 1, [OPENING])
    free.accept(30)
    assert free.forced() == [CLOSING], "without another mask the budget holds to the token"


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_a_model_without_known_thoughts_is_refused() -> None:
    class Plain(Words):
        chat_template = "{{ messages }}"

    for tokenizer in (Plain(), FakeTokenizer()):
        with pytest.raises(ValueError, match="thinking_budget needs a model whose thoughts have known marks"):
            make(tokenizer=tokenizer).generate([20], thinking_budget=4)
    for wrong, error in ((-1, ValueError), ("9", TypeError), (1.5, TypeError)):
        with pytest.raises(error, match="thinking_budget must be an int >= 0"):
            SamplingConfig(thinking_budget=wrong)
    assert SamplingConfig(thinking_token_budget=4).thinking_budget == 4
    with pytest.raises(TypeError, match="template_variables"):
        SamplingConfig(enable_thinking=True)


def test_the_place_is_known_from_the_end_of_the_prompt() -> None:
    thoughts = Thoughts(THINK, Words())
    newlines = [NAMES.index("\n")] * 3
    assert thoughts.begin([20, OPENING, *newlines], 4).place is Place.WITHIN
    assert thoughts.begin([20, OPENING, 21, CLOSING, *newlines], 4).place is Place.AFTER
    assert thoughts.begin([OPENING, 21], 4).place is Place.BEFORE
