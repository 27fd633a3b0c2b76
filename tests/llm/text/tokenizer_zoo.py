"""Small tokenizers of the kinds found in checkpoints, trained when needed."""

from __future__ import annotations

import functools

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CORPUS = [
    "Once upon a time there was a naïve fox, who said: don't you like  two spaces?",
    "the end of the café, 3.14!\n\nNew line.",
    "日本語 and emoji 🦊👩‍👩‍👧 too",
] * 3


@functools.cache
def byte_level(vocab_size: int = 300) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of merged bytes, like those of GPT-2, Llama 3 and Qwen2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


@functools.cache
def sentencepiece(vocab_size: int = 360) -> PreTrainedTokenizerFast:
    """Returns a tokenizer like those of Llama 2 and Mistral: words begin with ▁, and other bytes have one token
    each."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        limit_alphabet=40,
        initial_alphabet=sorted("▁abcdefghijklmnopqrstuvwxyz"),
    )
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")
    return _with_ordinary_bytes(fast)


def _with_ordinary_bytes(fast: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Declares only the first three tokens special. The trainer also makes byte tokens special, and decoding would skip
    these."""
    import json

    state = json.loads(fast.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < 3]
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token="</s>", bos_token="<s>", unk_token="<unk>"
    )


def with_decoder(fast: PreTrainedTokenizerFast, decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the same vocabulary and another decoder."""
    backend = Tokenizer.from_str(fast.backend_tokenizer.to_str())
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


@functools.cache
def metaspace_of_bytes() -> PreTrainedTokenizerFast:
    """Returns a tokenizer like those of T5 and XGLM, whose decoder leaves out the first blank."""
    return with_decoder(sentencepiece(), decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]))


@functools.cache
def with_first_blank() -> PreTrainedTokenizerFast:
    """Returns a tokenizer like that of Gemma, which leaves out no blank."""
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return with_decoder(sentencepiece(), decoders.Sequence(parts))


@functools.cache
def metaspace(
    prepend: str = "always", blank: str = "▁", is_bare: bool = True, vocab_size: int = 360
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer like those of T5, XLNet and early Llama conversions: words begin with `blank`, and text in no
    word is unknown."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement=blank, prepend_scheme=prepend)
    tokenizer.decoder = decoders.Metaspace(replacement=blank, prepend_scheme=prepend)
    if not is_bare:
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace(blank, " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "</s>"],
        unk_token="<unk>",
        initial_alphabet=[chr(code) for code in range(33, 127)] + [blank, "é"],
    )
    tokenizer.train_from_iterator([*CORPUS, "true false null 1 2 30 <0x0A>"] * 2, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


ZOO = {"byte_level": byte_level, "sentencepiece": sentencepiece}
DECODERS = {**ZOO, "metaspace": metaspace_of_bytes, "with_first_blank": with_first_blank}
"""The zoo and more tokenizers, for tests of decoding only."""
