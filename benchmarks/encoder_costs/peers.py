"""Other runtimes of embedding models. Each embeds lists of words, and returns vectors of length 1."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

CLS, SEP = 2, 3
"""Ids of a BERT's special tokens, as in `checkpoint.py`."""


def as_texts(ids: list[list[int]]) -> list[str]:
    return [" ".join([f"t{i}" for i in words]) for words in ids]


class Runtime(ABC):
    settings: ClassVar[tuple[int, ...]] = (0,)
    """The sizes of batches among which the fastest counts."""

    @abstractmethod
    def load(self, checkpoint: str, variant: str, threads: int, **more: Any) -> None:
        """Loads a checkpoint directory. `variant`: the weights, in the runtime's words. `more`: `pooling`, and for
        llama.cpp `gguf`."""

    @abstractmethod
    def embed(self, ids: list[list[int]]) -> np.ndarray:
        """Returns `[N, hidden]`. Texts are tokenised, where the runtime does it."""

    def use(self, setting: int) -> None:
        pass


class SentenceTransformers(Runtime):
    """`SentenceTransformer.encode` with its own batches of 32 texts, sorted by length."""

    def load(self, checkpoint: str, variant: str, threads: int, **unused: Any) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(threads)
        dtype = getattr(torch, variant)
        self.model = SentenceTransformer(checkpoint, device="cpu", model_kwargs={"dtype": dtype})

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        return self.model.encode(as_texts(ids), show_progress_bar=False, convert_to_numpy=True)


class OnnxRuntime(Runtime):
    """What fastembed does: padded batches through one session with all optimisations of graphs. Batches have 256 texts,
    or 32 if that is faster, and texts are sorted by length first."""

    settings = (256, 32)

    def load(self, checkpoint: str, variant: str, threads: int, pooling: str, **unused: Any) -> None:
        import onnxruntime
        from tokenizers import Tokenizer

        from benchmarks.encoder_costs.onnx_export import ensure_onnx

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.intra_op_num_threads = threads
        path = ensure_onnx(Path(checkpoint), variant)
        self.session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.tokenizer = Tokenizer.from_file(f"{checkpoint}/tokenizer.json")
        self.tokenizer.enable_padding()
        self.pooling, self.batch = pooling, self.settings[0]

    def use(self, setting: int) -> None:
        self.batch = setting

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        texts = as_texts(ids)
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        found: list[Any] = [None] * len(ids)
        for first in range(0, len(order), self.batch):
            chosen = order[first : first + self.batch]
            for index, row in zip(chosen, self._batch([texts[i] for i in chosen])):
                found[index] = row
        return np.stack(found)

    def _batch(self, texts: list[str]) -> np.ndarray:
        encodings = self.tokenizer.encode_batch(texts)
        mask = np.array([encoding.attention_mask for encoding in encodings], np.int64)
        tokens = np.array([encoding.ids for encoding in encodings], np.int64)
        [rows] = self.session.run(None, {"input_ids": tokens, "attention_mask": mask})
        return normalised(pooled(rows, mask, self.pooling))


def pooled(rows: np.ndarray, mask: np.ndarray, pooling: str) -> np.ndarray:
    """`rows`: `[N, T, hidden]`, with padding at the end of texts."""
    if pooling == "cls":
        return rows[:, 0]
    if pooling == "lasttoken":
        return rows[np.arange(len(rows)), mask.sum(1) - 1]
    return (rows * mask[:, :, None]).sum(1) / mask.sum(1, keepdims=True)


def normalised(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class LlamaCpp(Runtime):
    """The steps of llama.cpp's embedding example: whole texts in batches of up to 2,048 tokens, or 512 if that is
    faster. It takes token ids, so that tokenising costs it nothing."""

    settings = (2048, 512)
    POOLINGS = {"mean": 1, "cls": 2, "lasttoken": 3}

    def load(self, checkpoint: str, variant: str, threads: int, pooling: str, gguf: str) -> None:
        import llama_cpp

        self.llama, self.threads, self.pooling = llama_cpp, threads, pooling
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(gguf.encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {gguf}")
        self.hidden = llama_cpp.llama_model_n_embd(self.model)
        self.context = None
        self.use(self.settings[0])

    def use(self, setting: int) -> None:
        if self.context:
            self.llama.llama_free(self.context)
        options = self.llama.llama_context_default_params()
        options.n_ctx = options.n_batch = options.n_ubatch = self.batch = setting
        options.n_seq_max = self.num_texts = self.llama.llama_max_parallel_sequences()
        options.kv_unified = options.embeddings = True
        options.pooling_type = self.POOLINGS[self.pooling]
        options.n_threads = options.n_threads_batch = self.threads
        self.context = self.llama.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context of {setting} tokens")

    def embed(self, ids: list[list[int]]) -> np.ndarray:
        texts = ids if self.pooling == "lasttoken" else [[CLS, *words, SEP] for words in ids]
        found, batch, size = [], [], 0
        for text in texts:
            if size + len(text) > self.batch or len(batch) == self.num_texts:
                found.append(self._decode(batch))
                batch, size = [], 0
            batch.append(text)
            size += len(text)
        return normalised(np.concatenate([*found, self._decode(batch)]))

    def _decode(self, texts: list[list[int]]) -> np.ndarray:
        """Arrays of numpy are the memory of the batch: filling its fields one by one takes longer."""
        tokens = np.concatenate([np.array(text, np.int32) for text in texts])
        positions = np.concatenate([np.arange(len(text), dtype=np.int32) for text in texts])
        sequences = np.repeat(np.arange(len(texts), dtype=np.int32), [len(text) for text in texts])
        places = sequences.ctypes.data + 4 * np.arange(len(tokens), dtype=np.uint64)
        ones, wanted = np.ones(len(tokens), np.int32), np.ones(len(tokens), np.int8)
        fields = {"token": tokens, "pos": positions, "n_seq_id": ones, "seq_id": places, "logits": wanted}
        batch = self.llama.llama_batch(n_tokens=len(tokens))
        types = dict(self.llama.llama_batch._fields_)
        for name, array in fields.items():
            setattr(batch, name, ctypes.cast(array.ctypes.data, types[name]))
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), True)
        if code := self.llama.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        self.llama.llama_synchronize(self.context)
        row = lambda i: self.llama.llama_get_embeddings_seq(self.context, i)
        return np.stack([np.ctypeslib.as_array(row(i), (self.hidden,)).copy() for i in range(len(texts))])
