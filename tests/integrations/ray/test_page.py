"""`serve run` accepts the file that docs/scaling.md shows."""

from __future__ import annotations

import json
import re

import pytest

from tests.integrations.ray.cluster import ROOT, free_port, wait_until

pytestmark = pytest.mark.thorough

PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")


def test_the_file_of_the_page_serves(cluster, tmp_path):
    (text,) = re.findall(r"^```text\n(http_options:\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    port, file = free_port(), tmp_path / "pace.yaml"
    file.write_text(text.replace("8000", str(port)))
    with cluster.running(port, str(file)) as app:
        names = [model["id"] for model in json.loads(app.ask("/v1/models")[2])["data"]]
        assert names == ["tiny", "small"]
        wait_until(lambda: len(app.replicas) == 2)
        assert "Paris" in app.complete("The capital of France is", max_tokens=8)["choices"][0]["text"]
