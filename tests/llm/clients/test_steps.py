"""Step callbacks are called at the right places, and their feedback is applied: tokens equal those of a reference."""

from __future__ import annotations

import io
import random
from dataclasses import dataclass, field

import pytest

from pace.assets import TINY
from pace.llm import CallbackStreamer, LLMModel, SamplingConfig, StepContext, StepFeedback, TextStreamer
from pace.llm.sampling.logits import Processors, build_processors
from pace.llm.sampling.sampler import Sampling, rules_of
from pace.llm.sequence import Sequence, Span
from tests.llm.bundled import KINDS, bundled
from tests.llm.fake_model import OPS, FakeModel, FakeTokenizer
from tests.llm.generators import by_hand, check_idle, make_generator, random_prompts
from tests.plugins.tiers import sample
from tests.waiting import PATIENCE, Gate

CONFIGS = [
    SamplingConfig(seed=1),
    SamplingConfig(seed=1, repetition_penalty=1.3, no_repeat_ngram_size=2, logprobs=2),
    SamplingConfig(do_sample=True, seed=3, temperature=1.5, top_k=0),
    SamplingConfig(do_sample=True, seed=4, frequency_penalty=0.7, presence_penalty=0.2, min_p=0.02),
    SamplingConfig(seed=1, stop_strings=["q", "ab"]),
]
NUM_TOKENS = 32


@dataclass
class Plan:
    """A callback whose feedback depends only on the row and the number of the call."""

    seed: int
    calls: dict[int, list[StepContext]] = field(default_factory=dict)

    def say(self, row: int, number: int, num_generated: int) -> StepFeedback | None:
        chance = random.Random(f"{self.seed} {row} {number}")
        kind = chance.choice(["on", "back", "text", "both", "both", "stop"]) if number < 9 else "on"
        if kind == "on":
            return None
        back = chance.randint(0, min(6, num_generated)) if kind in ("back", "both") else 0
        num_letters = chance.randint(1, 5) if kind in ("text", "both") else 0
        text = "".join(chance.choice("bcdefgh") for _ in range(num_letters))
        return StepFeedback(stop=kind == "stop" and number > 3, take_back=back, text=text)

    def __call__(self, context: StepContext) -> StepFeedback | None:
        calls = self.calls.setdefault(context.row, [])
        calls.append(context)
        return self.say(context.row, len(calls) - 1, len(context.token_ids))


