"""Which replica answers: requests that begin alike go to the same one, whose prefix cache knows their beginning.

Rendezvous hashing: each replica has a score for each beginning, and the highest one gets it. So every process comes to
the same choice without a word to the others, and a replica that comes or goes moves its own share alone. A replica whose
load is far above the average is passed by for the next in the ranking (consistent hashing with bounded loads, Mirrokni,
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
"""What counts of a prompt without turns: with more, a text that goes on growing would change its key."""
START_TOKENS = 256
FEW = 8
"""Requests that a replica always takes: steps of so few sequences are bound by reading the weights, and take little
longer than those of one. A prompt that is read once more takes longer."""

T = TypeVar("T")


def prefix_key(body: bytes, salt: str | None) -> str:
    """A name for how a request begins, of printable ASCII; "" where it cannot be told.

    In a conversation that is everything up to its first question, which stays as turns are added; of a prompt its first
    START_CHARACTERS. `prompt_cache_key` of OpenAI's API stands for it where it is given. `salt` is the client's: prefix
    caches are not shared across salts.
    """
    try:
        request = json.loads(body)
        start = _start(request) if isinstance(request, dict) else None
    except (ValueError, RecursionError):  # the replica says what is wrong with it
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
    before = [request.get("system"), request.get("instructions")]  # Anthropic's, and that of responses
    turns = request.get("messages", request.get("input"))
    if isinstance(turns, str):
        return [*before, turns]
    if not isinstance(turns, list):
        return None
    questions = (i for i, turn in enumerate(turns) if isinstance(turn, dict) and turn.get("role") == "user")
    return [*before, *turns[: next(questions, 0) + 1]]


def _start_of_text(prompt: Any) -> Any:
    """The first of several prompts stands for all."""
    if isinstance(prompt, str):
        return prompt[:START_CHARACTERS]
    if isinstance(prompt, list) and prompt:
        return _start_of_text(prompt[0]) if isinstance(prompt[0], (str, list)) else prompt[:START_TOKENS]
    return None


def ranking(key: str, replicas: Sequence[T], names: Sequence[str], loads: Sequence[int], balance: float) -> list[T]:
    """The replicas in the order in which they should be asked for `key`: by score, but for those that have `balance`
    times the average of `loads` already, and not just FEW, which come last."""
    most = max(FEW, math.ceil(balance * (sum(loads) + 1) / len(replicas)))
    scores = [hashlib.blake2b(f"{key}/{name}".encode(), digest_size=8).digest() for name in names]
    order = sorted(range(len(replicas)), key=lambda i: (loads[i] < most, scores[i]), reverse=True)
    return [replicas[i] for i in order]


class PrefixRouter(RequestRouter):
    """Ray's part of it. The key travels as the `session_id` of a call; calls without one go to the replica with the
    least load. `balance` as in `ranking`."""

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
        """Requests under way: what the replica has said last, of every ingress, or what this one has sent since."""
        return max(self.replica_queue_len_cache.get(replica_id) or 0, self._sent[replica_id])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # rather than ask full replicas without a pause
        key = pending_request.metadata.session_id
        if not key:
            return [candidate_replicas]
        names = [replica.replica_id.unique_id for replica in candidate_replicas]
        loads = [self._load(replica.replica_id) for replica in candidate_replicas]
        return [[replica] for replica in ranking(key, candidate_replicas, names, loads, self._balance)]
