"""LLMModel on real files: the text of transformers, every kind of input, every streamer, and refusals that teach."""

from __future__ import annotations

import functools
import io
import itertools
import queue
import shutil
import threading

import numpy as np
import pytest
import torch
from transformers import TextIteratorStreamer
from transformers import TextStreamer as HFTextStreamer

from pace.checkpoints.reader import CheckpointReader
from pace.llm import BaseStreamer, CallbackStreamer, GenerateOutput, LLMModel, SamplingConfig, TextStreamer
from pace.llm.decoding.sampler import draw, uniform
from pace.llm.models import model_utils
from tests.llm.generators import check_idle
from tests.llm.models.variants import FAMILIES, IN_TRANSFORMERS
from tests.support import backends

BACKENDS = [{"reference": "torch"}.get(name, name) for name in backends()]
GREEDY = SamplingConfig(max_new_tokens=20, ignore_eos=True)


@pytest.fixture(params=BACKENDS)
def backend(request) -> str:
    return request.param


@functools.cache
def load(folder, backend: str) -> LLMModel:
    return LLMModel(folder, dtype=torch.float32, backend=backend, progress=False)


@pytest.fixture
def model(checkpoint, backend) -> LLMModel:
    return load(checkpoint("llama")[0], backend)


def random_ids(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(2, 280, shape, generator=torch.Generator().manual_seed(seed))


def theirs(model, ids: torch.Tensor, num_tokens: int) -> list[int]:
    """Greedy tokens of transformers."""
    with torch.no_grad():
        out = model.generate(
            ids[None],
            attention_mask=torch.ones_like(ids[None]),
            max_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[0, len(ids) :].tolist()


# -- against transformers
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_64_greedy_tokens_are_those_of_transformers(checkpoint, backend: str, family: str) -> None:
    folder, oracle, tokenizer = checkpoint(family)
    prompts = [random_ids(seed, length) for seed, length in enumerate((1, 5, 33, 70))]
    out = load(folder, backend).generate([prompt.tolist() for prompt in prompts], SamplingConfig(max_new_tokens=64))
    assert out.generated_token_ids == [theirs(oracle, prompt, 64) for prompt in prompts]
    assert out.texts == [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in out.generated_token_ids]


@pytest.mark.parametrize("family", IN_TRANSFORMERS)
def test_sampled_text_is_that_of_transformers_drawing_with_our_numbers(
    checkpoint, backend: str, family: str, monkeypatch
) -> None:
    """Processors and filters by themselves are compared in test_logits.py; here with each model's logits, and in their
    order."""
    folder, oracle, _ = checkpoint(family)
    everything = {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 3,
        "bad_words_ids": [[7], [9, 11]],
        "min_new_tokens": 6,
        "eos_token_id": list(range(90)),
    }
    filters = [
        {"temperature": 0.7, "top_k": 20},
        {"top_p": 0.8, "top_k": 0},
        {"min_p": 0.03, "typical_p": 0.8},
        {"temperature": 1.5, "top_p": 0.9, **everything},
    ]
    for seed, fields in enumerate(filters):
        fields = {"do_sample": True, "max_new_tokens": 24, **fields}
        numbers = map(uniform, itertools.repeat(seed), itertools.count())
        monkeypatch.setattr(
            torch, "multinomial", lambda weights, num_samples: torch.tensor([[draw(weights[0], next(numbers))]])
        )
        prompt = random_ids(seed, 30)
        with torch.no_grad():
            expected = oracle.generate(
                prompt[None],
                attention_mask=torch.ones_like(prompt[None]),
                pad_token_id=0,
                **{"eos_token_id": None, **fields},
            )
        config = SamplingConfig(seed=seed, ignore_eos="eos_token_id" not in fields, **fields)
        assert load(folder, backend).generate(prompt, config).output_token_ids.tolist() == expected.tolist()
        assert next(numbers) == uniform(seed, expected.shape[1] - 30), "one number for each token"


@pytest.mark.parametrize("count", [2, 17, 33])
def test_ragged_batches_are_the_singles(model: LLMModel, backend: str, count: int) -> None:
    prompts = [random_ids(index, 1 + index * 7 % 41).tolist() for index in range(count)]
    for config in (
        SamplingConfig(max_new_tokens=12),
        SamplingConfig(max_new_tokens=12, do_sample=True, seed=5, top_p=0.9, logprobs=2),
    ):
        together = model.generate(prompts, config)
        singles = [model.generate(prompt, config) for prompt in prompts]
        assert together.generated_token_ids == [single.generated_token_ids[0] for single in singles]
        if (
            config.logprobs is not None and backend == "native"
        ):  # plain torch sums in an order that depends on the batch
            assert together.logprobs == [single.logprobs[0] for single in singles], "bit by bit"


def test_threads_share_a_model(model: LLMModel) -> None:
    prompts = [random_ids(index, 20 + index).tolist() for index in range(4)]
    expected = [model.generate(prompt, GREEDY).generated_token_ids for prompt in prompts]
    results: dict[int, list] = {}
    threads = [
        threading.Thread(target=lambda i=i: results.update({i: model.generate(prompts[i], GREEDY).generated_token_ids}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [results[index] for index in range(4)] == expected


# -- inputs
# -------------------------------------------------------------------------------------------------------------


def test_every_kind_of_input_is_the_same_prompt(model: LLMModel) -> None:
    text = "Once upon a time"
    ids = model.tokenizer(text)["input_ids"]
    kinds = [
        text,
        [text],
        ids,
        tuple(ids),
        [ids],
        torch.tensor(ids),
        torch.tensor([ids]),
        torch.tensor(ids, dtype=torch.int32),
        np.array([ids]),
    ]
    kinds += [[torch.tensor(ids)], [np.array(ids)], list(np.array(ids)), list(torch.tensor(ids))]
    kinds += [
        {"input_ids": [ids], "attention_mask": mask}
        for mask in (torch.ones(1, len(ids)), np.ones((1, len(ids))), [torch.ones(len(ids))])
    ]
    kinds += [
        model.tokenizer(text),
        model.tokenizer([text]),
        model.tokenizer(text, return_tensors="pt"),
        {"input_ids": torch.tensor([ids])},
    ]
    expected = model.generate(text, GREEDY).generated_token_ids
    for kind in kinds:
        out = model.generate(kind, GREEDY)
        assert out.generated_token_ids == expected
        assert out.output_token_ids.tolist() == [ids + expected[0]] and out.output_token_ids.dtype == torch.int64


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_seen_through_and_given_back(model: LLMModel, side: str, monkeypatch) -> None:
    texts = ["Once upon a time there", "fox", "the café"]
    monkeypatch.setattr(model.tokenizer, "padding_side", side)  # other tests share the model
    batch = model.tokenizer(texts, padding=True, return_tensors="pt")
    out = model.generate(batch, GREEDY)
    singles = [model.generate(text, GREEDY).generated_token_ids[0] for text in texts]
    assert out.generated_token_ids == singles
    width = batch["input_ids"].shape[1]
    assert torch.equal(out.output_token_ids[:, :width], batch["input_ids"])
    assert out.output_token_ids[:, width:].tolist() == singles
    lists = model.generate(
        {"input_ids": batch["input_ids"].tolist(), "attention_mask": batch["attention_mask"].tolist()}, GREEDY
    )
    assert torch.equal(lists.output_token_ids, out.output_token_ids)


def test_ragged_prompts_are_padded_left_and_outputs_right(model: LLMModel) -> None:
    first = model.generate([5, 6, 7], GREEDY).generated_token_ids[0]
    config = SamplingConfig(max_new_tokens=20, eos_token_id=first[3], pad_token_id=2)
    out = model.generate([[5, 6, 7], [9]], config)
    cut = first[: first.index(first[3]) + 1]
    assert out.generated_token_ids[0] == cut and out.finish_reasons[0] == "stop"
    rows = out.output_token_ids.tolist()
    longest = max(map(len, out.generated_token_ids))
    assert rows[0] == [5, 6, 7] + cut + [2] * (longest - len(cut))
    assert rows[1][:3] == [2, 2, 9]


BAD_INPUTS = [
    ([], ValueError, "empty list"),
    ([[]], ValueError, "prompt 0 is empty"),
    ([[5], []], ValueError, "prompt 1 is empty"),
    ("", ValueError, "empty"),
    (torch.empty(0, dtype=torch.int64), ValueError, "no token"),
    (torch.empty(2, 0, dtype=torch.int64), ValueError, "no token"),
    (torch.ones(2, 2, 2, dtype=torch.int64), ValueError, r"\[S\] or \[B, S\]"),
    (torch.ones(3), TypeError, "integers"),
    (torch.ones(3, dtype=torch.bool), TypeError, "integers"),
    ([1.5, 2.0], TypeError, "item 0"),
    ([5, "a"], TypeError, "item 0|item 1"),
    ([True, False], TypeError, "item 0"),
    ([-1], ValueError, "token id -1"),
    ([[5], [100_000]], ValueError, "prompt 1 holds the token id 100000"),
    (5, TypeError, "inputs must be"),
    (None, TypeError, "inputs must be"),
    ({"ids": [1]}, ValueError, "input_ids"),
    ({"input_ids": [1], "labels": [1]}, ValueError, "labels"),
    (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.ones(1, 2)},
        ValueError,
        "attention_mask",
    ),
    (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.tensor([[1, 0, 1]])},
        ValueError,
        "hole",
    ),
    (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.tensor([[0, 0, 0]])},
        ValueError,
        "all 0",
    ),
    (
        {"input_ids": torch.ones(1, 3, dtype=torch.int64), "attention_mask": torch.tensor([[0, 2, 1]])},
        ValueError,
        "0 and 1",
    ),
    ({"input_ids": [[1, 2]], "attention_mask": [[1]]}, ValueError, "attention_mask"),
    ({"input_ids": [[1, 2]], "attention_mask": []}, ValueError, "attention_mask"),
    ({"input_ids": [[1, 2]], "attention_mask": 1}, TypeError, "attention_mask"),
    ({"input_ids": None}, TypeError, "input_ids must be"),
    ({"input_ids": "abc"}, TypeError, "input_ids must be"),
    ({"input_ids": ["abc"]}, TypeError, "input_ids must be"),
    (np.array(["abc"]), TypeError, "inputs must be"),
    ([np.array([1.0])], TypeError, "item 0"),
    ("half a \ud83d", ValueError, "half a character"),
    ([1] * 256, ValueError, "256 tokens"),
]


@pytest.mark.parametrize("inputs, error, message", BAD_INPUTS)
def test_bad_inputs_are_told(checkpoint, inputs, error: type[Exception], message: str) -> None:
    model = load(checkpoint("llama")[0], "torch")
    with pytest.raises(error, match=message):
        model.generate(inputs, GREEDY)


@pytest.mark.parametrize(
    "fields, message",
    [
        (dict(logit_bias={900: 1.0}), "logit_bias"),
        (dict(bad_words_ids=[[900]]), "bad_words"),
        (dict(eos_token_id=900), "eos"),
        (dict(logprobs=900), "logprobs"),
    ],
)
def test_tokens_beyond_the_vocabulary_are_told(checkpoint, fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(checkpoint("llama")[0], "torch").generate([1], SamplingConfig(**fields))


def test_a_config_must_be_one(checkpoint) -> None:
    with pytest.raises(TypeError, match="SamplingConfig"):
        load(checkpoint("llama")[0], "torch").generate([1], {"max_new_tokens": 3})


# -- lengths and stops
# ----------------------------------------------------------------------------------------------------


def test_the_context_ends_a_generation(model: LLMModel) -> None:
    out = model.generate([5] * 250, SamplingConfig(max_new_tokens=50, ignore_eos=True))
    assert len(out.generated_token_ids[0]) == 6 and out.finish_reasons == ["length"]
    out = model.generate([5] * 10, SamplingConfig(ignore_eos=True))
    assert out.output_token_ids.shape == (1, 256), "unset: 256 new tokens, or what the context holds"
    assert model.generate([5] * 10, SamplingConfig(max_length=12, ignore_eos=True)).output_token_ids.shape == (1, 12)


def test_stop_strings_end_and_trim_the_text(model: LLMModel) -> None:
    full = model.generate([7, 8], SamplingConfig(max_new_tokens=60, ignore_eos=True))
    text = full.texts[0]
    clean = [
        index
        for index in range(8, len(text) - 4)
        if "\ufffd" not in text[index : index + 3] and text.index(text[index : index + 3]) == index
    ]
    for index in clean[:3] + clean[-3:]:
        stop = text[index : index + 3]
        config = SamplingConfig(max_new_tokens=60, ignore_eos=True, stop_strings=[stop])
        out = model.generate([7, 8], config)
        assert out.texts == [text[:index]] and out.finish_reasons == ["stop"]
        assert full.generated_token_ids[0][: len(out.generated_token_ids[0])] == out.generated_token_ids[0]
        assert stop in model.tokenizer.decode(out.generated_token_ids[0]) and stop not in model.tokenizer.decode(
            out.generated_token_ids[0][:-1]
        )
        assert "".join(model.stream([7, 8], config)) == text[:index]
    assert clean, "the random model says something that can be a stop string"


def test_min_new_tokens_postpones_the_end(model: LLMModel) -> None:
    end = model.generate([5], GREEDY).generated_token_ids[0][0]
    assert len(model.generate([5], SamplingConfig(eos_token_id=end, max_new_tokens=9)).generated_token_ids[0]) == 1
    out = model.generate([5], SamplingConfig(eos_token_id=end, min_new_tokens=4, max_new_tokens=9))
    assert end not in out.generated_token_ids[0][:4]


def test_metrics_count(model: LLMModel) -> None:
    metrics = model.generate([[5, 6, 7], [8]], GREEDY).metrics
    assert (metrics.num_prompt_tokens, metrics.num_generated_tokens, metrics.num_drafted_tokens) == (4, 40, 0)
    assert 0 < metrics.seconds_to_first_token < metrics.total_seconds
    assert metrics.prefill_tokens_per_second > 0 and metrics.decode_tokens_per_second > 0


def test_the_files_defaults_hold_unless_the_caller_says_otherwise(checkpoint, tmp_path) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(checkpoint("llama")[0], folder)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 3, "eos_token_id": 1, "pad_token_id": 4}')
    model = LLMModel(folder, dtype="fp32", backend="torch", progress=False)
    assert len(model.generate([5], SamplingConfig(ignore_eos=True)).generated_token_ids[0]) == 3
    assert len(model.generate([5], SamplingConfig(ignore_eos=True, max_new_tokens=5)).generated_token_ids[0]) == 5
    assert model.generate([[5, 6], [7]], GREEDY).output_token_ids[1, 0] == 4


# -- streamers
# --------------------------------------------------------------------------------------------------------------


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
    out = model.generate(
        "Once upon", GREEDY, streamer=HFTextStreamer(model.tokenizer, skip_prompt=True, skip_special_tokens=True)
    )
    assert capsys.readouterr().out == out.texts[0] + "\n"
    streamer = TextIteratorStreamer(model.tokenizer, timeout=30, skip_special_tokens=True)
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
    streamer = TextIteratorStreamer(model.tokenizer, timeout=20)
    with pytest.raises(ValueError, match=message):
        model.generate(inputs, config, streamer)
    try:
        list(streamer)
    except queue.Empty:
        pytest.fail("the reader waits for an end that does not come")


# -- the model itself
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, error, word",
    [
        (dict(kv_cache_type="ring"), ValueError, "kv_cache_type"),
        (dict(spec_config={}), TypeError, "spec_config"),
        (dict(quantization="int3"), ValueError, "int3"),
        (dict(backend="cuda"), ValueError, "backend"),
        (dict(dtype="int3"), ValueError, "dtype"),
        (dict(max_seq_len=100_000), ValueError, "max_seq_len"),
        (dict(max_seq_len=0), ValueError, "max_seq_len"),
        (dict(max_seq_len=True), TypeError, "max_seq_len"),
        (dict(num_threads=0), ValueError, "num_threads"),
        (dict(tokenizer_name_or_path="/nowhere/at/all"), FileNotFoundError, "nowhere"),
    ],
)
def test_what_is_not_there_is_refused(checkpoint, arguments: dict, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        LLMModel(checkpoint("llama")[0], **{"backend": "torch", "progress": False, **arguments})


def test_max_seq_len_bounds_a_sequence(checkpoint) -> None:
    model = LLMModel(checkpoint("llama")[0], max_seq_len=20, dtype="fp32", backend="torch", progress=False)
    assert model.generate([5], GREEDY).output_token_ids.shape == (1, 20)
    with pytest.raises(ValueError, match="20"):
        model.generate([5] * 20, GREEDY)


@pytest.mark.parametrize(
    ("name", "content", "arguments", "error"),
    [
        ("generation_config.json", '{"temperature": -1}', {}, ValueError),
        ("tokenizer.json", "{", {}, ValueError),
        ("chat_template.json", "[]", {}, ValueError),
        ("unused", "", {"max_seq_len": 10**6}, ValueError),
        ("unused", "", {"num_threads": 0}, ValueError),
        ("unused", "", {"tokenizer_name_or_path": "./nowhere"}, FileNotFoundError),
    ],
)
def test_small_things_are_checked_before_weights_are_read(
    checkpoint, tmp_path, monkeypatch, name, content, arguments, error
) -> None:
    folder = shutil.copytree(checkpoint("llama")[0], tmp_path / "model")
    (folder / name).write_text(content)
    reads = []
    monkeypatch.setattr(
        model_utils, "CheckpointReader", lambda directory: reads.append(directory) or CheckpointReader(directory)
    )
    with pytest.raises(error):
        LLMModel(folder, progress=False, **arguments)
    assert not reads
    LLMModel(checkpoint("llama")[0], progress=False).close()
    assert reads


def test_a_model_without_a_tokenizer_takes_ids(checkpoint, tmp_path) -> None:
    import shutil

    for name in ("config.json", "model.safetensors"):
        shutil.copy(checkpoint("llama")[0] / name, tmp_path / name)
    model = LLMModel(tmp_path, dtype="fp32", backend="torch", progress=False)
    out = model.generate([5, 6], GREEDY)
    assert model.tokenizer is None and out.texts == [] and isinstance(out, GenerateOutput)
    with pytest.raises(ValueError, match="no tokenizer"):
        model.generate("text")
    with pytest.raises(ValueError, match="tokenizer"):
        model.stream([5])
    with pytest.raises(ValueError, match="stop_strings"):
        model.generate([5], SamplingConfig(stop_strings="x"))
    other = LLMModel(
        tmp_path, tokenizer_name_or_path=checkpoint("llama")[0], dtype="fp32", backend="torch", progress=False
    )
    assert other.generate("fox", GREEDY).texts


def test_close_frees_and_tells(checkpoint) -> None:
    with LLMModel(checkpoint("llama")[0], dtype="fp32", backend="torch", progress=False) as model:
        report = model.memory_report()
        assert report.total == sum(report.weights.values()) + report.cache_touched > 0 and report.process > report.total
        assert "weights" in str(report)
        assert model.get_tokenizer() is model.tokenizer and model.get_config() is model.config
    for call in (lambda: model.generate([5]), model.session, model.memory_report, lambda: model.score([5])):
        with pytest.raises(ValueError, match="closed"):
            call()
