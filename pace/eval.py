"""How well a model predicts a text, and how far it is from another model there: perplexity, KL divergence, agreement.

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
from pace.llm.models.model_utils import progress_bar

CONTEXT = 512
"""Tokens of a window, where nobody says otherwise."""

PIECE_BYTES = 16 << 20
"""Of one model's logits in float32 at a time."""
COMPARED_BYTES = 4 << 20
"""Of logits in float64 at a time: they stay in the caches, which a vocabulary of 152k in 128 rows would not."""
FEWEST_ROWS = 128
"""Rows of logits at a time, however large the vocabulary is: a step of the engine has no more of them."""


@dataclass(frozen=True)
class Evaluation:
    """Means over the predicted tokens of a text. KL divergence and agreement are None where there was no reference."""

    num_tokens: int
    """That were predicted: of each text all but the first."""
    perplexity: float
    """`exp` of the mean of `-log p(token | those before it in its window)`."""
    kl_divergence: float | None = None
    """Mean over the tokens of `sum over the vocabulary of r (log r - log p)`, in nats, r being the reference's
    probabilities."""
    kl_max: float | None = None
    """The largest of a token."""
    top1_agreement: float | None = None
    """Share of the tokens for which both models have the same first choice."""
    reference_perplexity: float | None = None

    def __str__(self) -> str:
        lines = [f"{'tokens':<20}{self.num_tokens}", f"{'perplexity':<20}{self.perplexity:.4f}"]
        if self.kl_divergence is not None:
            lines[1] += f" (reference: {self.reference_perplexity:.4f})"
            lines.append(f"{'KL divergence':<20}{self.kl_divergence:.6f} (largest of a token: {self.kl_max:.4f})")
            lines.append(f"{'top-1 agreement':<20}{100 * self.top1_agreement:.2f} %")
        return "\n".join(lines)


def read_texts(path: str | Path) -> list[str]:
    """The texts of a file: of `.jsonl` the "text" of the object in each line, of any other file all of it as one.

    Raises OSError that names the file, and ValueError for a file that is not UTF-8, has no text, or a line without one."""
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
    """Token ids of each text that is not empty; token ids as they are. A text that brings its own beginning-of-text
    token gets no second one."""
    texts = [text for text in texts if text]
    rows = read_prompts(texts, tokenizer, vocab_size).rows if texts else []
    bos = getattr(tokenizer, "bos_token_id", None)
    return [row[1:] if isinstance(text, str) and row[:2] == [bos, bos] else row for text, row in zip(texts, rows)]


def read_context(context: int | None, longest: int) -> int:
    """Tokens of a window for a model that takes `longest`; None for the default. Raises ValueError for fewer than two,
    or more than that."""
    context = min(CONTEXT, longest) if context is None else context
    if not 2 <= context <= longest:
        raise ValueError(f"context must be from 2 to the {longest} tokens that the model takes; got {context}")
    return context


def windows(rows: Sequence[list[int]], context: int) -> Iterator[list[int]]:
    """The rows in runs of at most `context` tokens, each beginning with the last token of the one before: so that every
    token but a row's first is predicted once."""
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
    """Returns perplexity, and divergence from a reference, over `texts` or rows of token ids.

    They are cut into windows of `context` tokens (default: 512, or what the models take). Each token is predicted from
    those before it in its window.

    `reference`: the model to compare with, of the same tokenizer. `progress`: a bar, on a terminal or in a notebook.

    **Memory**: 16 MB of logits for each model, or 128 rows if that is more, and a few numbers for each token. A text is
    tokenised as a whole.
    **Numerics**: softmax, its differences and all sums in float64, of logits in float32.

    Raises ValueError for texts of fewer than two tokens, a context of less than two or more than the models take, and
    for models that do not share their vocabulary."""
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
    """Whether any matrix is, from its checkpoint or by request."""
    return any(matrix.plan.layouts for matrix in model.generator.engine.model.model.matrices())


def compare(logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    """float64 `[columns, R]` for logits `[R, V]` of one model, or of a model and its reference, and the tokens `[R]`
    that came: `-log p(token)`, and with a reference its `-log r(token)`, KL(r || p), and whether the first choices are
    the same."""
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
    """Windows that share steps: in their order, as many as have `num_tokens` together; a longer one alone."""
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
    """Logits of each model and the tokens that came, of windows one behind the other, piece by piece where they have
    more than `num_rows`."""
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
