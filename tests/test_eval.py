"""`pace.eval` and `pace eval`: the numbers against formulas written out, the windows, the memory, and refusals."""

from __future__ import annotations

import functools
import json
import math

import pytest
import torch

from pace import eval as evaluation
from pace.assets import TINY, TINY_DRAFT
from pace.cli import main
from pace.eval import compare, encode, evaluate, read_texts, windows
from pace.llm import LLMModel
from tests.llm.models.variants import save_tiny

pytest.importorskip("transformers")
TEXTS = [
    "The capital of Japan is Tokyo.\n",
    "One day Lily went to the park. She saw a big red ball there and was very happy.",
]


@functools.cache
def model(path=TINY, dtype: str = "bfloat16") -> LLMModel:
    return LLMModel(path, dtype=dtype, progress=False)


def test_compare_is_the_formula():
    generator = torch.Generator().manual_seed(0)
    logits, reference = (4 * torch.randn(5, 7, generator=generator) for _ in range(2))
    targets = torch.tensor([0, 6, 3, 3, 1])
    losses, reference_losses, divergences, agreements = compare([logits, reference], targets).tolist()
    for row in range(5):
        p, r = ([math.exp(x) for x in rows[row].tolist()] for rows in (logits, reference))
        p, r = [x / sum(p) for x in p], [x / sum(r) for x in r]
        assert losses[row] == pytest.approx(-math.log(p[targets[row]]), rel=1e-6)
        assert reference_losses[row] == pytest.approx(-math.log(r[targets[row]]), rel=1e-6)
        assert divergences[row] == pytest.approx(sum(b * math.log(b / a) for a, b in zip(p, r)), rel=1e-6)
        assert agreements[row] == (p.index(max(p)) == r.index(max(r)))
    assert torch.equal(compare([logits], targets), compare([logits, reference], targets)[:1])


def test_perplexity_is_that_of_scores():
    result = evaluate(model(), TEXTS, progress=False)
    scores = torch.cat(model().score(TEXTS)).double()
    assert evaluate(model(), encode(TEXTS, model().tokenizer, 2048), progress=False) == result
    assert result.num_tokens == len(scores) and result.perplexity == pytest.approx(math.exp(-scores.mean()), rel=1e-6)
    assert (result.kl_divergence, result.kl_max, result.top1_agreement, result.reference_perplexity) == (None,) * 4


def test_a_model_is_like_itself_and_unlike_another():
    same = evaluate(model(), TEXTS, model(), progress=False)
    assert (
        same.kl_divergence == same.kl_max == 0
        and same.top1_agreement == 1
        and same.perplexity == same.reference_perplexity
    )
    other = evaluate(model(TINY_DRAFT), TEXTS, model(), progress=False)
    assert 0 < other.kl_divergence < other.kl_max and other.top1_agreement < 1
    assert other.reference_perplexity == same.perplexity != other.perplexity
    rounded = evaluate(model(), TEXTS, model(dtype="float32"), progress=False)
    assert 0 < rounded.kl_divergence < 0.01 * other.kl_divergence
    assert "reference" in str(other) and "KL" not in str(evaluate(model(), TEXTS, progress=False))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 7, 8, 9, 10, 13])
def test_windows_predict_every_token_once(length):
    row = list(range(length))
    parts = list(windows([row], 4))
    assert [token for part in parts for token in part[1:]] == row[1:]
    assert all(2 <= len(part) <= 4 for part in parts) and all(a[-1] == b[0] for a, b in zip(parts, parts[1:]))


def test_the_context_bounds_what_is_seen():
    ids = model().tokenizer(TEXTS[1])["input_ids"]
    parts = list(windows([ids], 8))
    assert len(parts) > 2
    scores = torch.cat(model().score(parts)).double()
    assert evaluate(model(), TEXTS[1:], context=8, progress=False).perplexity == pytest.approx(
        math.exp(-scores.mean()), rel=1e-6
    )


