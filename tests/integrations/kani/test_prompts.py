"""Prompts: the same as with kani's own engine for transformers, and counted exactly."""

from __future__ import annotations

import pytest
import torch
from kani import AIFunction, ChatMessage, Kani, PromptPipeline, ReasoningPart
from kani.engines.huggingface import ChatTemplatePromptPipeline
from kani.models import MessagePart, ToolCall

from pace.assets import TINY
from pace.integrations.kani import PaceEngine
from pace.integrations.kani.messages import as_dict

CALL = ToolCall.from_function("get_weather", city="Rome")
CHAT = [
    ChatMessage.system("You are a helpful assistant."), ChatMessage.user("What is the weather in Rome?"),
    ChatMessage.assistant(None, tool_calls=[CALL]), ChatMessage.function("get_weather", "sunny", CALL.id),
    ChatMessage.assistant("It is sunny."), ChatMessage.user(["Thank ", "you."]),
]  # fmt: skip


def get_weather(city: str):
    """The weather in a city, now."""


FUNCTIONS = [AIFunction(get_weather)]


@pytest.mark.parametrize("functions", [None, FUNCTIONS])
def test_prompts_are_those_of_kanis_own_engine(engine, functions):
    """kani's pipeline gets no calls without functions: it would get their arguments as Python objects."""
    pipeline = ChatTemplatePromptPipeline(engine.tokenizer)
    for length in (2, len(CHAT)):
        assert engine.build_prompt(CHAT[:length], functions) == pipeline(CHAT[:length], functions)


@pytest.mark.parametrize("functions", [None, FUNCTIONS])
def test_the_length_is_that_of_what_the_model_reads(engine, run, functions):
    for length in (1, 2, 4, 6):
        completion = run(engine.predict(CHAT[:length], functions, max_tokens=1))
        assert engine.prompt_len(CHAT[:length], functions) == completion.prompt_tokens
    assert engine.prompt_len(CHAT, functions, max_tokens=5, temperature=0.3) == engine.prompt_len(CHAT, functions)


def test_a_prompt_is_tokenised_once(engine, run, monkeypatch):
    texts = []
    encode = engine._reader._encode
    monkeypatch.setattr(engine._reader, "_encode", lambda text: texts.append(text) or encode(text))
    chat = Kani(engine)
    for question in ("What is the capital of Japan?", "And of Spain?"):
        run(chat.chat_round(question, max_tokens=8))
    prompts = [text for text in texts if "<|user|>" in text]
    assert len(prompts) == len(set(prompts)) == 2


def test_what_is_remembered_is_bounded(engine, monkeypatch):
    from pace.integrations.kani import prompts

    monkeypatch.setattr(prompts, "MAX_TOKENS", 30)
    reader = engine._reader
    for text in [f"{number} and " * 4 for number in range(8)] + ["word " * 100]:
        tokens = engine.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert reader.read(text).tokens == reader.read(text).tokens == tokens
        assert sum(map(len, reader._known.values())) <= 30


def test_a_chat_that_is_far_too_long_is_not_rendered(engine, monkeypatch):
    """kani asks for the length again for each message that it may leave out."""
    chat = [ChatMessage.user("Tell me a story about a dog."), ChatMessage.assistant("Once upon a time. " * 40)] * 30
    monkeypatch.setattr(engine, "_template", None)
    assert engine.prompt_len(chat) > engine.max_context_size


def test_the_old_ways_to_count(engine):
    with pytest.warns(DeprecationWarning):
        assert engine.message_len(CHAT[0]) == engine.prompt_len(CHAT[:1])
    with pytest.warns(DeprecationWarning):
        assert engine.function_token_reserve(FUNCTIONS) > 3
    assert engine.token_reserve == 0


# -- prompts of others -------------------------------------------------------------------------------------------------


