"""Measures how well a model predicts a text and how far it is from a reference: perplexity, KL divergence, agreement.

evaluate(LLMModel(path, quantization="int4"), read_texts("text.txt"), reference=LLMModel(path))
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pace.llm.clients.session import append_each
from pace.llm.inputs import read_prompts
from pace.llm.llm import LLMModel
from pace.llm.loading.progress import progress_bar

CONTEXT = 512
"""Default number of tokens in a window."""

PIECE_BYTES = 16 << 20
"""Size of one model's float32 logits computed at a time."""
COMPARED_BYTES = 4 << 20
"""Size of the float64 logits compared at a time. They fit the CPU caches, which 128 rows of a 152k vocabulary would
not."""
FEWEST_ROWS = 128
"""Minimum number of rows of logits at a time, for any vocabulary size. A step of the engine has no more of them."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the predicted tokens of a text. KL divergence and agreement are None without a reference."""

    num_tokens: int
    """Number of predicted tokens: all but the first of each text."""
    perplexity: float
    """`exp` of the mean of `-log p(token | tokens before it in its window)`."""
    kl_divergence: float | None = None
    """Mean over the tokens of `sum over the vocabulary of r (log r - log p)`, in nats. r are the reference's
    probabilities."""
    kl_max: float | None = None
    """The largest KL divergence of a token."""
    top1_agreement: float | None = None
    """Share of the tokens for which both models predict the same most likely token."""
    reference_perplexity: float | None = None

    def __str__(self) -> str:
        lines = [f"{'tokens':<20}{self.num_tokens}", f"{'perplexity':<20}{self.perplexity:.4f}"]
        if self.kl_divergence is not None:
            lines[1] += f" (reference: {self.reference_perplexity:.4f})"
            lines.append(f"{'KL divergence':<20}{self.kl_divergence:.6f} (largest of a token: {self.kl_max:.4f})")
            lines.append(f"{'top-1 agreement':<20}{100 * self.top1_agreement:.2f} %")
        return "\n".join(lines)


