"""Token healing: tokens removed from a prompt's end, tokens that may replace them, and the generated text."""

from __future__ import annotations

import io
import random

import pytest
import torch

from pace.llm import AllowedTokens, CallbackStreamer, SamplingConfig, TextStreamer
from pace.llm.constraints.healing import HealingMask, PromptHealer
from pace.llm.sequence import TextRules
from pace.llm.text.detokenizer import context_of, decode, decode_after
from pace.llm.text.reader import TextReader
from pace.llm.text.token_bytes import TokenBytes
from tests.llm.bundled import KINDS, bundled
from tests.llm.generators import check_idle
from tests.llm.text.tokenizer_zoo import CORPUS, ZOO

PROMPTS = ["Once upon a ti", "Once upon a ", "The capital of Fra", "1, 2, 3,", "x", 'a "quo', "A person:"]
NUM_TOKENS = 10


def vocabulary(tokenizer) -> dict[int, bytes]:
    """Returns the bytes of each token except special ones."""
    table = TokenBytes.of(tokenizer)
    tokens = {token: table[token] for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids}
    return {token: text for token, text in tokens.items() if text}


def agreeing(words: dict[int, bytes], text: bytes) -> set[int]:
    return {token for token, word in words.items() if word.startswith(text) or text.startswith(word)}