def by_definition(
    model: FakeModel, prompt: list[int], config: SamplingConfig, row: int
) -> tuple[list[int], str, list[tuple[list[int], str | None]]]:
    """Reference without cache, batch or kept state. Returns the tokens, the finish reason, and the tokens and string of
    each call."""
    tokenizer, tokens, calls, last = FakeTokenizer(), [], [], 0
    plan, every, strings = config.step_callback, config.step_every, config.step_strings or []

    def finished() -> str | None:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if tokens[-1] == 0 or any(stop in text for stop in config.stop_strings or ()):
            return "stop"
        return "length" if len(tokens) == NUM_TOKENS else None

    searched = 0
    while True:
        processors = Processors(build_processors(config, len(prompt), [0]))
        sequence = Sequence(prompt, Sampling(processors, rules_of(config), config.seed), None, 10**6)
        sequence.tokens += tokens
        tokens += sequence.strategy.choose(OPS, model.logits_of(prompt + tokens)[None], Span(sequence, 0, 1))
        if reason := finished():
            return tokens, reason, calls
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        found = next((string for string in strings if string in text[searched:]), None)
        if not found and (every is None or len(tokens) - last < every):
            continue
        said = plan.say(row, len(calls), len(tokens)) or StepFeedback()
        calls.append((list(tokens), found))
        del tokens[len(tokens) - said.take_back :]
        for token in tokenizer.encode(said.text):
            tokens.append(token)
            if reason := finished():
                return tokens, reason, calls
        if said.stop:
            return tokens, "stop", calls
        last = len(tokens)
        if found or said.take_back or said.text:
            searched = len(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("seed", sample(range(10), lambda seed: seed < 3))
def test_tokens_are_those_of_the_definition(seed: int) -> None:
    """Random step points, revisions, limits, pools and batches."""
    chance = random.Random(seed)
    model = FakeModel(eos_bias=chance.choice([-50.0, 0.0]))
    limits = {"num_blocks": (12, 20, 200), "max_tokens_per_step": (5, 16, 512), "max_sequences_per_step": (1, 3, 64)}
    generator = make_generator(model, **{name: chance.choice(limit) for name, limit in limits.items()})
    for number in range(6):
        config, plan = chance.choice(CONFIGS).copy(), Plan(100 * seed + number)
        every, strings = chance.choice([(1, []), (3, []), (None, ["a", "cd"]), (7, ["e"]), (10, ["z", "b"])])
        config.max_new_tokens, config.step_callback = NUM_TOKENS, plan
        config.step_every, config.step_strings = every, strings or None
        prompts, events = random_prompts(seed + number, 4, longest=40), []
        out = generator.generate(prompts, config, streamer=CallbackStreamer(events.append, generator.tokenizer))
        for row, prompt in enumerate(prompts):
            tokens, reason, calls = by_definition(FakeModel(eos_bias=model.eos_bias), prompt, config, row)
            assert out.generated_token_ids[row] == tokens and out.finish_reasons[row] == reason
            assert [(call.token_ids, call.string) for call in plan.calls.get(row, [])] == calls
            told, text = [], ""
            for event in events:
                if event.row == row:
                    del told[len(told) - event.num_taken_back :]
                    told += [] if event.token is None else [event.token]
                    text = text[: len(text) - event.num_chars_taken_back] + event.text
            assert told == tokens and text == out.texts[row]
            if config.logprobs is not None:
                assert [entry.token for entry in out.logprobs[row]] == tokens
    check_idle(generator, None)


def no_more_than(count: int, feedback):
    """Returns a callback that returns `feedback(context)` at its first `count` calls, then None."""
    calls = []

    def callback(context: StepContext) -> StepFeedback | None:
        calls.append(context)
        return feedback(context) if len(calls) <= count else None

    callback.calls = calls
    return callback


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_end_at_the_step_point(kind: str) -> None:
    prompt, plain = "1, 2, 3, 1, 2, 3, 1, 2, 3,", bundled()
    config = SamplingConfig(max_new_tokens=30, step_every=5)
    config.step_callback = watch = no_more_than(0, None)
    out = bundled(kind).generate(prompt, config)
    assert out.generated_token_ids == plain.generate(prompt, SamplingConfig(max_new_tokens=30)).generated_token_ids
    assert [len(call.token_ids) for call in watch.calls] == [5, 10, 15, 20, 25]
    revised = []
    for name in ("plain", kind):
        config.step_callback = no_more_than(3, lambda context: StepFeedback(take_back=2, text=" 7,"))
        revised.append(bundled(name).generate(prompt, config).generated_token_ids)
    assert revised[0] == revised[1] != out.generated_token_ids
    for num_tokens in range(6, 12):  # the sequence would end with a draft after the step point
        config.max_new_tokens = num_tokens
        config.step_callback = watch = no_more_than(1, lambda context: StepFeedback(take_back=5))
        out = bundled(kind).generate(prompt, config)
        assert len(out.generated_token_ids[0]) == num_tokens and out.finish_reasons == ["length"]
        assert len(watch.calls) == 1 + (num_tokens - 1) // 5
    check_idle(bundled(kind), None)


def test_a_marker_is_replaced_by_a_result() -> None:
    def replace(context: StepContext) -> StepFeedback:
        assert context.text.endswith(context.string)
        return StepFeedback(take_back=context.num_string_tokens, text=context.text_before_string + "bear")

    model, prompt = bundled(), "Once upon a time there was a "
    assert "fox" in model.generate(prompt, SamplingConfig(max_new_tokens=20)).texts[0]
    config = SamplingConfig(max_new_tokens=20, step_strings=["fox"])
    config.step_callback = no_more_than(1, replace)
    out = model.generate(prompt, config)
    assert "bear" in out.texts[0] and "fox" not in out.texts[0]
    ids = model.tokenizer(prompt)["input_ids"]
    begin = out.texts[0].index("bear") + len("bear")
    [tokens], decode = out.generated_token_ids, model.tokenizer.decode
    kept = next(count for count in range(40) if decode(tokens[:count]) == out.texts[0][:begin])
    rest = model.generate(ids + tokens[:kept], SamplingConfig(max_new_tokens=20 - kept))
    assert rest.generated_token_ids[0] == tokens[kept:]


def test_streams_hear_of_it() -> None:
    model, prompt = bundled(), "Once upon a time there was a "
    config = SamplingConfig(max_new_tokens=20, step_every=6)
    revise = lambda context: StepFeedback(take_back=3, text=" and then")

    def with_callback() -> SamplingConfig:
        config.step_callback = no_more_than(2, revise)
        return config

    text = model.generate(prompt, with_callback()).texts[0]
    shown, taken = "", 0
    for piece in model.stream(prompt, with_callback()):
        shown = shown[: len(shown) - piece.taken_back] + piece
        taken += piece.taken_back
    assert shown == text and taken > 0
    written = io.StringIO()
    model.generate(prompt, with_callback(), streamer=TextStreamer(model.tokenizer, skip_prompt=True, file=written))
    assert written.getvalue().split("\n")[-2] == text
    assert len(written.getvalue().split("\n")) == 4  # started on a new line twice

    class Puts:
        def put(self, value):
            pass

        def end(self):
            pass

    with pytest.raises(ValueError, match="Puts has no take_back"):
        model.generate(prompt, with_callback(), streamer=Puts())
    check_idle(model, None)


def test_stop_ends_with_the_text() -> None:
    config = SamplingConfig(max_new_tokens=20, step_every=4)
    config.step_callback = lambda context: StepFeedback(True, 1, " END")
    out = bundled().generate("Once upon a time", config)
    assert out.finish_reasons == ["stop"] and out.texts[0].endswith(" END")
    config.step_callback, config.stop_strings = lambda context: StepFeedback(text=" a END b"), ["END"]
    out = bundled().generate("Once upon a time", config)
    assert out.finish_reasons == ["stop"] and out.texts[0].endswith(" a ")
    config.stop_strings = None
    out = bundled().generate("Once upon a time", config)
    assert out.finish_reasons == ["length"] and len(out.generated_token_ids[0]) == 20


def test_what_is_put_in_is_of_the_grammar() -> None:
    pytest.importorskip("llguidance")
    model = bundled()
    items = 'start: item (", " item)*\nitem: /[a-z]{3}/'
    config = SamplingConfig(grammar=items, max_new_tokens=30, step_strings=[", "])
    config.step_callback = no_more_than(2, lambda context: StepFeedback(text="dog, "))
    text = model.generate("x", config).texts[0]
    assert text[5:10] == "dog, " and all(len(item) == 3 for item in text.split(", ")[:-1])
    everything = lambda context: StepFeedback(take_back=len(context.token_ids), text="cat, ")
    config.step_callback = no_more_than(1, everything)
    assert model.generate("x", config).texts[0].startswith("cat, ")
    config.step_callback = lambda context: StepFeedback(text="horse, ")
    with pytest.raises(ValueError, match="grammar does not allow"):
        model.generate("x", config)
    config = SamplingConfig(grammar='start: word " " word\nword[capture]: /[a-z]{3}/', max_new_tokens=30, step_every=1)
    config.step_callback = watch = no_more_than(0, None)
    out = model.generate("x", config)
    assert [len(call.captures.get("word", [])) for call in watch.calls][-1] == 1
    assert out.captures[0]["word"][0].text == watch.calls[-1].captures["word"][0].text
    check_idle(model, None)


class Thinks(Gate):
    """A callback that blocks until the test lets it return."""

    def begin(self, model: LLMModel):
        """Returns a request whose callback has been called."""
        config = SamplingConfig(max_new_tokens=8, step_every=4, step_callback=self)
        request = model.add_request("Once upon a time", config)
        self.wait_inside()
        return request


def test_others_go_on_while_a_callback_thinks() -> None:
    model, thinks = bundled(), Thinks()
    slow = thinks.begin(model)
    expected = model.generate("Once upon a time", SamplingConfig(max_new_tokens=8)).texts
    assert not slow.done and not slow.choices[0].done and slow.finish_reason is None
    thinks.open()
    assert slow.result(PATIENCE).texts == expected


def test_one_that_is_cancelled_while_its_callback_thinks() -> None:
    model, thinks = bundled(), Thinks()
    request = thinks.begin(model)
    request.cancel()
    out = request.result(PATIENCE)
    assert out.finish_reasons == ["cancelled"] and len(out.generated_token_ids[0]) == 4
    thinks.open()
    check_idle(model, None)


def test_a_callback_may_use_the_model() -> None:
    model = bundled()
    inner = lambda: model.generate("The capital of Japan is", SamplingConfig(max_new_tokens=3)).texts[0]
    config = SamplingConfig(max_new_tokens=12, step_every=6)
    config.step_callback = no_more_than(1, lambda context: StepFeedback(text=inner()))
    assert inner() in model.generate("Once", config).texts[0]


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (lambda context: 1 / 0, ZeroDivisionError, "division"),
        (lambda context: "go on", TypeError, "must return a StepFeedback"),
        (lambda context: StepFeedback(take_back=99), ValueError, "take_back=99, but only 4 tokens can be removed"),
        (lambda context: StepFeedback(take_back=-1), ValueError, "0 or more"),
        (lambda context: StepFeedback(text=3), TypeError, "of type str"),
    ],
)
def test_a_callback_that_goes_wrong_fails_its_sequence_alone(answer, error, words: str) -> None:
    model = bundled()
    expected = model.generate("Once upon a time", SamplingConfig(max_new_tokens=30)).texts
    beside = model.add_request("Once upon a time", SamplingConfig(max_new_tokens=30))
    with pytest.raises(error, match=words):
        model.generate("1, 2, 3,", SamplingConfig(max_new_tokens=9, step_every=4, step_callback=answer))
    assert beside.result(PATIENCE).texts == expected
    check_idle(model, None)


