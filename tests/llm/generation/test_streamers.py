"""Streamers: ours, those of transformers, callbacks, and streams that are left early."""

from __future__ import annotations

import io
import queue
import threading

import pytest
import torch
from transformers import TextIteratorStreamer
from transformers import TextStreamer as HFTextStreamer

from pace.llm import BaseStreamer, CallbackStreamer, LLMModel, SamplingConfig, TextStreamer
from tests.llm.generation.loaded import GREEDY, load
from tests.llm.generators import check_idle
from tests.waiting import PATIENCE


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
def test_streams_are_the_text(checkpoint, backend: str, kind: str) -> None:
    model = load(checkpoint("llama", kind)[0], backend)
    config = SamplingConfig(max_new_tokens=40, ignore_eos=True)
    text = model.generate("Once upon", config).texts[0]
    pieces = list(model.stream("Once upon", config))
    assert "".join(pieces) == text and len(pieces) > 3
    file = io.StringIO()
    model.generate("Once upon", config, streamer=TextStreamer(model.tokenizer, skip_prompt=True, file=file))
    assert file.getvalue() == text + "\n"
    file = io.StringIO()
    model.generate("Once upon", config, streamer=TextStreamer(model.tokenizer, file=file))
    assert file.getvalue() == "Once upon" + text + "\n"


def test_transformers_streamers_work_as_they_are(model: LLMModel, capsys) -> None:
    streamer = HFTextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    out = model.generate("Once upon", GREEDY, streamer=streamer)
    assert capsys.readouterr().out == out.texts[0] + "\n"
    streamer = TextIteratorStreamer(model.tokenizer, timeout=PATIENCE, skip_special_tokens=True)
    thread = threading.Thread(target=model.generate, args=("Once upon", GREEDY, streamer))
    thread.start()
    assert "".join(streamer) == model.tokenizer.decode(out.output_token_ids[0], skip_special_tokens=True)
    thread.join(60)


class Recorder:
    def __init__(self, fail_at: int | None = None) -> None:
        self.calls: list = []
        self.fail_at = fail_at

    def put(self, value: torch.Tensor) -> None:
        self.calls.append(value)
        if len(self.calls) == self.fail_at:
            raise RuntimeError("the streamer's own")

    def end(self) -> None:
        self.calls.append("end")


def test_a_streamer_gets_the_prompt_each_token_and_the_end(model: LLMModel) -> None:
    recorder = Recorder()
    out = model.generate([5, 6], GREEDY, streamer=recorder)
    assert recorder.calls[0].tolist() == [[5, 6]] and recorder.calls[-1] == "end"
    assert [call.tolist() for call in recorder.calls[1:-1]] == [[token] for token in out.generated_token_ids[0]]


@pytest.mark.parametrize("fail_at", [1, 2, 9])
def test_a_streamer_that_raises_ends_its_call_alone(model: LLMModel, fail_at: int) -> None:
    with pytest.raises(RuntimeError, match="streamer's own"):
        model.generate([5, 6], GREEDY, streamer=Recorder(fail_at))
    check_idle(model)
    assert len(model.generate([5, 6], GREEDY).generated_token_ids[0]) == 20


def test_one_sequence_streamers_refuse_batches(model: LLMModel) -> None:
    for streamer in (Recorder(), HFTextStreamer(model.tokenizer), TextStreamer(model.tokenizer, file=io.StringIO())):
        with pytest.raises(ValueError, match="CallbackStreamer"):
            model.generate([[5], [6]], GREEDY, streamer=streamer)
    with pytest.raises(TypeError, match="put"):
        model.generate([5], GREEDY, streamer=print)
    with pytest.raises(NotImplementedError, match="must define put"):
        model.generate([5], GREEDY, streamer=BaseStreamer())


def test_a_callback_streams_a_batch(model: LLMModel) -> None:
    events = []
    out = model.generate([[5, 6], [7]], GREEDY, streamer=CallbackStreamer(events.append, model.tokenizer))
    for row in range(2):
        mine = [event for event in events if event.row == row]
        assert [event.token for event in mine] == [*out.generated_token_ids[row], None]
        assert "".join(event.text for event in mine) == out.texts[row]
        assert mine[-1].finish_reason == out.finish_reasons[row]


@pytest.mark.parametrize("leave", [lambda stream: stream.close(), lambda stream: None], ids=["closed", "dropped"])
def test_a_stream_left_early_frees_its_blocks(model: LLMModel, leave) -> None:
    go_on = threading.Event()

    def slow(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert ids.shape[1] < 10 or go_on.wait(60)
        return logits

    stream = model.stream([5], SamplingConfig(max_new_tokens=50, ignore_eos=True, logits_processors=[slow]))
    next(stream)
    used = model.generator.engine.cache.used_bytes
    leave(stream)
    del stream
    go_on.set()
    assert used > 0
    check_idle(model)
    assert model.generator.engine.cache.used_bytes == 0


@pytest.mark.parametrize(
    "inputs, config, message",
    [
        ([5, 6], SamplingConfig(logits_processors=[lambda ids, logits: logits * float("nan")]), "no token is left"),
        ([5] * 1000, None, "shorten the text"),
        ([[5], [6]], None, "streams one sequence"),
    ],
    ids=["in the run", "before it", "a batch"],
)
def test_the_reader_of_a_streamer_is_released_when_generation_fails(
    model: LLMModel, inputs, config, message: str
) -> None:
    streamer = TextIteratorStreamer(model.tokenizer, timeout=PATIENCE)
    with pytest.raises(ValueError, match=message):
        model.generate(inputs, config, streamer)
    try:
        list(streamer)
    except queue.Empty:
        pytest.fail("the reader waits for an end that does not come")
