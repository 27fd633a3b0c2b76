"""Default sampling settings are the same for Python, the command line and the server."""

from __future__ import annotations

import json
import shutil

import pytest

from pace.assets import TINY
from pace.llm import LLMModel, SamplingConfig
from pace.llm.defaults import CHAT, with_defaults
from pace.server.limits import Limits
from pace.server.schemas.chat import ChatRequest
from pace.server.schemas.completions import CompletionsRequest
from pace.server.schemas.messages import MessagesRequest
from pace.server.schemas.responses import ResponsesRequest

GREEDY = None
NO_DRAW = "{} set, but without effect: decoding is greedy; add do_sample=True, or a temperature above 0"
HI = [{"role": "user", "content": "hi"}]
CHATS = (
    ChatRequest(messages=HI),
    MessagesRequest(model="m", messages=HI, max_tokens=5),
    ResponsesRequest(input="hi"),
)


def drawn(config: SamplingConfig):
    """Returns temperature, top_p and top_k if the config samples, else GREEDY."""
    return (config.temperature, config.top_p, config.top_k) if config.do_sample else GREEDY


@pytest.mark.parametrize(
    ("checkpoint", "in_text", "in_chat"),
    [
        ({}, GREEDY, (0.7, 0.9, 0)),
        ({"eos_token_id": 5, "repetition_penalty": 1.1}, GREEDY, (0.7, 0.9, 0)),
        ({"do_sample": False}, GREEDY, GREEDY),
        ({"do_sample": False, "temperature": 0.6}, GREEDY, GREEDY),
        ({"do_sample": True}, (1.0, 1.0, 50), (1.0, 1.0, 0)),
        ({"do_sample": True, "top_k": 64, "top_p": 0.95}, (1.0, 0.95, 64), (1.0, 0.95, 64)),
        ({"do_sample": True, "temperature": 0.0}, GREEDY, GREEDY),
        ({"temperature": 0.6, "top_p": 0.8}, (0.6, 0.8, 50), (0.6, 0.8, 0)),
        ({"temperature": 0.0}, GREEDY, GREEDY),
        ({"top_p": 1.0}, GREEDY, (0.7, 1.0, 0)),
    ],
)
def test_what_the_checkpoint_says_decides(checkpoint, in_text, in_chat):
    of_file = SamplingConfig.from_dict(checkpoint)
    assert drawn(with_defaults(SamplingConfig(), of_file)) == in_text
    assert drawn(with_defaults(SamplingConfig(), of_file, is_chat=True)) == in_chat
    for request in CHATS:
        assert drawn(request.to_job(Limits(), of_file).sampling) == in_chat, type(request)
    over_http = in_text and (*in_text[:2], of_file.top_k if "top_k" in checkpoint else 0)
    assert drawn(CompletionsRequest(prompt="hi").to_job(Limits(), of_file).sampling) == over_http


@pytest.mark.parametrize(
    ("asked", "draws"),
    [({"temperature": 0.7}, True), ({"temperature": 1.0}, True), ({"top_p": 0.9}, True), ({"top_k": 5}, True),
     ({"min_p": 0.1}, True), ({"typical_p": 0.5}, True), ({"do_sample": True}, True), ({"temperature": 0}, False),
     ({"temperature": 0.7, "do_sample": False}, False), ({"temperature": 0, "top_p": 0.5}, False)],
)  # fmt: skip
@pytest.mark.parametrize("checkpoint", [{}, {"do_sample": False}, {"do_sample": True, "temperature": 0.6}])
def test_what_the_caller_says_beats_it(asked, draws, checkpoint, caplog):
    config = SamplingConfig(**asked)
    for is_chat in (False, True):
        merged = with_defaults(config, SamplingConfig.from_dict(checkpoint), is_chat)
        caplog.clear()
        merged.check_consistent(config.explicit_fields)
        idle = [] if draws else [name for name in asked if name != "do_sample" and asked[name]]
        assert merged.do_sample is draws
        assert [record.message for record in caplog.records] == [NO_DRAW.format(", ".join(idle)) for _ in idle[:1]]
        assert all(getattr(merged, name) == value for name, value in asked.items() if name != "do_sample")
    assert config == SamplingConfig(**asked)


@pytest.mark.parametrize("checkpoint", [{}, {"do_sample": False}])
def test_other_words_are_neither(checkpoint):
    """A disabled filter, a penalty or a length does not turn on sampling."""
    of_file = SamplingConfig.from_dict(checkpoint)
    for fields in ({"top_k": 0}, {"top_p": 1.0}, {"min_p": 0.0}, {"max_new_tokens": 3, "presence_penalty": 0.5}):
        assert drawn(with_defaults(SamplingConfig(**fields), of_file)) == GREEDY


@pytest.fixture(scope="module")
def silent(tmp_path_factory) -> LLMModel:
    """Returns the bundled model without `do_sample` in its generation_config.json."""
    home = tmp_path_factory.mktemp("silent") / "model"
    shutil.copytree(TINY, home)
    fields = json.loads((home / "generation_config.json").read_text())
    del fields["do_sample"]
    (home / "generation_config.json").write_text(json.dumps(fields))
    return LLMModel(home, progress=False)


def test_a_temperature_samples_without_a_second_switch(silent):
    prompt, fields = "Once upon a time", {"max_new_tokens": 12, "seed": 3}
    greedy = silent.generate(prompt, **fields).texts
    warm = silent.generate(prompt, temperature=1.5, **fields).texts
    assert warm == silent.generate(prompt, temperature=1.5, do_sample=True, **fields).texts != greedy
    assert silent.generate(prompt, temperature=0, **fields).texts == greedy
    assert silent.generate(prompt, temperature=1.5, do_sample=False, **fields).texts == greedy


def test_beams_look_for_the_most_likely_answer():
    assert drawn(with_defaults(SamplingConfig(num_beams=2), SamplingConfig(), is_chat=True)) == GREEDY


def test_greedy_clients_of_the_server_may_send_a_seed_and_filters(caplog):
    greedy = {"messages": HI, "temperature": 0, "top_p": 0.9, "top_k": 3}
    for request in (ChatRequest(**greedy, seed=3), MessagesRequest(**greedy, model="m", max_tokens=5, seed=3)):
        request.to_job(Limits(), SamplingConfig()).sampling.check_consistent()
    assert not caplog.records


def test_chats_are_sampled_by_default(silent):
    story, fields = "Tell me a story about a dog.", {"max_new_tokens": 24}
    told = {silent.chat(story, seed=seed, **fields).text for seed in range(3)}
    assert len(told) > 1
    assert silent.chat(story, seed=1, **fields).text == silent.chat(story, CHAT, seed=1, **fields).text
    assert len({silent.chat(story, seed=seed, temperature=0, **fields).text for seed in range(3)}) == 1


def test_a_chat_goes_on_to_its_end_or_the_context():
    with LLMModel(TINY, progress=False, max_seq_len=400) as model:
        answer = model.chat("Tell me a story.", ignore_eos=True)
        metrics = answer.metrics
        assert answer.finish_reason == "length" and metrics.num_prompt_tokens + metrics.num_generated_tokens == 400
        assert model.chat("Tell me a story.", ignore_eos=True, max_new_tokens=5).metrics.num_generated_tokens == 5
        assert len(model.generate("Once upon a time", ignore_eos=True).generated_token_ids[0]) == 256