def test_a_model_that_is_closed_while_a_callback_thinks() -> None:
    model, thinks = LLMModel(TINY, progress=False), Thinks()
    request = thinks.begin(model)
    model.close()
    thinks.open()
    with pytest.raises(ValueError, match="closed"):
        request.result(PATIENCE)


def test_samples_of_one_prompt_are_told_apart() -> None:
    config = SamplingConfig(max_new_tokens=6, do_sample=True, seed=1, num_return_sequences=3, step_every=3)
    config.step_callback = watch = no_more_than(0, None)
    out = bundled().generate(["Once", "Twice"], config)
    config.step_callback = config.step_every = None
    assert out.generated_token_ids == bundled().generate(["Once", "Twice"], config).generated_token_ids
    assert sorted(call.row for call in watch.calls) == list(range(6))
    for call in watch.calls:
        assert call.token_ids == out.generated_token_ids[call.row][:3]


def test_the_end_of_a_healed_prompt_stays() -> None:
    config = SamplingConfig(max_new_tokens=10, token_healing=True, step_every=4)
    everything = lambda context: StepFeedback(take_back=len(context.token_ids))
    config.step_callback = no_more_than(1, everything)
    with pytest.raises(ValueError, match="take_back=4, but only 3 tokens can be removed"):
        bundled().generate("The capital of Fra", config)
    config.step_callback = no_more_than(1, lambda context: StepFeedback(take_back=3, text=" is big"))
    assert bundled().generate("The capital of Fra", config).texts[0].startswith("n is big")


