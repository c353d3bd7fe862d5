"""REINFORCE on worker groups: one's own algorithm, without rolepool's trainer. Runs on two CPU
processes.

The task: the prompt is a letter, and the answer must be the next letter. The policy is one linear
layer.

    python examples/own_algorithm.py
"""

import torch
from torch.nn.functional import cross_entropy, one_hot

from rolepool import Cluster, DataProto, Dispatch, ResourcePoolManager, Role, Worker, register
from rolepool.placement.plan import place

NUM_LETTERS, NUM_PROMPTS, NUM_STEPS = 8, 64, 60


class Policy(Worker):
    """A role: every process of its pool has one. All ranks start with the same weights."""

    def __init__(self, lr: float) -> None:
        self.model = torch.nn.Linear(NUM_LETTERS, NUM_LETTERS)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lr)

    def logits(self, data: DataProto) -> torch.Tensor:
        return self.model(one_hot(data.batch["prompts"], NUM_LETTERS).float())

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def sample(self, data: DataProto) -> DataProto:
        """Each rank samples an answer to each of its prompts."""
        answers = torch.distributions.Categorical(logits=self.logits(data)).sample()
        return DataProto.from_dict({"answers": answers})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def update(self, data: DataProto) -> float:
        """One policy gradient step. The gradients are averaged over the ranks, so their weights
        stay equal."""
        log_probs = -cross_entropy(self.logits(data), data.batch["answers"], reduction="none")
        loss = -(log_probs * data.batch["advantages"]).mean()
        self.optimizer.zero_grad()
        loss.backward()
        for parameter in self.model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        self.optimizer.step()
        return loss.item()


if __name__ == "__main__":
    pools = ResourcePoolManager({"policy_pool": [2]}, {Role.Actor: "policy_pool"})
    with Cluster(place(pools, [2], device="cpu")) as cluster:
        policy = cluster.groups["policy_pool"].add_role("actor", Policy, lr=0.1)
        for step in range(1, NUM_STEPS + 1):
            batch = DataProto.from_dict({"prompts": torch.randint(NUM_LETTERS, (NUM_PROMPTS,))})
            batch.union(policy.sample(batch).get())  # `sample` returns a future at once
            rewards = (batch.batch["answers"] == (batch.batch["prompts"] + 1) % NUM_LETTERS).float()
            batch.union(DataProto.from_dict({"advantages": rewards - rewards.mean()}))
            losses = policy.update(batch)
            if step % 10 == 0:
                print(f"step {step}: mean reward {rewards.mean():.2f}, loss of each rank {losses}")
