"""Writes sentencepiece vocabularies to this folder, with the tokens that the library gives for texts:

python -m tests.checkpoints.vocabularies.make_golden        (with `pip install sentencepiece`)
"""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = [
    "Once upon a time there was a naïve fox, who said: don't you like  two spaces?",
    "the end of the café, 3.14! A sophisticated user and an assistant of the system observe.",
    "你好，世界。今天天气怎么样？我很好，谢谢你。",
    "日本語 and emoji too, hello hello hello",
] * 20
TEXTS = [
    "hello", " hello", "hello ", "two  spaces   and  more", "", " ", "\n", "\nhello", "a\n\nb\tc",
    "你好，世界。ｈｅｌｌｏ", "naïve café ﬁx", "unseen: 🦊 Ж ٣", "sophisticated sop eop", "[gMASK]sop<|user|>\n hello",
    "▁", "the▁end", "\u3000wide\u3000", "x" * 40, "\ufffd\x00\x7f",
]  # fmt: skip
KINDS = {
    "plain": {"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    "normalised": {"normalization_rule_tsv": "rules.tsv", "remove_extra_whitespaces": True},
}
RULES = {"ｈ": "h", "ｅ": "e", "ｌ": "l", "ｏ": "o", "ﬁ": "fi", "\u3000": " ", "\t": " "}


def main() -> None:
    import sentencepiece

    (HERE / "corpus.txt").write_text("\n".join(CORPUS))
    codes = [(*(" ".join(f"{ord(c):X}" for c in text) for text in rule),) for rule in RULES.items()]
    (HERE / "rules.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in codes))
    golden = {}
    for kind, options in KINDS.items():
        if "normalization_rule_tsv" in options:
            options["normalization_rule_tsv"] = str(HERE / "rules.tsv")
        sentencepiece.SentencePieceTrainer.train(
            input=str(HERE / "corpus.txt"),
            model_prefix=str(HERE / kind),
            vocab_size=480,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.995,
            allow_whitespace_only_pieces=True,
            split_by_unicode_script=False,
            **options,
        )
        model = sentencepiece.SentencePieceProcessor(model_file=str(HERE / f"{kind}.model"))
        ids = [model.encode(text) for text in TEXTS]
        golden[kind] = {"texts": TEXTS, "ids": ids, "decoded": [model.decode(row) for row in ids]}
        (HERE / f"{kind}.vocab").unlink()
    fields = [f'"{kind}": {{\n' + ",\n".join(f'"{name}": {json.dumps(rows)}' for name, rows in of_kind.items()) + "}"
              for kind, of_kind in golden.items()]  # fmt: skip
    (HERE / "golden.json").write_text("{" + ",\n".join(fields) + "}\n")
    for name in ("corpus.txt", "rules.tsv"):
        (HERE / name).unlink()


if __name__ == "__main__":
    main()