def read_texts(path: str | Path) -> list[str]:
    """Reads the texts of a file: the "text" of the object in each line of a `.jsonl` file, else the whole file as one
    text.

    Raises an OSError that names the file, and ValueError for a file that is not UTF-8, has no text, or has a line
    without one."""
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise type(error)(f"the text {str(path)!r} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    texts = [content]
    if path.suffix == ".jsonl":
        texts = [
            _text_of(line, f"{path}, line {number}")
            for number, line in enumerate(content.split("\n"), 1)
            if line.strip()
        ]
    if not any(text.strip() for text in texts):
        raise ValueError(f"{path} holds no text")
    return texts


def _text_of(line: str, where: str) -> str:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise ValueError(
            f'{where} must be an object with a "text", such as {{"text": "Once upon a time"}}; got {line[:100]}'
        )
    return text


def encode(texts: Sequence[str] | Sequence[list[int]], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """Token ids of each text that is not empty; rows of token ids stay as they are. A text that begins with the
    beginning-of-text token gets no second one."""
    texts = [text for text in texts if text]
    rows = read_prompts(texts, tokenizer, vocab_size).rows if texts else []
    bos = getattr(tokenizer, "bos_token_id", None)
    return [row[1:] if isinstance(text, str) and row[:2] == [bos, bos] else row for text, row in zip(texts, rows)]


def read_context(context: int | None, longest: int) -> int:
    """Number of tokens in a window; None gives the default, at most `longest`. Raises ValueError unless it is from 2 to
    `longest`, the model's maximum."""
    context = min(CONTEXT, longest) if context is None else context
    if not 2 <= context <= longest:
        raise ValueError(f"context must be from 2 to the {longest} tokens that the model takes; got {context}")
    return context


def windows(rows: Sequence[list[int]], context: int) -> Iterator[list[int]]:
    """Cuts the rows into windows of at most `context` tokens. Each begins with the last token of the window before it,
    so that every token but a row's first is predicted once."""
    for row in rows:
        for start in range(0, len(row) - 1, context - 1):
            yield row[start : start + context]


def evaluate(
    model: LLMModel,
    texts: Sequence[str] | Sequence[list[int]],
    reference: LLMModel | None = None,
    context: int | None = None,
    progress: bool = True,
) -> Evaluation:
    """Returns the perplexity over `texts` or rows of token ids, and the divergence from a reference.

    The rows are cut into windows of `context` tokens (default: 512, or the models' maximum if less). Each token is
    predicted from the tokens before it in its window.

    `reference`: the model to compare with; needs the same tokenizer. `progress`: shows a bar on a terminal or in a
    notebook.

    **Memory**: 16 MB of logits for each model, or 128 rows if that is more, and a few numbers for each token. A text is
    tokenised in one piece.
    **Numerics**: softmax, differences and all sums in float64, from float32 logits.

    Raises ValueError for texts of fewer than two tokens, for a context below two or above the models' maximum, and for
    models with different vocabularies."""
    models = [model] if reference is None else [model, reference]
    context = read_context(context, min(m.max_seq_len for m in models))
    rows = encode(texts, model.tokenizer, model.config.vocab_size)
    if reference is not None:
        _check_comparable(model, reference, texts, rows)
    num_tokens = sum(len(row) - 1 for row in rows)
    if num_tokens < 1:
        raise ValueError("the text has fewer than two tokens, so there is nothing to predict; give a longer one")
    num_rows = max(FEWEST_ROWS, PIECE_BYTES // (4 * model.config.vocab_size))
    parts: list[Tensor] = []
    with progress_bar(num_tokens, "Evaluating", progress, unit="tok") as report:
        for some in _batches(windows(rows, context), num_rows):
            for logits, targets in _predictions(models, some, num_rows):
                parts.append(compare(logits, targets))
                report(len(targets))
    return _summary(torch.cat(parts, dim=1))


def is_quantized(model: LLMModel) -> bool:
    """True if any matrix is quantised, by its checkpoint or by request."""
    return any(matrix.plan.layouts for matrix in model.generator.engine.model.model.matrices())


def compare(logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    """Compares logits `[R, V]` of one model, or of a model and its reference, at the tokens `[R]` that followed.

    Returns float64 `[columns, R]`: `-log p(token)`; with a reference also its `-log r(token)`, KL(r || p), and 1 if
    both have the same most likely token, else 0."""
    num_rows = max(1, COMPARED_BYTES // (8 * logits[0].shape[1]))
    pieces = zip(zip(*(rows.split(num_rows) for rows in logits)), targets.split(num_rows))
    return torch.cat([_compared(some, tokens) for some, tokens in pieces], dim=1)


def _compared(logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    rows = [each.double() for each in logits]
    norms = [each.logsumexp(-1, keepdim=True) for each in rows]
    losses = [(norm - each.gather(1, targets[:, None]))[:, 0] for each, norm in zip(rows, norms)]
    if len(rows) == 1:
        return torch.stack(losses)
    model, reference = (each - norm for each, norm in zip(rows, norms))
    divergence = (reference.exp() * (reference - model)).sum(-1)
    return torch.stack([*losses, divergence, (logits[0].argmax(-1) == logits[1].argmax(-1)).double()])


def _batches(parts: Iterable[list[int]], num_tokens: int) -> Iterator[list[list[int]]]:
    """Groups consecutive windows into batches of at most `num_tokens` tokens; a longer window is a batch by itself."""
    batch: list[list[int]] = []
    for part in parts:
        if batch and sum(map(len, batch)) + len(part) > num_tokens:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _predictions(
    models: Sequence[LLMModel], batch: Sequence[list[int]], num_rows: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yields the logits of each model and the target tokens of all windows of a batch, concatenated. A single window is
    computed in pieces of `num_rows`."""
    with ExitStack() as stack:
        sessions = [[stack.enter_context(model.session()) for _ in batch] for model in models]
        longest = max(map(len, batch))
        for start in range(0, longest - 1, num_rows if len(batch) == 1 else longest):
            pieces = [window[start : start + num_rows + 1] for window in batch]
            appends = [[(each, piece[:-1]) for each, piece in zip(own, pieces)] for own in sessions]
            logits = [torch.cat(append_each(some, "all")) for some in appends]
            yield logits, torch.tensor([token for piece in pieces for token in piece[1:]])


def _summary(values: Tensor) -> Evaluation:
    means = values.mean(dim=1).tolist()
    if len(means) == 1:
        return Evaluation(values.shape[1], math.exp(means[0]))
    loss, reference_loss, divergence, agreement = means
    return Evaluation(
        values.shape[1], math.exp(loss), divergence, values[2].max().item(), agreement, math.exp(reference_loss)
    )


def _check_comparable(
    model: LLMModel, reference: LLMModel, texts: Sequence[str] | Sequence[list[int]], rows: list[list[int]]
) -> None:
    sizes = model.config.vocab_size, reference.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the model has {sizes[0]} tokens and the reference {sizes[1]}: their predictions cannot be compared"
        )
    if reference.tokenizer is not None and encode(texts, reference.tokenizer, sizes[1]) != rows:
        raise ValueError(
            "the tokenizers of the model and the reference turn the text into different tokens: their predictions cannot be compared"
        )
