"""A model that reads images, in a separate process: `python -m benchmarks.image_costs.worker pace` or `llama.cpp`. Its
other end is `Worker` of `benchmarks.comparison`."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.comparison.worker import serve

QUESTION = " What is shown here? Answer in a few words."
CONTEXT = 4096
"""Tokens of a prompt and its answer."""
MICRO_BATCH = 512
"""llama.cpp's default: tokens of a prompt that are processed at once."""
GREEDY = {"do_sample": False, "ignore_eos": True}
WAIT_TOKENS = 8
"""Tokens of the other stream before the image is sent, and after its first token."""


class Pace:
    """`LLMModel`, with the time of its tower."""

    def load(self, checkpoint: str, dtype: str, quantization: str | None, threads: int, max_tokens: int) -> dict:
        from pace.llm import LLMModel

        options = {"dtype": dtype, "quantization": quantization, "num_threads": threads, "max_seq_len": CONTEXT}
        self.model = LLMModel(checkpoint, kv_cache_bytes="1GiB", max_image_tokens=max_tokens, progress=False, **options)
        self.encodings: list[tuple[float, float, float]] = []
        """Begin, end, and the time of the slices, for each image."""
        self.model.generator.engine.media._model.encode = self._timed(self.model.generator.engine.model.encode)
        return {"held_as": self.model.held_as}

    def _timed(self, encode: Callable[[Any], Generator[None, None, Any]]) -> Callable[[Any], Generator]:
        def run(media: Any) -> Generator[None, None, Any]:
            begin, spent = time.perf_counter(), 0.0
            slices = encode(media)
            while True:
                since = time.perf_counter()
                try:
                    next(slices)
                except StopIteration as end:
                    now = time.perf_counter()
                    self.encodings.append((begin, now, spent + now - since))
                    return end.value
                spent += time.perf_counter() - since
                yield

        return run

    def answer(self, image: str, num_decoded: int = 0) -> dict[str, Any]:
        """Sends an image. Returns the seconds to the first token, and tokens a second of `num_decoded` after it."""
        data, times = Path(image).read_bytes(), []
        begin = time.perf_counter()
        request = self.model.add_request(self._prompt(data), max_new_tokens=1 + num_decoded, **GREEDY)
        _read_times(request, times)
        output = request.result()
        return {
            "seconds": times[0] - begin, "encode_s": self.encodings[-1][2],
            "tokens": output.metrics.num_prompt_tokens, "token": output.generated_token_ids[0][0],
            "rate": num_decoded / (times[-1] - times[0]) if num_decoded else None,
        }  # fmt: skip

    def gaps(self, image: str) -> dict[str, Any]:
        """Sends an image while another sequence generates. Returns the seconds between two tokens of that sequence: the
        median before, the largest while the image is encoded, and the largest afterwards."""
        data = Path(image).read_bytes()
        other = self.model.add_request("A story about a fox.", max_new_tokens=CONTEXT - 64, **GREEDY)
        times: list[float] = []
        reading = threading.Thread(target=_read_times, args=(other, times), daemon=True)
        reading.start()
        self._wait_for(other, times, WAIT_TOKENS)
        posted = time.perf_counter()
        self.model.add_request(self._prompt(data), max_new_tokens=1, **GREEDY).result()
        answered = time.perf_counter()
        self._wait_for(other, times, len(times) + WAIT_TOKENS)
        other.cancel()
        reading.join()
        begin, end, spent = self.encodings[-1]
        gaps = list(zip(times, times[1:]))
        longest = lambda since, until: max(b - a for a, b in gaps if b > since and a < until)
        before = sorted(b - a for a, b in gaps if b <= posted)
        return {
            "encode_s": spent, "encode_wall_s": end - begin, "gap_in_encoding_s": longest(begin, end),
            "gap_after_s": longest(end, answered), "gap_before_s": before[len(before) // 2],
            "first_token_s": answered - posted,
            "tokens_in_encoding": sum(begin < at < end for at in times),
        }  # fmt: skip

    def _prompt(self, data: bytes) -> dict[str, Any]:
        placeholder = self.model.generator.encoder.processors["image"].placeholder
        return {"prompt": placeholder + QUESTION, "images": [data]}

    def _wait_for(self, request: Any, times: list[float], num_tokens: int) -> None:
        """Waits until the client has read `num_tokens` tokens."""
        while len(times) < num_tokens:
            if request.done:
                raise RuntimeError("the other sequence ended too early")
            time.sleep(0.01)


def _read_times(request: Any, times: list[float]) -> None:
    """Adds the time at which a client reads each token."""
    for event in request.events(with_text=False):
        if event.token is not None:
            times.append(time.perf_counter())


class LlamaCpp:
    """llama.cpp's mtmd, step by step as its `mtmd_helper_eval_chunks`."""

    def load(self, text: str, projectors: list[str], threads: int, around: str) -> dict[str, Any]:
        """Loads the text model, and the tower from each of `projectors`. `around`: text before and after an image."""
        import llama_cpp
        from llama_cpp import mtmd_cpp

        self.llama, self.mtmd = llama_cpp, mtmd_cpp
        self.prompt = around + mtmd_cpp.mtmd_default_marker().decode() + around + QUESTION
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        for module, name in (
            (llama_cpp, "llama_log_set"),
            (mtmd_cpp, "mtmd_log_set"),
            (mtmd_cpp, "mtmd_helper_log_set"),
        ):
            getattr(module, name)(self._quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(text.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, MICRO_BATCH, MICRO_BATCH
        options.n_threads = options.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, options)
        towers = mtmd_cpp.mtmd_context_params_default()
        towers.use_gpu, towers.print_timings, towers.n_threads = False, False, threads
        self.towers = [mtmd_cpp.mtmd_init_from_file(path.encode(), self.model, towers) for path in projectors]
        if not self.model or not self.context or not all(self.towers):
            raise RuntimeError("llama.cpp cannot load the files")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        return {"build": " ".join(llama_cpp.llama_print_system_info().decode().split())}

    def answer(self, image: str, tower: int = 0, num_decoded: int = 0) -> dict[str, Any]:
        """Sends an image to one of the towers. Returns the same as pace's."""
        data = Path(image).read_bytes()
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), False)
        begin = time.perf_counter()
        with self._chunks(self.towers[tower], data) as chunks:
            position, encode_s = self.llama.llama_pos(0), 0.0
            count = self.mtmd.mtmd_input_chunks_size(chunks)
            tokens = self.mtmd.mtmd_helper_get_n_tokens(chunks)
            for index in range(count):
                chunk = self.mtmd.mtmd_input_chunks_get(chunks, index)
                if self.mtmd.mtmd_input_chunk_get_type(chunk) == self.mtmd.MTMD_INPUT_CHUNK_TYPE_TEXT:
                    code = self.mtmd.mtmd_helper_eval_chunk_single(
                        self.towers[tower], self.context, chunk, position.value, 0, MICRO_BATCH, index == count - 1,
                        ctypes.byref(position),
                    )  # fmt: skip
                else:
                    since = time.perf_counter()
                    _check(self.mtmd.mtmd_encode_chunk(self.towers[tower], chunk))
                    encode_s += time.perf_counter() - since
                    code = self.mtmd.mtmd_helper_decode_image_chunk(
                        self.towers[tower], self.context, chunk, self.mtmd.mtmd_get_output_embd(self.towers[tower]),
                        position.value, 0, MICRO_BATCH, ctypes.byref(position),
                        self.mtmd.mtmd_helper_post_decode_callback(), None,
                    )  # fmt: skip
                _check(code)
            token = self._best_token()
        seconds = time.perf_counter() - begin
        rate = self._decode(token, num_decoded) if num_decoded else None
        return {"seconds": seconds, "encode_s": encode_s, "tokens": tokens, "token": token, "rate": rate}

    def _decode(self, token: int, count: int) -> float:
        """Generates tokens after `token`. Returns tokens per second."""
        begin = time.perf_counter()
        for _ in range(count):
            held = (self.llama.llama_token * 1)(token)
            _check(self.llama.llama_decode(self.context, self.llama.llama_batch_get_one(held, 1)))
            token = self._best_token()
        return count / (time.perf_counter() - begin)

    def _best_token(self) -> int:
        import numpy as np

        logits = np.ctypeslib.as_array(self.llama.llama_get_logits_ith(self.context, -1), (self.vocab_size,))
        return int(logits.argmax())

    @contextmanager
    def _chunks(self, tower: Any, data: bytes) -> Iterator[Any]:
        """The prompt with an image, as text and image tokens."""
        mtmd = self.mtmd
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(
            tower, (ctypes.c_uint8 * len(data)).from_buffer_copy(data), len(data), False
        )
        chunks = mtmd.mtmd_input_chunks_init()
        prompt = self.prompt.encode()
        text = mtmd.mtmd_input_text(prompt, len(prompt), False, True)
        try:
            _check(mtmd.mtmd_tokenize(tower, chunks, ctypes.byref(text), (ctypes.c_void_p * 1)(bitmap), 1))
            yield chunks
        finally:
            mtmd.mtmd_input_chunks_free(chunks)
            mtmd.mtmd_bitmap_free(bitmap)


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"llama.cpp returned {code}")


KINDS = {"pace": Pace, "llama.cpp": LlamaCpp}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(sys.stdin, answers, KINDS[sys.argv[1]]())


if __name__ == "__main__":
    main()
