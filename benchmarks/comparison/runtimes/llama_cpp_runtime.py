"""llama.cpp through the C functions of llama-cpp-python: only `llama_decode` on batches of token ids.

The GGUF file is written by `gguf_writer`, or by llama.cpp's converter for families that the writer does not know.
Quantised ones are made from the fp16 file by llama.cpp's `llama_model_quantize`."""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison.convert import NO_VOCAB, convert
from benchmarks.comparison.runtimes.base import GGUF_FILES, Prompts, SteppedRuntime, Variant

MICRO_BATCH = 512
"""llama.cpp's default: tokens of a prompt that are processed at once."""
FLASH_ATTENTION = {"off": 0, "on": 1}
"""LLAMA_FLASH_ATTN_TYPE_DISABLED and _ENABLED."""
FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k_s": 11, "q4_k_s": 14}
FILE_TYPES |= {"q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25, "mxfp4": 38}
FILE_TYPES |= {"tq1_0": 36, "tq2_0": 37, "q1_0": 40, "q2_0": 41}
"""LLAMA_FTYPE_MOSTLY_*; 38 is MXFP4_MOE."""
FLOATS = {"bf16": "bf16", "f16": "fp16", "f32": "fp32"}
"""llama.cpp's names of types -> those of `gguf_writer`."""
SOURCE_VARIABLE = "LLAMA_SOURCE"
"""Environment variable with the path of llama.cpp's source, which has its converter."""
LITE_LAYERS = (26, 27)
"""Numbers of layers by which llama.cpp recognises the DeepSeek-V2 with full-rank queries."""


def check_convertible(config: dict[str, Any]) -> None:
    """Raises NotImplementedError for the config of a slice that llama.cpp cannot load."""
    if (
        config["model_type"] == "deepseek_v2"
        and not config.get("q_lora_rank")
        and config["num_hidden_layers"] not in LITE_LAYERS
    ):
        raise NotImplementedError(
            f"llama.cpp knows DeepSeek-V2-Lite by its 26 or 27 layers, and refuses {config['num_hidden_layers']}: "
            "take a slice of the experts, such as deepseek-v2-lite-8-experts"
        )


def _write(checkpoint: Path, kind: str, target: Path) -> None:
    """Writes the GGUF file of a checkpoint in a type of `FLOATS`."""
    from benchmarks.comparison.gguf_families import ARCHITECTURES
    from benchmarks.comparison.gguf_writer import write_gguf  # needs torch; running does not

    [architecture] = json.loads((checkpoint / "config.json").read_text())["architectures"]
    if architecture in ARCHITECTURES:
        write_gguf(checkpoint, target, FLOATS[kind])
        return
    source = os.environ.get(SOURCE_VARIABLE)
    if not source:
        raise NotImplementedError(f"a file of {architecture} needs llama.cpp's converter: --llama-source PATH")
    convert(Path(source), checkpoint, target, kind, NO_VOCAB)


class LlamaCpp(SteppedRuntime):
    name = "llama.cpp"
    packages = ("llama-cpp-python",)
    modules = ("llama_cpp", "gguf")
    variants = (
        Variant("bf16", "bf16", 16),
        Variant("f16", "fp16", 16),
        Variant("f32", "fp32", 32),
        Variant("q8_0", "int8", None),
        Variant("q4_0", "int4", None),
        *(Variant(file.upper(), file, None) for file in GGUF_FILES),
    )

    @classmethod
    def conversion(cls, variant: str) -> tuple[str, str]:
        return cls.name, variant.lower()

    @classmethod
    def import_modules(cls) -> None:
        if source := os.environ.get(SOURCE_VARIABLE):
            sys.path.insert(0, str(Path(source) / "gguf-py"))  # knows the newest types
        super().import_modules()
        import llama_cpp

        global _be_quiet  # llama.cpp keeps the pointer
        _be_quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(_be_quiet, None)
        llama_cpp.llama_backend_init()

    @classmethod
    def convert(cls, checkpoint: Path, variant: str, target: Path) -> None:
        check_convertible(json.loads((checkpoint / "config.json").read_text()))
        import llama_cpp

        if variant in FLOATS:
            _write(checkpoint, variant, target)
            return
        half = target.with_name("half.gguf")
        _write(checkpoint, "f16", half)
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = FILE_TYPES[variant]
        failed = llama_cpp.llama_model_quantize(str(half).encode(), str(target).encode(), ctypes.byref(options))
        half.unlink()
        if failed:
            raise RuntimeError(f"llama_model_quantize returned {failed}")

    def __init__(self, source: Path, variant: str, threads: int) -> None:
        import llama_cpp

        self.llama = llama_cpp
        self.model = llama_cpp.llama_model_load_from_file(str(source).encode(), llama_cpp.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {source.name}")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.source, self.threads, self.context, self.flash = source, threads, None, {}

    def reserve(self, batch: int, length: int) -> None:
        """Makes a new context: its cache has `length` tokens for each sequence, and flash attention is on or off."""
        if self.context:
            self.llama.llama_free(self.context)
        options = self.llama.llama_context_default_params()
        options.n_ctx = batch * -(-length // 256) * 256
        options.n_seq_max = batch
        options.n_batch = options.n_ubatch = MICRO_BATCH
        options.n_threads = options.n_threads_batch = self.threads
        options.flash_attn_type = FLASH_ATTENTION[self.flash.get(batch, "on")]
        self.context = self.llama.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError(f"llama.cpp makes no context for {batch} x {length} tokens")

    def tune(self, prompts: Prompts) -> None:
        """Chooses flash attention on or off for each batch size, by the shorter time for the prompts and 64 steps."""
        seconds = {}
        for flash in FLASH_ATTENTION:
            self.flash[len(prompts)] = flash
            super().tune(prompts)
            timing = self.run(prompts, 8)
            seconds[flash] = timing.prefill_s + 64 * timing.step_s
        self.flash[len(prompts)] = min(seconds, key=seconds.__getitem__)

    def settings(self) -> dict[str, str]:
        info = self.llama.llama_print_system_info().decode()
        flash = ", ".join(f"{choice} for batches of {batch}" for batch, choice in self.flash.items())
        return {
            "flash attention": flash,
            "n_batch, n_ubatch": str(MICRO_BATCH),
            "KV": "f16",
            "build": " ".join(info.split()),
        }

    def step_weight_bytes(self) -> int | None:
        return gguf_step_bytes(self.source)

    def start(self, prompts: Prompts) -> None:
        self.llama.llama_memory_clear(self.llama.llama_get_memory(self.context), False)
        self.length = len(prompts[0])
        self.tokens = []
        for index, ids in enumerate(prompts):
            for begin in range(0, len(ids), MICRO_BATCH):
                piece = ids[begin : begin + MICRO_BATCH]
                is_last = begin + len(piece) == len(ids)
                self._decode(
                    [(token, begin + i, index) for i, token in enumerate(piece)], [len(piece) - 1] if is_last else []
                )
            self.tokens.append(int(self._row(-1).argmax()))

    def step(self) -> None:
        count = len(self.tokens)
        self._decode([(token, self.length, index) for index, token in enumerate(self.tokens)], range(count))
        self.tokens = [int(self._row(index).argmax()) for index in range(count)]
        self.length += 1

    def logits(self, prompt: list[int]) -> np.ndarray:
        self.reserve(1, len(prompt))
        self.start([prompt])
        return self._row(-1).copy()

    def _decode(self, tokens: list[tuple[int, int, int]], wanted) -> None:
        """Processes `tokens` (id, position, sequence), and computes the logits of those in `wanted`."""
        batch = self.llama.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for i, (token, position, sequence) in enumerate(tokens):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = (
                    token,
                    position,
                    1,
                    sequence,
                    False,
                )
            for i in wanted:
                batch.logits[i] = True
            if code := self.llama.llama_decode(self.context, batch):
                raise RuntimeError(f"llama_decode returned {code}")
            self.llama.llama_synchronize(self.context)
        finally:
            self.llama.llama_batch_free(batch)

    def _row(self, index: int) -> np.ndarray:
        return np.ctypeslib.as_array(self.llama.llama_get_logits_ith(self.context, index), (self.vocab_size,))


def gguf_step_bytes(path: Path) -> int:
    """Bytes of the tensors that a decode step reads. They exclude experts that a token does not choose. They
    exclude embeddings of layers, too, and those of tokens if there is a separate output."""
    import gguf

    reader = gguf.GGUFReader(path)
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in reader.tensors}
    fields = {name.partition(".")[2]: field for name, field in reader.fields.items()}
    experts = sum(size for name, size in sizes.items() if "_exps." in name)
    count, used = (fields[name].contents() if name in fields else 1 for name in ("expert_count", "expert_used_count"))
    unread = sizes.get("per_layer_token_embd.weight", 0)
    unread += sizes["token_embd.weight"] if "output.weight" in sizes else 0
    return sum(sizes.values()) - unread - experts * (count - used) // count
