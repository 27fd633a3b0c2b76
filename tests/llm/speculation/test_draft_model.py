"""Proposals of draft models, compared with transformers on the same checkpoints, and the use of spec_config by
`LLMModel`."""

from __future__ import annotations

import copy
import itertools
import json
import re

import pytest
import torch

from pace.llm import DraftModelConfig, LLMModel, PardConfig, PromptLookupConfig, SamplingConfig
from pace.llm.cache.manager import CacheManager
from pace.llm.sampling.logits import Processors
from pace.llm.sampling.sampler import Sampling, draw, uniform
from pace.llm.sequence import Sequence
from pace.llm.speculation.build import check_vocabularies
from pace.llm.speculation.draft_model import DraftModel, ParallelDraftModel
from pace.llm.text.stopping_criteria import NeverStops
from pace.ops import reference
from pace.ops.rules import Rules
from tests.llm.fake_model import FakeModel
from tests.llm.models.variants import save_tiny
from tests.plugins.tiers import sample
from tests.support import load_model

MASK = 97


@pytest.fixture(scope="module")
def drafter(tmp_path_factory):
    """Returns a folder with a tiny random llama whose config.json names the mask token, and transformers' model."""
    folder = tmp_path_factory.mktemp("pard")
    theirs = save_tiny(folder, "llama", {"pard_token": MASK, "spd_type": "pard", "max_position_embeddings": 256})
    assert json.loads((folder / "config.json").read_text())["pard_token"] == MASK
    return folder, theirs


def make_source(folder, parallel: bool = False, vocab_size: int = 99, num_blocks: int = 50):
    model = load_model(folder, torch.float32, reference)
    cache = CacheManager(model.kv_spec, num_blocks * model.kv_spec.block_bytes)
    arguments = model, reference, cache, vocab_size, {}, {}
    return ParallelDraftModel(MASK, *arguments) if parallel else DraftModel(*arguments)


def make_sequence(tokens: list[int], strategy=None) -> Sequence:
    return Sequence(tokens, strategy or Sampling(), NeverStops(), max_length=250)


