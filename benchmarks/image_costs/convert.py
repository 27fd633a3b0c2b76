"""llama.cpp's converter for a checkpoint whose tokenizer it does not know: `python -m benchmarks.image_costs.convert
SOURCE CHECKPOINT OPTIONS`, with the options of its convert_hf_to_gguf.py."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    source, *arguments = sys.argv[1:]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    from conversion.base import TextModel

    # The converter recognises tokenizers by a hash. That of the bundled model splits texts as GPT-2 does.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2  # it needs a library to say that there is no file
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(Path(source) / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main()
