"""Ray Serve's request router that asks the index."""

from __future__ import annotations

import random
from contextlib import suppress

import ray
from ray.exceptions import RayError
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvgraph.serve.replicas.index_calls import answer_of
from kvgraph.serve.replicas.messages import Order


class PageRouter(RequestRouter):  # type: ignore[misc]
    """Ranks replicas by the routing index; in random order if the index does not answer.

    `initialize_state`: takes name and namespace of the index's actor. The first argument of a
    request is its `Order`.
    """

    def initialize_state(self, name: str, namespace: str) -> None:
        self._index = ray.get_actor(name, namespace=namespace)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return one replica in each rank: Ray tries the next if one accepts no more."""
        named = {str(replica.replica_id.unique_id): replica for replica in candidate_replicas}
        order = random.sample(list(named), len(named))
        for given in [] if pending_request is None else pending_request.args[:1]:
            if not isinstance(given, Order):
                continue
            asked = (given.request_id, list(named), given.chain, given.num_tokens)
            with suppress(RayError):  # the index restarts, or hangs
                order = await answer_of(self._index.choose.remote(*asked))
        return [[named[name]] for name in order]

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._index.forget.remote(str(replica_id.unique_id))