def logits(model, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def likeliest(row: torch.Tensor, depth: int) -> int:
    return int(row.argmax())


def one_by_one(model, tokens: list[int], length: int, pick=likeliest) -> list[int]:
    drafts: list[int] = []
    for depth in range(length):
        drafts.append(pick(logits(model, tokens + drafts)[-1], depth))
    return drafts


def at_once(model, tokens: list[int], length: int, pick=likeliest) -> list[int]:
    """PARD as published: feeds the text and length - 1 masks, and returns the predictions of the last `length` rows."""
    rows = logits(model, tokens + [MASK] * (length - 1))[-length:]
    return [pick(row, depth) for depth, row in enumerate(rows)]


@pytest.mark.parametrize("parallel", [False, True])
def test_proposals_are_those_of_transformers(drafter, parallel: bool) -> None:
    """Runs several steps that accept some, all or none of the drafts, on three texts of different lengths."""
    folder, theirs = drafter
    source, chance = make_source(folder, parallel), torch.Generator().manual_seed(3)
    reference_drafts = at_once if parallel else one_by_one
    texts = [torch.randint(0, 96, (size,), generator=chance).tolist() for size in (3, 40, 90)]
    sequences = [make_sequence(tokens) for tokens in texts]
    for step in range(12):
        lengths = [1 + (step + index) % 6 for index in range(3)]
        if step == 7:
            lengths[1] = 0
        proposals = source.propose(sequences, lengths)
        for sequence, length, drafts in zip(sequences, lengths, proposals):
            assert drafts == (reference_drafts(theirs, sequence.tokens, length) if length else [])
        for index, (sequence, drafts) in enumerate(zip(sequences, proposals)):
            num_accepted = min(len(drafts), (step * 3 + index) % 7)
            num_valid = len(sequence.tokens) + num_accepted
            sequence.tokens += [*drafts[:num_accepted], int(torch.randint(0, 96, (1,), generator=chance))]
            source.settle(sequence, num_valid)
    for sequence in sequences:
        source.forget(sequence)
    source.check_integrity()
    assert source.memory().cache_used == 0 < source.memory().cache_touched


@pytest.mark.parametrize("parallel", [False, True])
def test_samples_are_drawn_with_the_number_of_the_token_they_stand_for(drafter, parallel: bool) -> None:
    folder, theirs = drafter
    source = make_source(folder, parallel)
    sequence = make_sequence([5, 6, 7, 8], Sampling(Processors([]), Rules(), seed=11))
    sequence.tokens += [9, 10]
    picked = source.propose([sequence], [5])[0]
    reference_drafts = at_once if parallel else one_by_one
    drawn = lambda row, depth: draw(row.softmax(0), uniform(11, 2 + depth))
    assert picked == reference_drafts(theirs, sequence.tokens, 5, drawn)


def test_long_texts_are_read_in_pieces(drafter) -> None:
    folder, theirs = drafter
    source = make_source(folder)
    texts = torch.randint(0, 96, (3, 230), generator=torch.Generator().manual_seed(0)).tolist()
    sequences = [make_sequence(text) for text in texts]
    sizes = []
    forward = source.model.forward
    source.model.forward = lambda batch: (sizes.append(len(batch.tokens)), forward(batch))[1]
    drafts = source.propose(sequences, [2, 2, 2])
    assert [len(tokens) for tokens in drafts] == [2, 2, 0] and sizes == [512, 2, 2]
    assert source.propose(sequences[2:], [2]) == [one_by_one(theirs, texts[2], 2)]


@pytest.mark.parametrize("parallel", [False, True])
def test_reading_what_was_missed_makes_no_logits(drafter, parallel: bool) -> None:
    folder, theirs = drafter
    source = make_source(folder, parallel)
    rows, forward = [], source.model.forward
    source.model.forward = lambda batch: (rows.append(len(batch.logit_rows)), forward(batch))[1]
    sequence = make_sequence([1, 2, 3])
    drafts = source.propose([sequence], [3])[0]
    source.settle(sequence, 3 + 1)
    sequence.tokens += [drafts[0], *range(40, 90)]
    rows.clear()
    assert source.propose([sequence], [3]) == [(at_once if parallel else one_by_one)(theirs, sequence.tokens, 3)]
    assert rows == ([0, 3] if parallel else [0, 1, 1, 1])


def test_a_text_is_read_again_where_the_draft_models_angles_change() -> None:
    model, first = FakeModel(), []
    model.recompute_length = 20
    model.hook = lambda batch: first.append(int(batch.positions[0]))
    cache = CacheManager(model.kv_spec, 50 * model.kv_spec.block_bytes)
    source, sequence = DraftModel(model, reference, cache, model.vocab_size, {}, {}), make_sequence([7] * 17)
    for length, begin in ((17, 0), (18, 17), (20, 0), (21, 20)):
        sequence.tokens = [7] * length
        source.settle(sequence, length - 1)
        first.clear()
        assert len(source.propose([sequence], [1])[0]) == 1
        assert first[0] == begin, f"at {length} tokens it begins to read at {first}"


def test_a_smaller_vocabulary_and_a_larger_one(drafter) -> None:
    folder, theirs = drafter
    narrow = make_source(folder, vocab_size=40)
    drafts = narrow.propose([make_sequence([1, 2, 3])], [6])[0]
    narrowed = lambda row, depth: int(row[:40].argmax())
    assert drafts == one_by_one(theirs, [1, 2, 3], 6, narrowed) and max(drafts) < 40
    wide = make_source(folder, vocab_size=200)
    unknown, known = make_sequence([1, 150, 3]), make_sequence([1, 2, 3])
    first, second = wide.propose([unknown, known], [2, 2])
    assert first == [] and len(second) == 2


# -- LLMModel ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(checkpoint, tmp_path_factory):
    """Returns the folders of a target and of a draft model that lacks one of its layers, so that it is often right."""
    folder, model, tokenizer = checkpoint("llama")
    other = tmp_path_factory.mktemp("draft")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = 1
    draft = type(model)(config)
    draft.load_state_dict({name: tensor for name, tensor in model.state_dict().items() if ".layers.1." not in name})
    draft.config.pard_token = 3
    draft.save_pretrained(other)
    tokenizer.save_pretrained(other)
    return folder, other


WHOLE = list(itertools.product(["native", "torch"], ["lookup", "draft", "pard"], [False, True]))


@pytest.mark.parametrize("case", sample(WHOLE, lambda case: case in [*WHOLE[:5:2], WHOLE[11]]), ids=str)
def test_the_whole_model(pair, case: tuple[str, str, bool]) -> None:
    (backend, kind, adaptive), (folder, other) = case, pair
    spec_config = {
        "lookup": PromptLookupConfig(adaptive=adaptive),
        "draft": DraftModelConfig(other, num_draft_tokens=3, adaptive=adaptive),
        "pard": PardConfig(other, num_draft_tokens=5, adaptive=adaptive),
    }[kind]
    options = {"dtype": "float32", "backend": backend, "num_threads": 1}
    plain, drafted = LLMModel(folder, **options), LLMModel(folder, spec_config=spec_config, **options)
    prompts, greedy = [[1, 2, 3], [4] * 20, list(range(5, 50))], SamplingConfig(max_new_tokens=40)
    for config in (greedy, SamplingConfig(do_sample=True, seed=1, max_new_tokens=40, repetition_penalty=1.2)):
        ours, theirs = plain.generate(prompts, config), drafted.generate(prompts, config)
        assert ours.generated_token_ids == theirs.generated_token_ids
        assert ours.metrics.draft_speedup is None
        metrics = theirs.metrics
        if not adaptive and kind == "lookup":  # random weights generate no repetitions
            assert metrics.num_drafted_tokens > 0
        elif not adaptive:
            assert 0 < metrics.num_accepted_tokens < metrics.num_drafted_tokens
            assert f"{metrics.num_accepted_tokens} of {metrics.num_drafted_tokens} drafted" in str(metrics)


def test_the_cache_is_shared_by_what_a_token_takes(pair) -> None:
    folder, other = pair
    drafts, roomy = DraftModelConfig(other, adaptive=False), {"dtype": "float32", "kv_cache_bytes": "1MiB"}
    with LLMModel(folder, **roomy) as plain, LLMModel(folder, spec_config=drafts, **roomy) as model:
        least = 256 // 16 * plain._engine.cache.spec.block_bytes
        report, alone = model.memory_report(), plain.memory_report()
        assert report.cache_budget <= 2**20 and report.cache_tokens == pytest.approx(alone.cache_tokens * 2 / 3, abs=32)
        assert {f"draft {part}" for part in alone.weights} < set(report.weights) and report.total > alone.total
        before = report.cache_touched
        model.generate([1, 2, 3], SamplingConfig(max_new_tokens=20))
        target = model._engine.cache.touched_bytes
        assert before == 0 < target < model.memory_report().cache_touched
        assert model.memory_report().cache_used == 0
    options = {"dtype": "float32", "max_seq_len": 256, "spec_config": DraftModelConfig(other)}
    with pytest.raises(ValueError, match="kv_cache_bytes"):
        LLMModel(folder, kv_cache_bytes=least, **options)
    with LLMModel(folder, kv_cache_bytes=3 * least // 2, **options) as model:
        assert model.memory_report().cache_tokens >= 256


def test_the_cache_that_an_error_advises_is_large_enough(pair) -> None:
    folder, other = pair
    text, config = [1, 2, 3] * 60, SamplingConfig(max_new_tokens=12, ignore_eos=True)

    def load(kv_cache_bytes: int) -> LLMModel:
        options = {"dtype": "float32", "kv_cache_bytes": kv_cache_bytes, "max_seq_len": None}
        return LLMModel(folder, spec_config=DraftModelConfig(other), **options)

    with LLMModel(folder, dtype="float32", kv_cache_bytes="1MiB") as plain:
        little = 12 * plain._engine.cache.spec.block_bytes
    with load(little) as model, pytest.raises(ValueError, match="has no room for more") as told:
        model.generate(text, config)
    with load(int(re.search(r"kv_cache_bytes=(\d+)", str(told.value))[1])) as model:
        assert len(model.generate(text, config).generated_token_ids[0]) == 12


def test_what_is_no_way_to_draft_is_refused(pair, tmp_path) -> None:
    folder, other = pair
    config = json.loads((other / "config.json").read_text())
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((other / name).read_bytes())

    def refused(match: str, spec_config, error=ValueError, **fields) -> None:
        told = {name: value for name, value in (config | fields).items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(told))
        with pytest.raises(error, match=match):
            LLMModel(folder, dtype="float32", spec_config=spec_config)

    refused("names no pard_token.*DraftModelConfig", PardConfig(tmp_path), pard_token=None)
    refused("pard_token.*must be a token id", PardConfig(tmp_path), pard_token=config["vocab_size"])
    refused("pard_token.*must be a token id", PardConfig(tmp_path), pard_token=[3])
    refused("mask_token_id must be a token id", PardConfig(tmp_path, mask_token_id=100_000))
    refused("spec_config", {"model": "x"}, TypeError)
    refused("nowhere", DraftModelConfig("/nowhere/at/all"), FileNotFoundError)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [token for token in vocabulary if vocabulary[token] > 10][:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused("another tokenizer: token", DraftModelConfig(tmp_path))


class Vocabulary:
    def __init__(self, *texts: str) -> None:
        self.texts = texts

    def get_vocab(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self.texts)}


def test_vocabularies() -> None:
    same = Vocabulary("a", "b", "c")
    check_vocabularies(3, same, 3, same)
    check_vocabularies(4, same, 16, Vocabulary("a", "b", "c"))
    check_vocabularies(4, same, 16, Vocabulary("a", "b"))
    check_vocabularies(7, None, 7, None)
    with pytest.raises(ValueError, match="token 1 is 'x' to it and 'b' to the model"):
        check_vocabularies(3, same, 3, Vocabulary("a", "x", "c"))
    with pytest.raises(ValueError, match="16 token ids and the model 4, and the draft model has no tokenizer"):
        check_vocabularies(4, same, 16, None)
    with pytest.raises(ValueError, match="the model has no tokenizer"):
        check_vocabularies(4, None, 16, same)


def test_configs_check_their_fields() -> None:
    for make, error, word in [
        (lambda: PromptLookupConfig(max_ngram=0), ValueError, "max_ngram"),
        (lambda: PromptLookupConfig(min_ngram=3, max_ngram=2), ValueError, "max_ngram"),
        (lambda: PromptLookupConfig(num_draft_tokens=True), TypeError, "num_draft_tokens"),
        (lambda: PromptLookupConfig(num_draft_tokens=65), ValueError, "num_draft_tokens"),
        (lambda: DraftModelConfig("x", num_draft_tokens=0), ValueError, "num_draft_tokens"),
        (lambda: DraftModelConfig(None), TypeError, "model"),
        (lambda: DraftModelConfig("x", adaptive=1), TypeError, "adaptive"),
        (lambda: PardConfig("x", mask_token_id="<mask>"), TypeError, "mask_token_id"),
        (lambda: PardConfig("x", mask_token_id=-1), ValueError, "mask_token_id"),
    ]:
        with pytest.raises(error, match=word):
            make()
