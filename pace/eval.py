"""Measures how well a model predicts a text and how far it is from a reference: perplexity, KL divergence, agreement.
Texts may have images: then also how far the rows of its tower are from the reference's.

evaluate(LLMModel(path, quantization="int4"), read_texts("text.txt"), reference=LLMModel(path))
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pace.llm.clients.session import Session, append_each
from pace.llm.engine.engine import Engine
from pace.llm.inputs import Prompts, is_media_prompt, read_prompts
from pace.llm.llm import LLMModel
from pace.llm.loading.progress import progress_bar
from pace.media.media import Media, MediaSpan

CONTEXT = 512
"""Default number of tokens in a window."""

PIECE_BYTES = 16 << 20
"""Size of one model's float32 logits computed at a time."""
COMPARED_BYTES = 4 << 20
"""Size of the float64 logits compared at a time. They fit the CPU caches, which 128 rows of a 152k vocabulary would
not."""
MIN_ROWS = 128
"""Minimum number of rows of logits at a time, for any vocabulary size. A step of the engine has no more of them."""


Text = str | list[int] | Mapping[str, Any]
"""A text, token ids, or a text with its media: `{"prompt": text, "images": [...]}`."""


class Row(NamedTuple):
    """Tokens, and the media among them. Their placeholders are not predicted."""

    tokens: list[int]
    media: tuple[MediaSpan, ...] = ()

    @property
    def predicted(self) -> Tensor:
        """bool `[T - 1]`: True for the tokens after the first that are no placeholders."""
        found = torch.ones(len(self.tokens), dtype=torch.bool)
        for span in self.media:
            found[span.start : span.end] = False
        return found[1:]


@dataclass(frozen=True)
class RowError:
    """Distance of the rows of a tower from those of the reference's tower, over all media."""

    num_rows: int
    relative: float
    """Root of the sum of squared differences, over that of the reference's squares."""
    min_cosine: float
    """The smallest cosine of a row and its reference."""


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
    tower: RowError | None = None
    """Error of the rows of images and sound; None without a reference or media."""

    def __str__(self) -> str:
        lines = [f"{'tokens':<20}{self.num_tokens}", f"{'perplexity':<20}{self.perplexity:.4f}"]
        if self.kl_divergence is not None:
            lines[1] += f" (reference: {self.reference_perplexity:.4f})"
            lines.append(f"{'KL divergence':<20}{self.kl_divergence:.6f} (largest of a token: {self.kl_max:.4f})")
            lines.append(f"{'top-1 agreement':<20}{100 * self.top1_agreement:.2f} %")
        if self.tower is not None:
            lines.append(
                f"{'rows of media':<20}{self.tower.num_rows}, with an error of {100 * self.tower.relative:.3f} % "
                f"(smallest cosine: {self.tower.min_cosine:.6f})"
            )
        return "\n".join(lines)


def read_texts(path: str | Path) -> list[str | dict[str, Any]]:
    """Reads the texts of a file: the "text" of the object in each line of a `.jsonl` file, else the whole file as one
    text. A line may also have "images", a list of files in the folder of `path`: it becomes a text with its media.

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
            _text_of(line, f"{path}, line {number}", path.parent)
            for number, line in enumerate(content.split("\n"), 1)
            if line.strip()
        ]
    if not any(isinstance(text, dict) or text.strip() for text in texts):
        raise ValueError(f"{path} holds no text")
    return texts


def _text_of(line: str, where: str, folder: Path) -> str | dict[str, Any]:
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error})") from None
    text = entry.get("text") if isinstance(entry, dict) else None
    if not isinstance(text, str):
        raise ValueError(
            f'{where} must be an object with a "text", such as {{"text": "Once upon a time"}}; got {line[:100]}'
        )
    images = entry.get("images", [])
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ValueError(f'{where}: "images" must be a list of files, such as ["page.png"]; got {line[:100]}')
    return {"prompt": text, "images": [folder / image for image in images]} if images else text


def read_rows(texts: Sequence[Text], model: LLMModel) -> list[Row]:
    """The rows of texts, as `encode` returns their tokens."""
    generator, vocab_size = model.generator, model.config.vocab_size
    if not any(map(is_media_prompt, texts)):
        return [Row(tokens) for tokens in encode(texts, model.tokenizer, vocab_size)]
    prompts = read_prompts([text for text in texts if text], model.tokenizer, vocab_size, encoder=generator.encoder)
    return [Row(*row) for row in zip(prompts.rows, prompts.media or [()] * len(prompts.rows))]


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


def windows(rows: Iterable[list[int]], context: int) -> Iterator[list[int]]:
    """Cuts the rows into windows of at most `context` tokens. Each begins with the last token of the window before it,
    so that every token but a row's first is predicted once."""
    for row in rows:
        for start in range(0, len(row) - 1, context - 1):
            yield row[start : start + context]


