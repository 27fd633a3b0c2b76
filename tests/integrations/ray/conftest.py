"""ray is an extra: if it is not installed, nothing here is collected. `make conformance ARGS=ray` runs these tests with
ray installed."""

from __future__ import annotations

import importlib.util
import os

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("ray") else ["test_*.py"]


@pytest.fixture(scope="session")
def cluster():
    """Ray on this machine, with Ray Serve on a free port."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    from tests.integrations.ray.cluster import Cluster

    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def app(cluster):
    """Two replicas with one thread each, started by one command."""
    from tests.integrations.ray.cluster import wait_until

    with cluster.serving("num_replicas=2", "num_threads=1", "kv_cache_bytes=64MiB", "served_model_name=tiny") as app:
        wait_until(lambda: len(app.replicas) == 2)  # `serve run` is ready with the first replica
        yield app
