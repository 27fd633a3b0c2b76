"""Tiny random encoders with a tokenizer."""

from __future__ import annotations

from pathlib import Path

from tests.llm.models.encoders.variants import VARIANTS, VOCABULARY, save_encoder

WORDS = "a b c d e f g h i j k l m n o p q r s t u v w x y z the cat dog sat ran on mat in hat and".split()


def make_checkpoint(folder: Path, name: str) -> Path:
    """Saves a variant of `VARIANTS` with a tokenizer of words, and returns its folder."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordPiece
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    save_encoder(folder, VARIANTS[name])
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*special, *WORDS, *(f"##{letter}" for letter in WORDS[:26])]
    assert len(words) < VOCABULARY
    tokenizer = Tokenizer(WordPiece({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = BertNormalizer(), BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return folder