def allowed_by(mask: HealingMask, vocab_size: int) -> set[int]:
    row = torch.zeros(-(-vocab_size // 32), dtype=torch.int32)
    mask.fill(row)
    return {token for token in range(vocab_size) if row[token >> 5].item() >> (token & 31) & 1}


@pytest.mark.parametrize("kind", ZOO)
def test_what_is_taken_is_what_one_longer_token_may_begin_with(kind: str) -> None:
    tokenizer, chance = ZOO[kind](), random.Random(3)
    words, healer = vocabulary(tokenizer), PromptHealer(tokenizer, len(tokenizer))
    num_healed = 0
    for _ in range(300):
        text = chance.choice(CORPUS)
        tokens = tokenizer(text[: chance.randint(1, len(text))])["input_ids"]
        healed = healer.heal(tokens)
        taken = tokens[len(healed.tokens) :]
        assert healed.tokens == tokens[: len(healed.tokens)] and healed.tokens
        said = b"".join(words.get(token, b"") for token in taken)
        assert said == healed.end.encode()
        num_healed += bool(taken)
        if taken:
            assert any(word.startswith(said) and len(word) > len(said) for word in words.values())
        for count in range(len(taken) + 1, min(len(tokens), 4)):  # and no more tokens could have been removed
            more = b"".join(words.get(token, b"\xff\xff") for token in tokens[-count:])
            is_text = more.decode(errors="replace").encode() == more
            assert not is_text or not any(word.startswith(more) and word != more for word in words.values())
    assert num_healed > 100


@pytest.mark.parametrize("kind", ZOO)
def test_the_mask_allows_what_agrees_with_the_end(kind: str) -> None:
    tokenizer, chance = ZOO[kind](), random.Random(5)
    words, healer = vocabulary(tokenizer), PromptHealer(tokenizer, len(tokenizer))
    for end in ["t", "th", "caf", "é", "日本", " up", "!\n"]:
        mask, left, states = HealingMask(healer, end), end.encode(), []
        while left:
            allowed = agreeing(words, left)
            assert allowed_by(mask, len(tokenizer)) == allowed
            wrong = next(token for token in range(len(tokenizer)) if token not in allowed)
            assert mask.count_allowed([wrong]) == 0
            with pytest.raises(ValueError, match="does not agree"):
                mask.accept(wrong)
            token = chance.choice(sorted(allowed, key=lambda token: (len(words[token]), token))[:3])
            states.append(left)
            mask.accept(token)
            left = left[len(words[token]) :]
        assert mask.is_open and mask.count_allowed([0, 1, 2]) == 3
        mask.accept(0)
        mask.accept(1)
        mask.rollback(2 + len(states))
        assert allowed_by(mask, len(tokenizer)) == agreeing(words, end.encode())


def by_hand(prompt: str) -> tuple[list[int], list[int]]:
    """Returns the prompt's tokens without its end, and the greedy tokens after them that agree with the end."""
    model = bundled()
    words = vocabulary(model.tokenizer)
    given = model.tokenizer(prompt)["input_ids"]
    healed = PromptHealer(model.tokenizer, model.config.vocab_size).heal(given)
    left, tokens = healed.end.encode(), []
    with model.session() as session:
        logits = session.append(healed.tokens)[0]
        while len(tokens) < NUM_TOKENS + len(given) - len(healed.tokens):
            if left:
                allowed = torch.tensor(sorted(agreeing(words, left)))
                token = int(allowed[logits[allowed].argmax()])
                left = left[len(words[token]) :]
            else:
                token = int(logits.argmax())
            tokens.append(token)
            if token in model.generator.defaults.eos_token_id:
                break
            logits = session.append([token])[0]
    return healed.tokens, tokens


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_a_plain_loop(kind: str) -> None:
    config = SamplingConfig(token_healing=True, max_new_tokens=NUM_TOKENS)
    model, expected = bundled(kind), [by_hand(prompt) for prompt in PROMPTS]
    out = model.generate(PROMPTS, config)
    assert out.generated_token_ids == [tokens for _, tokens in expected]
    for prompt, (kept, tokens), text in zip(PROMPTS, expected, out.texts):
        whole = decode(model.tokenizer, kept + tokens)
        assert whole == decode(model.tokenizer, model.tokenizer(prompt)["input_ids"]) + text
    rows = [[token for token in row.tolist() if token] for row in out.output_token_ids]
    assert [row[: len(kept)] for row, (kept, _) in zip(rows, expected)] == [kept for kept, _ in expected]
    check_idle(model, None)


def test_a_word_is_finished() -> None:
    config = SamplingConfig(max_new_tokens=3)
    assert not bundled().generate("The capital of Fra", config).texts[0].startswith("nce")
    config.token_healing = True
    assert bundled().generate("The capital of Fra", config).texts[0].startswith("nce is")


def test_streams_give_the_same_text_and_stop_strings_begin_after_the_prompt() -> None:
    """Every set of stop strings runs on all prompts in one batch, and on every other prompt alone."""
    model = bundled()
    for number, stops in enumerate((None, ["i"], ["ti", "tim"], ["time,"], ["ra"], [","])):
        config = SamplingConfig(token_healing=True, max_new_tokens=NUM_TOKENS, stop_strings=stops)
        events = []
        texts = model.generate(PROMPTS, config, streamer=CallbackStreamer(events.append, model.tokenizer)).texts
        for row, (prompt, text) in enumerate(zip(PROMPTS, texts)):
            assert "".join(event.text for event in events if event.row == row) == text
            assert not any(stop in text for stop in stops or ())
            if stops and (row + number) % 2:
                continue
            assert "".join(model.stream(prompt, config)) == text
            request = model.add_request(prompt, config)
            assert request.result().texts == [text] == [request.text]
            for skip_prompt in (True, False):
                written = io.StringIO()
                streamer = TextStreamer(model.tokenizer, skip_prompt=skip_prompt, file=written)
                model.generate(prompt, config, streamer=streamer)
                assert written.getvalue().endswith(text + "\n")
                if skip_prompt:
                    assert written.getvalue() == text + "\n"
                elif not stops:
                    assert written.getvalue() == prompt + text + "\n"


@pytest.mark.parametrize("kind", ZOO)
def test_pieces_leave_the_end_out_whatever_the_tokenizer_does_with_blanks(kind: str) -> None:
    tokenizer, chance = ZOO[kind](), random.Random(7)
    healer = PromptHealer(tokenizer, len(tokenizer))
    for _ in range(200):
        text = chance.choice(CORPUS)
        tokens = tokenizer(text)["input_ids"]
        healed = healer.heal(tokenizer(text[: chance.randint(1, len(text))])["input_ids"])
        again = tokens[len(healed.tokens) :]
        if healed.tokens != tokens[: len(healed.tokens)]:
            continue
        rules = TextRules(context_of(healed.tokens, tokenizer), healed.end)
        pieces = TextReader(tokenizer, rules=rules)
        joined = "".join([pieces.push(token) for token in again]) + pieces.flush()
        assert joined == decode_after(tokenizer, again, rules)
        assert decode(tokenizer, healed.tokens) + healed.end + joined == text


def test_samples_and_grammars() -> None:
    pytest.importorskip("llguidance")
    import re

    model = bundled()
    config = SamplingConfig(token_healing=True, regex="[a-z]{3,9} [0-9]{2}", max_new_tokens=40)
    for prompt, text in zip(PROMPTS, model.generate(PROMPTS, config).texts):
        assert re.fullmatch("[a-z]{3,9} [0-9]{2}", text), (prompt, text)
    config = SamplingConfig(
        token_healing=True, do_sample=True, seed=1, num_return_sequences=5, max_new_tokens=6, top_k=0
    )
    out = model.generate(PROMPTS[:2], config)
    assert len(set(out.texts)) > 5
    assert all(decode(model.tokenizer, row.tolist()).startswith("Once upon a") for row in out.output_token_ids)
    config = SamplingConfig(token_healing=True, grammar='start: " " city\ncity[capture]: /[A-Z][a-z]+/')
    (captures,) = model.generate("We went to Lon", config).captures
    assert captures["city"][0].text.isalpha()


def test_what_cannot_be_healed_is_refused() -> None:
    with pytest.raises(ValueError, match="token_healing and token_mask"):
        bundled().generate("x", SamplingConfig(token_healing=True, token_mask=AllowedTokens([3])))
    with pytest.raises(NotImplementedError, match="num_beams=1"):
        bundled().generate("x", SamplingConfig(token_healing=True, num_beams=2))
    with pytest.raises(ValueError, match="token_healing"):
        bundled().chat("x", SamplingConfig(token_healing=True))
