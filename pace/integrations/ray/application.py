"""The Ray Serve application: `serve run pace.integrations.ray:app model=PATH num_replicas=2 num_threads=8`."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from pace.integrations.ray.arguments import Arguments, read_arguments
from pace.integrations.ray.ingress import Ingress
from pace.integrations.ray.replica import Replica
from pace.integrations.ray.routing import PrefixRouter
from pace.llm.loading.options import LoadOptions, read_threads

ONGOING = 1024
"""Maximum concurrent requests of a replica and of an ingress. The replica's own queue is full far earlier: it knows the
cost of a request, and how long a refused one should wait."""


def app(args: dict[str, Any]) -> serve.Application:
    """Builds an application of Ray Serve. `args`: see `pace.integrations.ray.arguments`. Raises ValueError or TypeError
    that names the wrong argument."""
    asked = read_arguments(args)
    LoadOptions(**asked.load)  # raises for options that no model supports
    num_threads = _threads(asked)
    drain_seconds = asked.serve.limits.drain_seconds
    router = RequestRouterConfig(request_router_class=PrefixRouter, request_router_kwargs={"balance": asked.balance})
    replicas = serve.deployment(Replica, name="engine").options(
        **({"autoscaling_config": asked.autoscaling} if asked.autoscaling else {"num_replicas": asked.num_replicas}),
        ray_actor_options={"num_cpus": num_threads},
        max_ongoing_requests=ONGOING,
        request_router_config=router,
        graceful_shutdown_timeout_s=drain_seconds,
    )
    ingress = serve.deployment(Ingress, name="ingress").options(
        num_replicas=asked.num_ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=ONGOING,
        graceful_shutdown_timeout_s=drain_seconds,
    )
    return ingress.bind(replicas.bind(asked.serve, asked.load), asked.serve)


def _threads(asked: Arguments) -> int:
    """Threads of a replica. A single one gets the number that `pace serve` would use; several must name theirs."""
    if asked.num_threads is not None:
        return read_threads(asked.num_threads)[0]
    if asked.num_replicas > 1 or asked.autoscaling:
        raise ValueError("num_threads: say how many threads, and so CPUs, each of several replicas has")
    return read_threads(None)[0]
