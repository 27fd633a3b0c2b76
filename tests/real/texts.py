"""Texts that tokenizers split in different ways."""

from __future__ import annotations

ODD_TEXTS = [
    "", " ", "  two  spaces ", "\n\n\ttab\r\n", "naïve café", "日本語のテキスト", "🙂👩‍👩‍👧", "\x01\x7f",
    "don't we'll THEY'RE 12345 3.14",
    "'the 'tis", "<|im_start|>user\nHi<|im_end|>\n", "<start_of_turn>user\nHi<end_of_turn>", "e\u0301\u200b", "a▁b ▁ c",
    "x = {'a': [1, 2], \"b\": None}  # comment\n\n\n    return x", "https://example.org/a?b=c&d=%20", "ＡＢＣ ﬁ ½ ²",
    "ΑΒΓ абв אבג",
]  # fmt: skip
