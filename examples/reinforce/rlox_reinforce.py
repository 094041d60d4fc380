"""REINFORCE with a learned baseline (Williams 1992, doi:10.1007/BF00992696), as a package outside rlox.

If a rollout cuts an episode short, the baseline's value of the last state completes the return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlox import RolloutBatch
from rlox.config import OnPolicyConfig
from rlox.training import Learner, OnPolicyAlgorithm, follow_schedule


@dataclass
class ReinforceConfig(OnPolicyConfig):
    """REINFORCE with a learned baseline."""

    n_steps: int = 64  # steps per environment in one rollout
    learning_rate: float = 3e-3  # step size of the optimiser at the start
    gae_lambda: float = 1.0  # 1: whole discounted returns, as in the paper
    use_baseline: bool = True  # subtract the learned value of the state from the return

    def rules(self):
        yield from super().rules()
        yield "gae_lambda", self.gae_lambda == 1.0, "be 1, because REINFORCE learns from whole returns"


class Reinforce(OnPolicyAlgorithm):
    """REINFORCE: one gradient step for each rollout."""

    name = "reinforce"
    Config = ReinforceConfig

    def update(self, batch: RolloutBatch) -> dict[str, torch.Tensor]:
        """Take one step of policy and baseline. Returns metrics as scalar tensors."""
        c = self.config
        follow_schedule([self.optimizer], c, self.counters.progress)
        log_probs, entropy = self.policy.get_logprob_and_entropy(batch.obs[:], batch.actions)
        values = self.policy.get_value(batch.obs[:])
        weights = batch.returns - values.detach() if c.use_baseline else batch.returns
        if c.normalize_advantages:
            weights = (weights - weights.mean()) / (weights.std() + 1e-8)

        policy_loss = -(weights * log_probs).mean()
        baseline_loss = (values - batch.returns).square().mean()
        loss = policy_loss + c.vf_coef * baseline_loss - c.ent_coef * entropy.mean()
        grad_norm = self.optimizer.step(loss, c.max_grad_norm)
        return {
            "policy_loss": policy_loss.detach(),
            "value_loss": baseline_loss.detach(),
            "entropy": entropy.mean().detach(),
            "grad_norm": grad_norm,
            "explained_variance": batch.explained_variance(),
        }


_: type[Learner[RolloutBatch]] = Reinforce  # a type checker reports here what is missing