def _windows(rows: Iterable[Row], context: int) -> Iterator[Row]:
    """The windows of rows. One with media is not cut."""
    for row in rows:
        yield from [row] if row.media else map(Row, windows([row.tokens], context))


def evaluate(
    model: LLMModel,
    texts: Sequence[Text],
    reference: LLMModel | None = None,
    context: int | None = None,
    progress: bool = True,
) -> Evaluation:
    """Returns the perplexity over `texts` or rows of token ids, and the divergence from a reference.

    The rows are cut into windows of `context` tokens (default: 512, or the models' maximum if less). Each token is
    predicted from the tokens before it in its window. A text with media is not cut. Their placeholders are not
    predicted, and a reference also gives the error of the rows of towers.

    `reference`: the model to compare with; needs the same tokenizer. `progress`: shows a bar on a terminal or in a
    notebook.

    **Memory**: 16 MB of logits for each model, or 128 rows if that is more, and a few numbers for each token. A text is
    tokenised in one piece.
    **Numerics**: softmax, differences and all sums in float64, from float32 logits.

    Raises ValueError for texts of fewer than two tokens, for a context below two or above the models' maximum, and for
    models with different vocabularies."""
    models = [model] if reference is None else [model, reference]
    context = read_context(context, min(m.max_seq_len for m in models))
    rows = read_rows(texts, model)
    if reference is not None:
        _check_comparable(model, reference, texts, rows)
    num_tokens = sum(int(row.predicted.sum()) for row in rows)
    if num_tokens < 1:
        raise ValueError("the text has fewer than two tokens, so there is nothing to predict; give a longer one")
    num_rows = max(MIN_ROWS, PIECE_BYTES // (4 * model.config.vocab_size))
    parts: list[Tensor] = []
    with progress_bar(num_tokens, "Evaluating", progress, unit="tok") as report:
        for some in _batches(_windows(rows, context), num_rows):
            for logits, targets in _predictions(models, some, num_rows):
                parts.append(compare(logits, targets))
                report(len(targets))
    media = {span.media.digest: span.media for row in rows for span in row.media}
    tower = _row_error(model, reference, list(media.values())) if media and reference is not None else None
    return replace(_summary(torch.cat(parts, dim=1)), tower=tower)


def _row_error(model: LLMModel, reference: LLMModel, media: Sequence[Media]) -> RowError:
    """Encodes the media with the towers of both models."""
    num_rows, difference, size, cosines = 0, 0.0, 0.0, []
    for medium in media:
        found, wanted = (_encode(each, medium).double() for each in (model, reference))
        num_rows += len(found)
        difference += float((found - wanted).square().sum())
        size += float(wanted.square().sum())
        cosines.append(torch.cosine_similarity(found, wanted).min().item())
    return RowError(num_rows, math.sqrt(difference / size), min(cosines))


def _encode(model: LLMModel, medium: Media) -> Tensor:
    """Rows `[num_tokens, W]` of a tower, computed between the steps of other requests."""

    def run(engine: Engine) -> Tensor:
        encoding = engine.model.encode(medium)
        while True:
            try:
                next(encoding)
            except StopIteration as end:
                return end.value

    return model.generator.driver.call(run).result()


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


def _batches(parts: Iterable[Row], num_tokens: int) -> Iterator[list[Row]]:
    """Groups consecutive windows into batches of at most `num_tokens` tokens. A longer window is a batch by itself, and
    so is one with media."""
    batch: list[Row] = []
    for part in parts:
        is_full = batch and sum(len(row.tokens) for row in batch) + len(part.tokens) > num_tokens
        if is_full or (batch and (part.media or batch[-1].media)):
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


def _predictions(
    models: Sequence[LLMModel], batch: Sequence[Row], num_rows: int
) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yields the logits of each model and the target tokens of all windows of a batch, concatenated. A single window is
    computed in pieces of `num_rows`."""
    with ExitStack() as stack:
        sessions = [[stack.enter_context(model.session()) for _ in batch] for model in models]
        if batch[0].media:
            yield from _after_media([own for (own,) in sessions], batch[0], num_rows)
            return
        longest = max(len(row.tokens) for row in batch)
        for start in range(0, longest - 1, num_rows if len(batch) == 1 else longest):
            pieces = [row.tokens[start : start + num_rows + 1] for row in batch]
            appends = [[(each, piece[:-1]) for each, piece in zip(own, pieces)] for own in sessions]
            logits = [torch.cat(append_each(some, "all")) for some in appends]
            yield logits, torch.tensor([token for piece in pieces for token in piece[1:]])


def _after_media(sessions: Sequence[Session], row: Row, num_rows: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """`_predictions` of a window with media. Each medium is appended as a whole. Placeholders are no targets."""
    tokens, predicted = row.tokens, row.predicted
    for start, end, media in _runs_of(row, num_rows):
        piece = Prompts([tokens[start:end]], None, [media] if media else None)
        count = 1 if media else end - start
        logits = [session.append(piece, count) for session in sessions]
        wanted = predicted[end - count : end]
        if wanted.any():
            yield [rows[wanted] for rows in logits], torch.tensor(tokens[end - count + 1 : end + 1])[wanted]


def _runs_of(row: Row, num_rows: int) -> Iterator[tuple[int, int, tuple[MediaSpan, ...]]]:
    """Cuts all tokens but the last into text of at most `num_rows` tokens, and media. Yields start, end, and the media
    with their places in the piece."""
    length, at, spans = len(row.tokens) - 1, 0, []
    for span in (*row.media, None):
        begin = length if span is None else min(span.start, length)
        if not spans:  # or the text is between two runs of a medium
            for start in range(at, begin, num_rows):
                yield start, min(start + num_rows, begin), ()
            at = begin
        if span is not None:
            spans.append(replace(span, start=span.start - at))
            if span.is_last:
                yield at, span.end, tuple(spans)
                at, spans = span.end, []


def _summary(values: Tensor) -> Evaluation:
    means = values.mean(dim=1).tolist()
    if len(means) == 1:
        return Evaluation(values.shape[1], math.exp(means[0]))
    loss, reference_loss, divergence, agreement = means
    return Evaluation(
        values.shape[1], math.exp(loss), divergence, values[2].max().item(), agreement, math.exp(reference_loss)
    )


def _check_comparable(model: LLMModel, reference: LLMModel, texts: Sequence[Text], rows: list[Row]) -> None:
    sizes = model.config.vocab_size, reference.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the model has {sizes[0]} tokens and the reference {sizes[1]}: their predictions cannot be compared"
        )
    if reference.tokenizer is None:
        return
    if [_key(row) for row in rows] != [_key(row) for row in read_rows(texts, reference)]:
        raise ValueError(
            "the tokenizers of the model and the reference encode the text differently, so their predictions cannot be "
            "compared"
        )


def _key(row: Row) -> tuple[list[int], list[bytes]]:
    """What two models must read alike: tokens and media."""
    return row.tokens, [span.media.digest for span in row.media]