def test_pieces_change_nothing_and_bound_the_logits(monkeypatch):
    whole = evaluate(model(), TEXTS, model(TINY_DRAFT), progress=False)
    sizes = []
    monkeypatch.setattr(evaluation, "PIECE_BYTES", 5 * 4 * 2048)
    monkeypatch.setattr(evaluation, "MIN_ROWS", 1)
    monkeypatch.setattr(
        evaluation, "compare", lambda logits, targets: sizes.append(len(targets)) or compare(logits, targets)
    )
    assert evaluate(model(), TEXTS, model(TINY_DRAFT), progress=False) == whole
    assert max(sizes) == 5 and sum(sizes) == whole.num_tokens


def test_texts_share_steps_and_change_nothing(monkeypatch):
    """Each token's numbers are, bit for bit, those of its text evaluated separately."""
    ids = model().tokenizer(TEXTS[1])["input_ids"]
    rows = [ids[start : start + 2 + start % 7] for start in range(12)]
    batches, build, steps = model().generator.engine.batches, model().generator.engine.batches.build, []
    monkeypatch.setattr(batches, "build", lambda spans, kv: steps.append(len(spans)) or build(spans, kv))
    together = evaluate(model(), rows, model(TINY_DRAFT), progress=False)
    assert steps == [12]
    parts = []
    for row in rows:
        alone = [m.session().append(row[:-1], logits="all") for m in (model(), model(TINY_DRAFT))]
        parts.append(compare(alone, torch.tensor(row[1:])))
    assert together == evaluation._summary(torch.cat(parts, dim=1))


def test_batches():
    rows = [evaluation.Row([0] * length) for length in (3, 4, 5, 9, 2, 2, 3)]
    found = [[len(row.tokens) for row in batch] for batch in evaluation._batches(rows, 7)]
    assert found == [[3, 4], [5], [9], [2, 2, 3]]


def test_a_text_with_its_own_beginning_gets_no_second_one():
    [row] = encode(["<|bos|>Hello"], model().tokenizer, 2048)
    assert row == model().tokenizer("Hello")["input_ids"] and row[0] == model().tokenizer.bos_token_id


def test_files(tmp_path):
    lines = tmp_path / "texts.jsonl"
    lines.write_text('{"text": "a\\u2028b"}\n\n{"text": "c\\nd", "more": 1}\n', encoding="utf-8")
    assert read_texts(lines) == ["a\u2028b", "c\nd"]
    plain = tmp_path / "text.txt"
    plain.write_text("a\nb\n")
    assert read_texts(plain) == ["a\nb\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt", b" \n", "holds no text"),
        ("a.jsonl", b"", "holds no text"),
        ("a.jsonl", b'{"text": "x"}\n{"text"', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b"[" * 100_000, "not JSON"),
        ("a.jsonl", b'{"txt": "x"}', 'must be an object with a "text"'),
        ("a.jsonl", b'["x"]', 'must be an object with a "text"'),
    ],
)
def test_files_that_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_texts(tmp_path / name)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing to predict"):
        evaluate(model(), ["", "<|bos|>"], progress=False)
    with pytest.raises(ValueError, match="nothing to predict"):
        evaluate(model(), [""], progress=False)
    for context in (1, 1025):
        with pytest.raises(ValueError, match="context must be from 2 to the 1024"):
            evaluate(model(), TEXTS, context=context, progress=False)
    save_tiny(tmp_path, "llama", {})
    with pytest.raises(ValueError, match="2048 tokens and the reference 99"):
        evaluate(model(), TEXTS, LLMModel(tmp_path, progress=False), progress=False)


def test_the_command(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXTS[1])
    assert main(["eval", "--text", str(text), "--against", str(TINY_DRAFT), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kl_divergence"] == evaluate(model(), TEXTS[1:], model(TINY_DRAFT), progress=False).kl_divergence
    assert main(["eval", str(TINY), "--text", str(text), "--dtype", "fp32", "--against", "bf16", "--context", "8"]) == 0
    output = capsys.readouterr().out
    assert "perplexity" in output and "top-1 agreement" in output
    assert output.splitlines()[0].split() == ["model", f"{TINY},", "float32"] and result["held_as"] == "bfloat16"
    assert main(["eval", "--text", str(tmp_path / "none.txt")]) == 1
    assert (
        capsys.readouterr().err
        == f"pace: error: the text '{tmp_path}/none.txt' cannot be read: No such file or directory\n"
    )
    with pytest.raises(SystemExit):
        main(["eval"])
