"""The embedder of an encoder: callers of several threads, what it refuses, cancelling, closing, and loading it."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
import torch

from pace.llm.encoding.embedder import LOGITS, TextTokens
from pace.llm.encoding.encoder_driver import EncoderDriver
from pace.llm.encoding.load import open_encoder
from pace.llm.loading.options import LoadOptions
from tests.llm.models.encoders.oracle import random_texts
from tests.llm.models.encoders.variants import VARIANTS, save_encoder
from tests.support import exit_code_in_fork
from tests.waiting import PATIENCE, Gate, wait_until

pytest.importorskip("transformers")

MEAN = ("mean",)
CLOSED = "closed; load it again with EmbeddingModel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    save_encoder(folder, VARIANTS["bert-classifier"])
    return folder


def open_driver(folder, **options) -> EncoderDriver:
    return open_encoder(LoadOptions(folder, dtype="float32", progress=False, **options)).driver


@pytest.fixture
def driver(folder):
    driver = open_driver(folder)
    yield driver
    driver.close()


def gated(driver: EncoderDriver) -> Gate:
    """Blocks steps until the gate is opened."""
    gate, queue = Gate(), driver.driver.engine
    run = queue._run
    queue._run = lambda *step: (gate(), run(*step))[1]
    return gate


def test_callers_of_several_threads_get_the_rows_that_they_get_alone(driver):
    texts = random_texts(driver.encoder)
    alone = torch.cat([driver.rows([text], MEAN) for text in texts])
    logits = driver.logits(texts)
    assert alone.shape == (len(texts), 32) and logits.shape == (len(texts), 3)
    before = driver.metrics().tokens
    with ThreadPoolExecutor(6) as pool:
        found = [pool.submit(driver.rows, texts[::-1] * 3, MEAN) for _ in range(6)]
        assert torch.equal(driver.logits(texts), logits)
        for future in found:
            assert torch.equal(future.result(60), alone.flip(0).repeat(3, 1))
    assert driver.metrics().tokens - before == 19 * sum(map(len, texts))
    assert torch.equal(driver.rows(texts, ("cls", "mean")), torch.cat([driver.rows(texts, ("cls",)), alone], 1))
    assert driver.rows([], ("max", "cls")).shape == (0, 64) and driver.logits([]).shape == (0, 3)


def test_what_is_refused(driver):
    ids = lambda *tokens, types=None: [TextTokens((1,)), TextTokens(tokens, types)]
    for message, texts, what in [
        ("text 1 has no tokens", ids(), MEAN),
        ("text 1 has 81 tokens, more than the 80", ids(*range(81)), MEAN),
        ("text 1 has the token id 97; ids of this model are 0 to 96", ids(3, 97), MEAN),
        ("text 1 has the token id -1", ids(-1), LOGITS),
        ("text 1 has the token type 2; types of this model are 0 to 1", ids(3, 4, types=(0, 2)), MEAN),
        ("text 1 has 2 tokens, and 1 types", ids(3, 4, types=(0,)), MEAN),
        ("pooling must be one of cls, max", ids(3), ("sum",)),
        ("pooling must be a tuple", ids(3), "mean"),
        ("pooling must be a tuple", ids(3), ()),
    ]:
        with pytest.raises(ValueError, match=message):
            driver.submit(texts, what)
    assert driver.metrics().waiting_texts == 0


def test_an_encoder_without_a_classifier_has_no_logits(tmp_path):
    save_encoder(tmp_path, VARIANTS["roberta"])
    driver = open_driver(tmp_path)
    assert driver.num_labels == 0 and driver.max_length == 78
    with pytest.raises(ValueError, match="no classifier"):
        driver.logits([TextTokens((1, 2))])
    driver.close()


def test_cancelling_during_a_step(driver):
    gate = gated(driver)
    first = driver.submit([TextTokens((1, 2))], MEAN)
    gate.wait_inside()
    waiting = [driver.submit([TextTokens((3, 4))], MEAN) for _ in range(3)]
    assert waiting[1].cancel() and first.cancel()
    gate.open()
    assert torch.equal(waiting[0].result(60), waiting[2].result(60))
    for future in (first, waiting[1]):
        with pytest.raises(CancelledError):
            future.result(60)
    assert driver.metrics().texts == 3


def test_closing_fails_what_waits_and_frees_the_model(folder):
    driver = open_driver(folder)
    gate, encoder = gated(driver), weakref.ref(driver.encoder)
    first = driver.submit([TextTokens((1, 2))], MEAN)
    gate.wait_inside()
    second = driver.submit([TextTokens((1, 2, 3))], MEAN)
    closing = threading.Thread(target=driver.close)
    closing.start()
    wait_until(lambda driver=driver: driver.driver._why_ended is not None)
    gate.open()
    closing.join(PATIENCE)
    assert first.result(0).shape == (1, 32)
    with pytest.raises(ValueError, match=CLOSED):
        second.result(0)
    with pytest.raises(ValueError, match=CLOSED):
        driver.rows([TextTokens((1,))], MEAN)
    with pytest.raises(ValueError, match=CLOSED):
        driver.metrics()
    driver.close()
    del driver, gate, closing
    gc.collect()
    assert encoder() is None


def test_an_unused_driver_is_freed_with_its_thread(folder):
    driver = open_driver(folder)
    driver.rows([TextTokens((1, 2))], MEAN)
    encoder = weakref.ref(driver.encoder)
    del driver
    # Its thread may be about to look for work, and holds it for that moment.
    wait_until(lambda: (gc.collect(), encoder() is None)[1])


def test_a_child_after_fork_computes(driver):
    expected = driver.rows([TextTokens((5, 6))], MEAN)

    assert exit_code_in_fork(lambda: torch.equal(driver.rows([TextTokens((5, 6))], MEAN), expected)) == 0


def test_options(folder):
    limited = open_driver(folder, max_seq_len=5, num_threads=1)
    with pytest.raises(ValueError, match="more than the 5"):
        limited.rows([TextTokens((1,) * 6)], MEAN)
    limited.close()
    with pytest.raises(ValueError, match="max_seq_len must be from 1 to 80"):
        open_driver(folder, max_seq_len=81)


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"dtype": "bfloat16"}, {"backend": "torch"},
                                     {"backend": "native-eager"}, {"backend": "mlp=torch"}], ids=str)  # fmt: skip
def test_every_dtype_format_and_backend_runs(folder, options, driver):
    texts = random_texts(driver.encoder)
    expected = torch.nn.functional.normalize(driver.rows(texts, MEAN))
    other = open_encoder(LoadOptions(folder, **{"dtype": "float32", "progress": False, **options})).driver
    found = torch.nn.functional.normalize(other.rows(texts, MEAN))
    assert (found * expected).sum(1).min() > 0.99
    assert torch.equal(other.rows(texts[3:4], MEAN), other.rows(texts, MEAN)[3:4]) or options.get("backend") == "torch"
    other.close()


def test_a_packed_copy_gives_the_same_bits(folder, tmp_path, monkeypatch, driver):
    from pace.llm.loading import weights_cache

    monkeypatch.setattr(weights_cache, "MIN_BYTES", 0)
    monkeypatch.setenv("PACE_CACHE_SIZE", "1GiB")
    texts = random_texts(driver.encoder)
    for _ in range(2):
        other = open_driver(folder, weights_cache=tmp_path)
        assert other.encoder.mapped_nbytes > 0 and len(list(tmp_path.glob("*.weights"))) == 1
        assert torch.equal(other.rows(texts, MEAN), driver.rows(texts, MEAN))
        other.close()
