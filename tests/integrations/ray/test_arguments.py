"""The arguments of the application: those of `pace serve` by name, and the number of replicas. No cluster."""

from __future__ import annotations

import pytest

from pace.assets import TINY
from pace.integrations.ray import app
from pace.integrations.ray.arguments import read_arguments


def test_values_of_the_command_line_are_read_as_pace_serve_reads_them():
    found = read_arguments(
        {
            "model": str(TINY), "num_replicas": "3", "num_threads": "2", "kv_cache_bytes": "1GiB", "strict": "true",
            "max_queue": "7", "dtype": "float32", "local_files_only": "false", "pin_threads": "false", "balance": "2",
        }
    )  # fmt: skip
    assert (found.num_replicas, found.num_threads, found.autoscaling, found.balance) == (3, 2, None, 2.0)
    assert found.load["kv_cache_bytes"] == "1GiB" and found.load["dtype"] == "float32"
    assert found.load["pin_threads"] is False and "local_files_only" not in found.load
    assert found.serve.strict and found.serve.limits.max_queue == 7 and found.serve.model == str(TINY)


def test_values_of_yaml_have_their_types():
    found = read_arguments(
        {"num_replicas": 2, "num_threads": 4, "served_model_name": ["a", "b"], "strict": False, "prompt_lookup": True}
    )
    assert found.serve.model_names == ("a", "b") and not found.serve.strict and found.num_replicas == 2
    assert type(found.load["spec_config"]).__name__ == "PromptLookupConfig"


def test_autoscaling_is_rays():
    found = read_arguments(
        {"min_replicas": "1", "max_replicas": "4", "target_ongoing_requests": "16", "num_threads": "1"}
    )
    assert found.autoscaling == {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 16.0}
    engine = _engine(
        app({"min_replicas": "1", "max_replicas": "4", "target_ongoing_requests": "16", "num_threads": "2"})
    )
    config = engine._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas, config.target_ongoing_requests) == (1, 4, 16)
    assert engine.ray_actor_options["num_cpus"] == 2


def test_a_replica_has_as_long_as_pace_serve_gives_to_finish():
    engine = _engine(app({"drain_seconds": "7", "num_replicas": "2", "num_threads": "3"}))
    assert engine._deployment_config.graceful_shutdown_timeout_s == 7
    assert engine.num_replicas == 2 and engine.ray_actor_options["num_cpus"] == 3


@pytest.mark.parametrize(
    "given, words",
    [({"num_replica": "2"}, "there is no argument num_replica; did you mean num_replicas?"),
     ({"quantisation": "int8"}, "did you mean quantization?"), ({"zzz": "1"}, "there is no argument zzz"),
     ({"num_replicas": "two"}, "num-replicas: invalid int value: 'two'"),
     ({"num_replicas": "0"}, "num_replicas must be at least 1; got 0"),
     ({"balance": "0.5"}, "balance must be at least 1; got 0.5"),
     ({"num_replicas": "2"}, "num_threads: say how many threads"),
     ({"max_replicas": "2"}, "num_threads: say how many threads"),
     ({"min_replicas": "2"}, "min_replicas need max_replicas"),
     ({"num_replicas": "2", "max_replicas": "3"}, "give one"), ({"num_threads": "0"}, "num_threads must be from 1 to"),
     ({"port": "80"}, "port: Ray's proxy holds the connections"), ({"body_seconds": "1"}, "body_seconds: Ray's proxy"),
     ({"access_log": "true"}, "access_log: Ray Serve has one"),
     ({"max_n": "0"}, "n must be at least 1"), ({"kv_cache_type": "rope"}, "invalid choice: 'rope'"),
     ({"quantization": "int3"}, "int3"), ({"kv_cache_bytes": "much"}, "much"),
     ({"api_key_file": "/nowhere"}, "api_key_file: cannot read /nowhere"),
     ({"cors_origin": ["*"]}, "cors_origins"), ({"lora_dir": "."}, "one replica"), ({"task": "embed"}, "pace serve")],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_name(given, words):
    with pytest.raises((ValueError, TypeError), match=words.replace("?", r"\?")):
        app(given)


def _engine(application):
    """The deployment of the replicas."""
    return application._bound_deployment.init_args[0]._bound_deployment
