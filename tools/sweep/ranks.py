"""The processes that work through the cases together: where they meet, and how they part from one that is stuck."""

import datetime
import json
import os
from typing import Any

import torch.distributed as dist

COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=20)
STORE_TIMEOUT = datetime.timedelta(seconds=300)

Outcome = dict[str, Any]


class Ranks:
    """The processes that work through the cases, and this one's place among them."""

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = self.connect(STORE_TIMEOUT)
        self.groups = 0

    def connect(self, timeout: datetime.timedelta) -> dist.Store:
        """Return a connection to the store, in which a question waits so long for its answer."""
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=timeout)

    def join(self) -> None:
        """Start the default group."""
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"group/{self.groups}", self.connect(COLLECTIVE_TIMEOUT)),
            rank=self.rank,
            world_size=self.world_size,
            timeout=COLLECTIVE_TIMEOUT,
        )

    def renew(self) -> None:
        """Leave a group in which a rank may still wait for another, and start a new default group."""
        dist.destroy_process_group()
        self.groups += 1
        self.join()

    def tell(self, topic: str, outcome: Outcome) -> None:
        """Leave something for all ranks to read."""
        self.store.set(topic, json.dumps(outcome))

    def hear(self, topic: str) -> Outcome:
        """Return what a rank left, waiting for it."""
        heard: Outcome = json.loads(self.store.get(topic))
        return heard
