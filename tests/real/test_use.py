"""Real models in use: chats, tools, JSON, sessions, drafts, questions, and opening."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from benchmarks.opening import NUM_TOKENS, PROMPT, generate, run
from pace.llm import LLMModel, PromptLookupConfig, SamplingConfig
from tests.real.page import as_code
from tests.real.texts import ODD_TEXTS

pytestmark = pytest.mark.timeout(1800)

GREEDY = SamplingConfig(do_sample=False, max_new_tokens=200)
QUESTIONS = json.loads((Path(__file__).parent / "questions.json").read_text(encoding="utf-8"))
TRANSFORMERS_DIFFERS = {
    # It does not know tokenizer.ggml.pre = smollm, which separates all numerals.
    "smollm2": {text for text in ODD_TEXTS if any(letter in text for letter in "½²")},
    # It merges a blank with a letter that means one; sentencepiece's best merge comes first.
    "gemma3": {"a▁b ▁ c"},
    # It does not compose letters (NFC), which the model's own tokenizer.json does.
    "qwen-coder": {"e\u0301\u200b"},
}
"""Texts that transformers tokenises differently from a GGUF file. For the first two, llama.cpp's tokens equal ours."""
SENTENCES = ["the quick brown fox", "every good boy", "rain falls on the hills", "seven small stones",
"open the red door",
             "cats sleep all day", "birds sing at dawn", "we walk to town"]  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_temperature",
        "description": "The temperature in a city now, in degrees Celsius.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def test_a_chat_ends_by_itself_and_goes_on(real, talker, record):
    talk = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
    first = talker.chat(talk, GREEDY)
    assert first.finish_reason == "stop" and "Paris" in first.text and "<|im_end|>" not in first.text
    talk += [first.message, {"role": "user", "content": "And of Italy?"}]
    second = talker.chat(talk, GREEDY)
    assert second.finish_reason == "stop" and "Rome" in second.text
    assert second.metrics.num_reused_tokens >= 16, "the first turn is not read again"
    record("Chat", "two turns", f"{as_code(first.text)}, {as_code(second.text)}")


def test_lists_of_words_as_json(real, talker, record):
    schema = {"type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}},
              "required": ["words"], "additionalProperties": False}  # fmt: skip
    ask = 'List the words of "{}" as JSON with the key "words".'.format
    with ThreadPoolExecutor(len(SENTENCES)) as pool:  # one batch, in which each gets the same text as in a batch of one
        answers = pool.map(lambda sentence: talker.chat(ask(sentence), GREEDY, json_schema=schema), SENTENCES)
    right = 0
    for sentence, answer in zip(SENTENCES, answers):
        if answer.finish_reason == "stop":
            found = json.loads(answer.text)
            assert answer.text.count("\n") < 4 * len(found["words"]) + 10, sentence
            right += found["words"] == sentence.split()
    record("JSON", "lists of words that are right", f"{right} of {len(SENTENCES)}")
    assert right >= (len(SENTENCES) - 1 if real.name == "qwen-coder" else 0)


def test_a_tool_is_called_once_and_its_result_is_used(real, talker, record):
    if real.name == "smollm2":
        pytest.skip("SmolLM2 was not trained on tools")
    talk = [{"role": "user", "content": "How warm is it in Oslo right now?"}]
    for choice in ("auto", "required"):
        asked = talker.chat(talk, GREEDY, tools=[WEATHER], tool_choice=choice)
        [call] = asked.tool_calls
        assert asked.finish_reason == "tool_calls" and call.name == "get_temperature"
        assert "Oslo" in json.loads(call.arguments)["city"]
    result = {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": '{"celsius": -3}'}
    answer = talker.chat([*talk, asked.message, result], GREEDY, tools=[WEATHER])
    assert answer.finish_reason == "stop" and "3" in answer.text and not answer.tool_calls
    record("Tools", "text after the result", as_code(answer.text))


def test_a_session_is_the_same_text_as_generate(real, model):
    ids = model.tokenizer(PROMPT)["input_ids"]
    [expected] = model.generate(ids, GREEDY, max_new_tokens=12).generated_token_ids
    with model.session() as session:
        logits, found = session.append(ids), []
        for _ in range(12):
            found.append(int(logits.argmax()))
            logits = session.append([found[-1]])
    assert found[: len(expected)] == expected


@pytest.mark.thorough
def test_drafts_by_lookup_change_nothing_but_the_time(real, model, record):
    page = (Path(__file__).parent / "pages" / "code.txt").read_text(encoding="utf-8")
    text = f"{page[:1200]}\n\n# The same once more:\n{page[:200]}"
    config = SamplingConfig(do_sample=False, max_new_tokens=96, ignore_eos=True)
    plain = model.generate(text, config)
    spec = PromptLookupConfig()
    with LLMModel(real.path, spec_config=spec, progress=False, max_seq_len=2048) as drafting:
        drafted = drafting.generate(text, config)
    assert drafted.generated_token_ids == plain.generated_token_ids
    accepted = drafted.metrics.num_accepted_tokens
    record("Drafts by look-up", "copying a page", f"{accepted} of 96 tokens drafted right")
    assert accepted > 0


def test_what_a_person_would_ask(real, talker, record):
    """The number of right answers depends on the model, so it is only recorded. A crash or an empty answer fails."""
    if real.name != "qwen-coder":
        pytest.skip("the questions are for a model of 1.5 billion weights")
    right = 0
    for question, accepted in QUESTIONS:
        answer = talker.chat(f"{question} Answer with one word or number.", GREEDY, max_new_tokens=40)
        assert answer.text.strip()
        right += any(word.lower() in answer.text.lower() for word in accepted)
    record("Questions", "answered right", f"{right} of {len(QUESTIONS)}")


@pytest.mark.thorough
@pytest.mark.alone  # it measures a process
def test_opening(real, record, tmp_path):
    """The memory of a whole command stays within its bound, with and without a packed copy. Its time is recorded."""
    command, size = generate(real.path), real.path.stat().st_size
    runs = {"without a copy": [run(command), run(command)], "first": [run(command, tmp_path)]}
    runs["later"] = [run(command, tmp_path)]
    found = {name: (min(one for one, _ in pairs), max(peak for _, peak in pairs)) for name, pairs in runs.items()}
    seconds = ", ".join(f"{name} {seconds:.1f} s" for name, (seconds, _) in found.items())
    memory = " / ".join(f"{peak / 2**20:.0f}" for _, peak in found.values())
    what = f"a command of {NUM_TOKENS} tokens, file of {size / 2**20:.0f} MB"
    record("Opening", what, f"{seconds}; {memory} MB")
    peak, allowed = max(peak for _, peak in found.values()), 1.1 * size + 300e6
    assert peak < allowed, found


@pytest.mark.thorough
def test_the_vocabulary_is_that_of_transformers(real, model):
    """transformers reads the file with the gguf package, which takes a minute for large vocabularies."""
    pytest.importorskip("gguf")
    from transformers import AutoTokenizer

    differs = TRANSFORMERS_DIFFERS.get(real.name, {})
    theirs = AutoTokenizer.from_pretrained(str(real.path.parent), gguf_file=real.path.name)
    for text in ODD_TEXTS:
        ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (ids == theirs(text, add_special_tokens=False)["input_ids"]) == (text not in differs), text
        assert model.tokenizer.decode(ids) == theirs.decode(ids), text
