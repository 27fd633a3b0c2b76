"""guidance programs: unconstrained text equals that of `generate`, for one program and for several at once."""

from __future__ import annotations

import json
import threading

import guidance
import numpy as np
import pytest
from guidance import assistant, gen, regex, select, user
from guidance import json as gen_json

from pace.assets import TINY
from pace.integrations.guidance import Pace
from pace.llm import LLMModel, SamplingConfig

PROMPTS = [
    "The capital of Egypt is",
    "1, 2, 3, 4,",
    "Once upon a time",
    "The capital of Japan is Tokyo. The capital of",
]
ANY_TEXT = "(?s:.+)"
"""Nonempty text: llguidance uses temperature 0 for a text that may be empty."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("echo", [False, True])
def test_greedy_text_is_that_of_generate(model, prompt, echo):
    lm = Pace(model, echo=echo)
    expected = model.generate(prompt, SamplingConfig(max_new_tokens=24)).texts[0]
    assert (lm + prompt + gen("text", max_tokens=24))["text"] == expected
    lm.close()


def test_a_chat_is_that_of_generate(lm, model):
    messages = [{"role": "user", "content": "What is the capital of Japan?"}]
    with user():
        lm += messages[0]["content"]
    with assistant():
        lm += gen("answer", max_tokens=30)
    assert lm["answer"] == model.chat(messages, SamplingConfig(max_new_tokens=30)).text
    assert str(lm).count("<|bos|>") == 0 and "Tokyo" in lm["answer"]


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_beginning_token_stands_where_the_tokenizer_adds_it(tmp_path, adds_bos):
    for file in TINY.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((TINY / "tokenizer.json").read_text())
    if not adds_bos:
        tokenizer["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with LLMModel(tmp_path, dtype="float32", progress=False) as model:
        lm = Pace(model, echo=False)
        seen, logits = [], lm.engine.get_logits
        lm.engine.get_logits = lambda token_ids, **options: seen.append(token_ids) or logits(token_ids, **options)
        text = (lm + "1, 2, 3, 4," + gen("text", max_tokens=12))["text"]
        assert all((ids[0] == model.tokenizer.bos_token_id) == adds_bos for ids in seen)
        assert text == model.generate("1, 2, 3, 4,", SamplingConfig(max_new_tokens=12)).texts[0]
        with user():
            assert str(lm + "Hello").startswith("<|user|>" if adds_bos else "<|bos|><|user|>")
        lm.close()


def test_constraints_hold_and_captures_are_kept(lm):
    out = lm + "A person as JSON: " + gen_json("person", schema=SCHEMA, temperature=1.0)
    assert set(json.loads(out["person"])) == {"name", "age"}
    out = lm + "The sky is " + select(["blue", "green"], name="colour") + ", " + regex(r"[0-9]{3}", name="number")
    assert out["colour"] in ("blue", "green") and len(out["number"]) == 3
    many = lm
    for _ in range(2):
        many += " a word: " + gen("words", regex="[a-z]{3}", list_append=True)
    assert [len(word) for word in many["words"]] == [3, 3]


def test_text_beyond_one_token_a_character(lm):
    """Characters of several tokens, cut at any place."""
    text = "Ünïcödé 🙂 爨 " + "é" * 5
    assert str(lm + text + regex("[0-9]{2}")).startswith(text)
    tokenizer = lm.engine.tokenizer
    ids = tokenizer.encode(text.encode())
    for length in range(len(ids) + 1):
        assert tokenizer.decode(tokenizer.recode(ids[:length])) == tokenizer.decode(ids[:length])


def programs():
    return [prompt + gen("text", max_tokens=16) for prompt in PROMPTS * 2] + [
        "A person as JSON: " + gen_json("text", schema=SCHEMA),
        "I like " + select(["dogs", "cats"], name="text") + gen(max_tokens=5),
    ]


def test_a_batch_is_its_programs_one_by_one(lm):
    alone = [str(lm + program) for program in programs()]
    assert [str(out) for out in lm.batch(programs())] == alone
    assert lm.batch([]) == []

    def chatted(lm):
        with user():
            lm += "What is the capital of Japan?"
        with assistant():
            return lm + gen("text", max_tokens=8)

    first, second = lm.batch([chatted, "1, 2, 3," + gen(max_tokens=4)])
    assert str(first) == str(chatted(lm)) and str(second).startswith("1, 2, 3, 4")
    with user():
        (inside,) = lm.batch(["Hello"])
    assert "<|user|>Hello" in str(inside), "roles that are open hold for programs"


def test_a_batch_shares_the_steps_of_the_model(lm, model, monkeypatch):
    """Some steps have rows of several branches."""
    engine, sizes = model._engine, []
    step = engine.scheduler.schedule
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: sizes.append(len(spans := step())) or spans)
    lm.batch([prompt + gen(max_tokens=20) for prompt in PROMPTS])
    assert max(sizes) > 1


def test_an_error_in_a_batch_is_raised(lm):
    with pytest.raises(ZeroDivisionError):
        lm.batch(["1, 2," + gen(max_tokens=2), lambda lm: 1 / 0])
    assert "3" in str(lm + "1, 2," + gen(max_tokens=4))


def test_others_use_the_model_meanwhile(lm, model):
    expected = [model.generate(prompt, SamplingConfig(max_new_tokens=16)).texts[0] for prompt in PROMPTS]
    got = []
    thread = threading.Thread(
        target=lambda: got.extend(
            model.generate(prompt, SamplingConfig(max_new_tokens=16)).texts[0] for prompt in PROMPTS
        )
    )
    thread.start()
    outs = lm.batch([prompt + gen("text", max_tokens=16) for prompt in PROMPTS])
    thread.join()
    assert got == [out["text"] for out in outs] == expected


def test_sessions_are_given_back(model):
    lm = Pace(model, echo=False)
    lm.batch(programs())
    lm.close()
    with pytest.raises(ValueError, match="closed"):
        lm + "1, 2, 3," + gen(max_tokens=2)
    model._generator.driver.call(lambda engine: engine.cache.check_integrity([])).result()
    assert model.memory_report().cache_used == 0


def test_seeds(model):
    story = "Once upon a time" + gen("text", regex=ANY_TEXT, max_tokens=20, temperature=1.2)
    one, two = Pace(model, echo=False, seed=1), Pace(model, echo=False, seed=2)
    texts = [(lm + story)["text"] for lm in (one, one, two)]
    assert texts[0] == texts[1] != texts[2]
    assert (one.with_sampling_params({"seed": 2}) + story)["text"] == texts[2]
    assert [out["text"] for out in one.batch([story] * 3)] == [texts[0]] * 3
    one.close(), two.close()
    free = Pace(model, echo=False)
    np.random.seed(3)
    first = (free + story)["text"]
    np.random.seed(3)
    assert (free + story)["text"] == first
    assert len({(free + story)["text"] for _ in range(4)}) > 1
    free.close()


def test_sampling_params_are_used(lm):
    story = "Once upon a time" + gen("text", regex=ANY_TEXT, max_tokens=20, temperature=5.0)
    greedy = (lm + "Once upon a time" + gen("text", max_tokens=20))["text"]
    assert (lm.with_sampling_params({"top_k": 1}) + story)["text"] == greedy
    assert (lm.with_sampling_params({"min_p": 1.0}) + story)["text"] == greedy
    with pytest.raises(TypeError, match="topk"):
        lm.with_sampling_params({"topk": 1})


def test_echo_has_the_probabilities_of_all_tokens(model):
    from guidance._schema import SamplingParams

    lm = Pace(model, echo=True)
    ids = lm.engine.tokenizer.encode(b"The capital of Egypt is Cairo.")
    state = lm._interpreter.state
    state.prompt = "The capital of"
    grammar = (" Egypt is Cairo." + gen(max_tokens=1)).ll_grammar()
    tokens = [token for part in lm.engine(state, grammar, sampling_params=SamplingParams()) for token in part.tokens]
    scored = np.exp(model.score([[model.tokenizer.bos_token_id, *ids]])[0].numpy())
    forced = [token for token in tokens if token.is_input]
    first = ids.index(forced[0].token_id)
    assert len(forced) >= 4 and [token.token_id for token in forced] == ids[first : first + len(forced)]
    assert [token.prob for token in forced] == pytest.approx(scored[first : first + len(forced)].tolist(), rel=1e-4)
    assert all(len(token.top_k) >= 5 for token in tokens)
    lm.close()


def test_steps_with_a_callback(lm):
    seen = []

    def look(context):
        seen.append(context["step_counter"])
        return {"injected_text": " 77,"} if len(seen) == 1 else {}

    lm += "1, 2, 3,"
    out = lm.with_step_config({"step_every_k": 4, "callback": look}) + gen(max_tokens=16)
    assert seen and " 77," in str(out)


def test_a_function_with_state(lm):
    @guidance
    def pair(lm, prompt):
        lm += prompt + gen("first", max_tokens=3)
        return lm + " and " + gen("second", max_tokens=3)

    out = lm + pair("1, 2, 3,")
    assert out["first"] and str(out).startswith("1, 2, 3," + out["first"] + " and " + out["second"])


def test_a_path_and_what_is_refused(model):
    lm = Pace(TINY, echo=False, dtype="float32", progress=False)
    assert "Cairo" in str(lm + PROMPTS[0] + gen(max_tokens=4))
    lm.close()
    with pytest.raises(TypeError, match="dtype apply to loading, but this model is already loaded"):
        Pace(model, dtype="float32")
    with pytest.raises(TypeError, match="a path, a Hub id or an LLMModel"):
        Pace(17)
    with pytest.raises(ValueError, match="max_branches"):
        Pace(model, max_branches=0)
    with pytest.raises(TypeError, match="top"):
        Pace(model, sampling_params={"top": 1})
