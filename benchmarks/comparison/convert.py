"""llama.cpp's converter for a checkpoint whose tokenizer it does not know: `python -m benchmarks.comparison.convert
SOURCE CHECKPOINT OPTIONS`, with the options of its convert_hf_to_gguf.py, and --no-vocab for a file without tokens."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NO_VOCAB = "--no-vocab"


def convert(source: Path, checkpoint: Path, target: Path, kind: str, *options: str) -> None:
    """Writes a checkpoint as the GGUF file `target`, with weights of a `kind` that the converter knows, such as bf16,
    f16, f32 and q8_0. `source`: a checkout of llama.cpp. Raises subprocess.CalledProcessError."""
    partial = target.with_suffix(".partial")
    command = [sys.executable, "-m", "benchmarks.comparison.convert", source, checkpoint]
    command += ["--outfile", partial, "--outtype", kind, *options]
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr)
    partial.rename(target)


def main() -> None:
    source, *arguments = sys.argv[1:]
    sys.path[:0] = [source, str(Path(source) / "gguf-py")]
    from conversion.base import ModelBase, TextModel

    ModelBase.no_mtp = True  # else the converter looks for draft layers, which these checkpoints do not have
    # The converter recognises tokenizers by a hash. That of the bundled model splits texts as GPT-2 does.
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    TextModel._set_vocab_sentencepiece = TextModel._set_vocab_gpt2  # it needs a library to say that there is no file
    if NO_VOCAB in arguments:
        arguments.remove(NO_VOCAB)
        _leave_out_vocab(TextModel)
    sys.argv = ["convert_hf_to_gguf.py", *arguments]
    runpy.run_path(str(Path(source) / "convert_hf_to_gguf.py"), run_name="__main__")


def _leave_out_vocab(model_class: type) -> None:
    """Makes all models write files without tokens."""
    prepare = model_class.prepare_metadata

    def prepare_metadata(self, vocab_only: bool) -> None:
        def set_vocab() -> None:
            self.gguf_writer.add_tokenizer_model("no_vocab")
            self.gguf_writer.add_vocab_size(self.hparams["vocab_size"])

        self.set_vocab = set_vocab
        prepare(self, vocab_only)

    model_class.prepare_metadata = prepare_metadata


if __name__ == "__main__":
    main()
