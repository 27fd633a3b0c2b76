"""Chooses replicas: requests with a common prefix go to the same one, which has it in its prefix cache.

Rendezvous hashing: each replica has a score for each prefix, and the highest one gets the request. All processes make
the same choice without communication, and adding or removing a replica only moves its own share. A replica with a load
far above the average is skipped for the next in the ranking. Source: consistent hashing with bounded loads (Mirrokni,
Thorup and Zadimoghaddam, 2016).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, TypeVar

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from pace.integrations.ray.arguments import BALANCE

START_CHARACTERS = 1024
"""Part of a plain prompt that the key depends on; with more, the key of a growing text would change."""
START_TOKENS = 256
FEW = 8
"""Requests that a replica always accepts: such small steps are bound by reading the weights, and take little longer
than for one sequence. Prefilling a prompt again takes longer."""

T = TypeVar("T")


def prefix_key(body: bytes, salt: str | None) -> str:
    """Returns a printable ASCII key for the prefix of a request; "" if it has none.

    The prefix of a conversation is everything up to its first question, which stays the same as turns are added. The
    prefix of a plain prompt is its first START_CHARACTERS. A `prompt_cache_key` of OpenAI's API replaces either. `salt`
    belongs to the client: prefix caches are not shared across salts.
    """
    try:
        request = json.loads(body)
        start = _start(request) if isinstance(request, dict) else None
    except (ValueError, RecursionError):  # the replica reports the error
        return ""
    if start is None:
        return ""
    named = [salt, request.get("cache_salt"), start]
    return hashlib.blake2b(json.dumps(named).encode(), digest_size=16).hexdigest()


def _start(request: dict[str, Any]) -> Any:
    if isinstance(key := request.get("prompt_cache_key"), str) and key:
        return key
    if "prompt" in request:
        return _start_of_text(request["prompt"])
    before = [request.get("system"), request.get("instructions")]  # of Anthropic's API, and of OpenAI's responses
    turns = request.get("messages", request.get("input"))
    if isinstance(turns, str):
        return [*before, turns]
    if not isinstance(turns, list):
        return None
    questions = (i for i, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user")
    return [*before, *turns[: next(questions, 0) + 1]]


def _start_of_text(prompt: Any) -> Any:
    """Prefix of a prompt; of several prompts, that of the first."""
    if isinstance(prompt, str):
        return prompt[:START_CHARACTERS]
    if isinstance(prompt, list) and prompt:
        return _start_of_text(prompt[0]) if isinstance(prompt[0], (str, list)) else prompt[:START_TOKENS]
    return None


def ranking(key: str, replicas: Sequence[T], names: Sequence[str], loads: Sequence[int], balance: float) -> list[T]:
    """Returns the replicas in the order in which to try them for `key`: by score, with overloaded ones last. Overloaded
    means at least `balance` times the average of `loads`, and at least FEW."""
    limit = max(FEW, math.ceil(balance * (sum(loads) + 1) / len(replicas)))
    scores = [hashlib.blake2b(f"{key}/{name}".encode(), digest_size=8).digest() for name in names]
    order = sorted(range(len(replicas)), key=lambda i: (loads[i] < limit, scores[i]), reverse=True)
    return [replicas[i] for i in order]


class PrefixRouter(RequestRouter):
    """Ray's router for prefixes. The key travels as the `session_id` of a call; calls without one go to the replica
    with the least load. `balance` as in `ranking`."""

    def initialize_state(self, balance: float = BALANCE) -> None:
        self._balance = balance
        self._sent: Counter[ReplicaID] = Counter()

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        super().on_request_completed(replica_id, internal_request_id)
        self._sent[replica_id] -= 1
        if self._sent[replica_id] <= 0:
            del self._sent[replica_id]

    def _load(self, replica_id: ReplicaID) -> int:
        """Requests in flight: the replica's last report (of all ingresses), or those that this ingress has sent, if
        more."""
        return max(self.replica_queue_len_cache.get(replica_id) or 0, self._sent[replica_id])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # do not ask full replicas in a tight loop
        key = pending_request.metadata.session_id
        if not key:
            return [candidate_replicas]
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        loads = [self._load(replica.replica_id) for replica in candidate_replicas]
        return [[replica] for replica in ranking(key, candidate_replicas, names, loads, self._balance)]