def test_what_cannot_be_asked_is_refused() -> None:
    model, callback = bundled(), lambda context: None
    for fields, words in [
        ({"step_callback": callback}, "needs step_every or step_strings"),
        ({"step_every": 3}, "need step_callback"),
        ({"step_callback": callback, "step_every": 3, "num_beams": 2}, "num_beams=1"),
    ]:
        with pytest.raises(ValueError, match=words):
            model.generate("x", SamplingConfig(**fields))
    with pytest.raises(TypeError, match="StepContext"):
        SamplingConfig(step_callback=3)
    with pytest.raises(ValueError, match="chat reads"):
        model.chat("x", SamplingConfig(step_callback=callback, step_every=3))


def test_a_step_that_fails_at_its_step_point(monkeypatch) -> None:
    """The sequence fails, and its callback is not called."""
    generator, asked = make_generator(FakeModel(eos_bias=-50.0)), []
    config = SamplingConfig(max_new_tokens=8, step_every=2, step_callback=asked.append)
    with by_hand(generator) as hand:
        request = generator.add_request([1, 2, 3], config)
        hand.step()
        with monkeypatch.context() as patch:
            patch.setattr(generator.engine.cache, "publish", lambda sequence: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                hand.step()
        assert not hand.step()
    with pytest.raises(ZeroDivisionError):
        request.result(PATIENCE)
    assert not asked
    check_idle(generator)
