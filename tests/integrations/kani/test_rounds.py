"""Rounds of a chat: texts, streams, and their token counts and warnings."""

from __future__ import annotations

import json

import pytest
from kani import AIFunction, ChatMessage, ChatRole, Kani
from kani.exceptions import MessageTooLong, PromptTooLong

from pace.assets import TINY
from pace.integrations.kani import PaceEngine
from pace.llm import SamplingConfig

QUESTION, ANSWER = "What is the capital of Japan?", "The capital of Japan is Tokyo."
STORY = "Tell me a story about a dog."


def generated(model, messages, **options):
    """The model's output after a conversation, without kani."""
    ids = model.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return model.generate(ids, SamplingConfig(**{"max_length": 1024, **options}))


async def collected(stream):
    """The pieces of a stream, and its completion."""
    *pieces, completion = [item async for item in stream]
    assert all(isinstance(piece, str) and piece for piece in pieces)
    return pieces, completion


def test_a_round_is_the_models_own_text(engine, model, run):
    chat = Kani(engine, system_prompt="You are a helpful assistant.")
    assert run(chat.chat_round_str(QUESTION)) == ANSWER
    message = run(chat.chat_round(STORY))
    said = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": STORY},
    ]
    assert message.text == generated(model, said).texts[0].strip() and message.tool_calls is None
    assert [message.role for message in chat.chat_history] == [ChatRole.USER, ChatRole.ASSISTANT] * 2


def test_a_stream_is_the_text_in_pieces(engine, run):
    async def streamed():
        stream = Kani(engine).chat_round_stream(STORY)
        return [piece async for piece in stream], await stream.message()

    pieces, message = run(streamed())
    assert len(pieces) > 100 and "".join(pieces).strip() == message.text == run(Kani(engine).chat_round_str(STORY))


@pytest.mark.parametrize("options", [{}, {"max_new_tokens": 7}, {"stop": ["river"]}])
def test_usage_is_what_was_computed(engine, model, run, options):
    messages = [ChatMessage.user(STORY)]
    own = {"stop_strings": options["stop"]} if "stop" in options else options
    out = generated(model, [{"role": "user", "content": STORY}], **own)
    pieces, streamed = run(collected(engine.stream(messages, **options)))
    predicted = run(engine.predict(messages, **options))
    for completion in (streamed, predicted):
        assert completion.prompt_tokens == engine.prompt_len(messages) == out.metrics.num_prompt_tokens
        assert completion.completion_tokens == len(out.generated_token_ids[0])
        assert completion.message.text == out.texts[0].strip()
        assert completion.message.extra["pace"]["finish_reason"] == out.finish_reasons[0]
    assert "".join(pieces) == out.texts[0]


def test_statistics_say_what_was_reused_and_how_long_it_took(engine, run, tmp_path):
    chat = Kani(engine, system_prompt="You are a helpful assistant who likes to tell stories of animals.")
    run(chat.chat_round(STORY, max_tokens=30))
    run(chat.chat_round(QUESTION))
    first, second = (message.extra["pace"] for message in chat.chat_history[1::2])
    assert second["prompt_tokens"] > second["cached_prompt_tokens"] >= first["prompt_tokens"] + 30 - 16
    assert (first["finish_reason"], second["finish_reason"]) == ("length", "stop")
    assert first["forward_passes"] == first["completion_tokens"] == 30
    assert first["ttft_ms"] > 0 and first["tok_per_s"] > 0
    chat.save(tmp_path / "chat.json")
    other = Kani(engine)
    other.load(tmp_path / "chat.json")
    assert other.chat_history == chat.chat_history
    assert json.loads(json.dumps(first)) == first


def test_log_probabilities_come_with_the_message(engine, model, run):
    completion = run(engine.predict([ChatMessage.user(QUESTION)], logprobs=True, top_logprobs=2))
    out = generated(model, [{"role": "user", "content": QUESTION}], logprobs=2)
    told = completion.message.extra["pace"]["logprobs"]
    assert [entry["token"] for entry in told] == out.generated_token_ids[0]
    assert [entry["logprob"] for entry in told] == [entry.logprob for entry in out.logprobs[0]]


def test_a_prompt_that_is_too_long(engine, run):
    messages = [ChatMessage.user("1, 2, 3, " * 400)]
    assert engine.prompt_len(messages) > engine.max_context_size
    with pytest.raises(PromptTooLong, match="and the context 1024"):
        run(engine.predict(messages))
    with pytest.raises(PromptTooLong):
        run(collected(engine.stream(messages)))