def test_a_pipeline_makes_the_prompt(make_engine, run):
    pipeline = (
        PromptPipeline()
        .wrap(role=ChatMessage.user("").role, prefix="Question: ", suffix="\nAnswer:")
        .conversation_fmt(user_prefix="", generation_suffix="")
    )
    engine = make_engine(prompt_pipeline=pipeline)
    messages = [ChatMessage.user("What is 8 + 9?")]
    text = "Question: What is 8 + 9?\nAnswer:"
    assert engine.build_prompt(messages) == text
    assert engine.prompt_len(messages) == len(engine.tokenizer(text, add_special_tokens=False)["input_ids"])
    assert run(engine.predict(messages, max_tokens=3)).completion_tokens == 3


@pytest.mark.parametrize("form", ["text", "list", "tensor", "row", "output"])
def test_subclasses_may_make_it_in_any_form(model, run, form):
    question = "<|user|>What is the capital of Japan?<|end|><|assistant|>"

    class Own(PaceEngine):
        def build_prompt(self, messages, functions=None):
            ids = self.tokenizer(question)["input_ids"]
            return {
                "text": question,
                "list": ids,
                "tensor": torch.tensor(ids),
                "row": torch.tensor([ids]),
                "output": self.tokenizer(question, return_tensors="pt"),
            }[form]

    engine = Own(model=model)
    completion = run(engine.predict([]))
    assert completion.message.text == "The capital of Japan is Tokyo."
    assert engine.prompt_len([]) == completion.prompt_tokens


def test_variables_of_the_template(make_engine):
    messages = [ChatMessage.user("Hello.")]
    text = make_engine(chat_template_kwargs={"add_generation_prompt": False}).build_prompt(messages)
    assert make_engine().build_prompt(messages) == text + "<|assistant|>"


def test_another_tokenizer(run):
    load = {"dtype": "float32", "progress": False}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = PaceEngine(TINY, model_load_kwargs=load, tokenizer_kwargs={"chat_template": template})
    assert engine.build_prompt([ChatMessage.user("1, 2, 3,")]) == "1, 2, 3,"
    assert run(engine.predict([ChatMessage.user("1, 2, 3, 4,")], max_tokens=4)).message.text.startswith("5")
    run(engine.close())


def test_a_tokenizer_without_a_template(model, monkeypatch):
    monkeypatch.setattr(model.tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template.*or give prompt_pipeline"):
        PaceEngine(model=model)
    engine = PaceEngine(model=model, prompt_pipeline=lambda messages, functions: messages[0].text)
    ids = model.tokenizer("Hello.", add_special_tokens=False)["input_ids"]
    assert engine.prompt_len([ChatMessage.user("Hello.")]) == len(ids)


# -- parts of messages -------------------------------------------------------------------------------------------------


def test_thoughts_stand_where_the_template_looks_for_them(make_engine, model, monkeypatch):
    message = ChatMessage.assistant([ReasoningPart(content="Let me see."), "It is 4."])
    assert as_dict(message, "thinking") == {"role": "assistant", "content": "It is 4.", "thinking": "Let me see."}
    assert as_dict(message, None) == {"role": "assistant", "content": "It is 4."}
    for place in ("message.reasoning_content", "message['thinking']"):
        template = "{% for message in messages %}{{ PLACE }}: {{ message.content }}{% endfor %}".replace("PLACE", place)
        monkeypatch.setattr(model.tokenizer, "chat_template", template)
        assert make_engine().build_prompt([message]) == "Let me see.: It is 4."
    template = "{% for message in messages %}{{ message.thoughts }}: {{ message.content }}{% endfor %}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    prompt = make_engine(chat_template_reasoning_content_key="thoughts").build_prompt([message])
    assert prompt == "Let me see.: It is 4."


class Doubled(MessagePart):
    content: str

    def __str__(self):
        return self.content * 2


def test_parts_say_what_they_are(engine):
    assert "<|user|>abab!<|end|>" in engine.build_prompt([ChatMessage.user([Doubled(content="ab"), "!"])])
