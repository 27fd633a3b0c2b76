"""The soak tests, for a few seconds or a minute. `python -m tests.server.faults.soak --seconds 3600` runs longer.
`media_soak` takes the same options."""

from __future__ import annotations

import pytest

pytest.importorskip("starlette")
pytestmark = [pytest.mark.alone, pytest.mark.timeout(600)]  # it measures memory


@pytest.mark.parametrize(
    ("seconds", "num_honest", "num_faulty", "least"),
    [(2.0, 8, 8, 21), pytest.param(55.0, 32, 12, 101, marks=pytest.mark.thorough)],
)
def test_honest_texts_stay_exact_beside_faulty_clients(seconds, num_honest, num_faulty, least):
    from tests.server.faults.soak import soak

    soak(seconds, num_honest, num_faulty, seed=1, least={"honest": least})


@pytest.mark.thorough
def test_answers_about_images_and_sound_stay_exact():
    pytest.importorskip("PIL.Image")
    pytest.importorskip("transformers")
    from tests.server.faults.media_soak import media_soak

    media_soak(60.0, num_honest=16, num_faulty=12, seed=1, **{"honest": 101, "left in its encoding": 11})


@pytest.mark.parametrize("seconds", [2.0, pytest.param(60.0, marks=pytest.mark.thorough)])
def test_answers_of_a_model_with_states_stay_exact(seconds):
    pytest.importorskip("transformers")
    from tests.server.faults.state_soak import state_soak

    counts = state_soak(seconds, num_honest=24, num_faulty=8, seed=1, honest=21)
    assert counts["slots in the index"] > 0, counts