def test_what_no_prompt_has_room_for_is_one_error(engine, run, caplog):
    """kani asks for the length of a prompt without messages before it reports which part is too long."""
    with pytest.raises(MessageTooLong):
        run(Kani(engine).chat_round("x " * 3000))
    schema = {"type": "object", "properties": {}}
    functions = [AIFunction(lambda: "5", name=f"count_{i}", desc="Counts.", json_schema=schema) for i in range(300)]
    assert engine.prompt_len([]) == 0 and engine.prompt_len([], functions) > 1024
    with pytest.raises(PromptTooLong, match="number of functions"):
        run(Kani(engine, functions=functions, chat_history=[ChatMessage.user("Hi.")]).get_prompt())
    assert not caplog.records


def test_an_answer_ends_with_the_context(make_engine, run):
    engine = make_engine(max_context_size=64)
    assert engine.max_context_size == 64
    completion = run(engine.predict([ChatMessage.user(STORY)]))
    assert completion.prompt_tokens + completion.completion_tokens == 64
    assert completion.message.extra["pace"]["finish_reason"] == "length"


def test_old_messages_are_left_out_where_a_chat_is_long(make_engine, run):
    chat = Kani(make_engine(max_context_size=200), desired_response_tokens=40)
    for _ in range(8):
        run(chat.chat_round(STORY, max_tokens=30))
    sizes = [message.extra["pace"]["prompt_tokens"] for message in chat.chat_history[1::2]]
    assert max(sizes) <= 160 and sizes[-1] > 60 and len(chat.chat_history) == 16


def test_beams(engine, model, run):
    messages = [ChatMessage.user(STORY)]
    out = generated(model, [{"role": "user", "content": STORY}], num_beams=3, max_new_tokens=20)
    assert out.texts != generated(model, [{"role": "user", "content": STORY}], max_new_tokens=20).texts
    pieces, completion = run(collected(engine.stream(messages, num_beams=3, max_new_tokens=20)))
    assert "".join(pieces) == out.texts[0] and completion.completion_tokens == len(out.generated_token_ids[0])


def test_a_model_that_is_loaded_here(run):
    engine = PaceEngine(TINY, model_load_kwargs={"torch_dtype": "float32", "device_map": "auto", "progress": False})
    assert run(Kani(engine).chat_round_str(QUESTION)) == ANSWER
    assert str(TINY) in repr(engine) and "LLMModel" not in repr(engine)
    run(engine.close())
    run(engine.close())
    for model in (engine.model, engine):
        with pytest.raises(ValueError, match="closed"):
            run(engine.predict([ChatMessage.user(QUESTION)])) if model is engine else model.generate("a")


def test_a_model_of_others_stays_open(engine, model, run):
    run(engine.close())
    run(engine.close())
    with pytest.raises(ValueError, match="this engine is closed"):
        run(engine.predict([ChatMessage.user(QUESTION)]))
    assert model.generate("a", SamplingConfig(max_new_tokens=1)).texts


def test_arguments_that_cannot_be(model):
    with pytest.raises(TypeError, match="give model_id"):
        PaceEngine()
    with pytest.raises(TypeError, match="is already loaded"):
        PaceEngine(model=model, model_load_kwargs={"dtype": "float32"})
    with pytest.raises(ValueError, match="on the CPU"):
        PaceEngine(TINY, device="cuda")
    with pytest.raises(ValueError, match="on the CPU"):
        PaceEngine(TINY, model_load_kwargs={"device_map": {"": 0}})
    with pytest.raises(TypeError, match="no_such_thing"):
        PaceEngine(TINY, model_load_kwargs={"no_such_thing": 1})
    with pytest.raises(ValueError, match="no format of tool calls"):
        PaceEngine(model=model, parser="no such")
    with pytest.raises(ValueError, match="max_concurrency"):
        PaceEngine(model=model, max_concurrency=0)
    for size in (-1, 1, "1024"):
        with pytest.raises(ValueError, match="max_context_size must be an int of at least 2"):
            PaceEngine(model=model, max_context_size=size)
    with pytest.raises(TypeError, match="prompt_pipeline must be a PromptPipeline or a function; got 5"):
        PaceEngine(model=model, prompt_pipeline=5)


def test_a_context_larger_than_the_models_is_cut_and_told_of(make_engine, caplog):
    engine = make_engine(max_context_size=4096)
    assert engine.max_context_size == 1024 and "max_context_size is reduced from 4096 to 1024" in caplog.text
