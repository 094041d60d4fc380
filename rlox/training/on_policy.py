"""What PPO, A2C and their like share beside `OnlineAlgorithm`: rollouts, one optimiser, normalisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlox.checkpoint.streams import Stream
from rlox.collectors import RolloutCollector
from rlox.kernels.nn.learner import n_parameters
from rlox.kernels.rng import Rng
from rlox.native import NativeOptimizer, NativePolicy, obstacle
from rlox.native.shadows import difference
from rlox.training import loops
from rlox.training.online import OnlineAlgorithm

if TYPE_CHECKING:
    from torch import nn

    from rlox.nn.batch import RolloutBatch


class OnPolicyAlgorithm(OnlineAlgorithm):
    """Base of algorithms that learn from what the present policy has just done.

    A `policy` of your own defines ``get_action_and_logprob``, ``get_value`` and ``get_logprob_and_entropy`` (see
    `rlox.nn.policies`). ``update(batch)`` is given a `rlox.nn.batch.RolloutBatch`; so is ``update_native``, which does
    the same by the kernel. A subclass that overrides ``update`` alone learns by PyTorch; its rollouts, and those of
    ``backend="torch"``, are the kernel's all the same where that could compute the policy.
    """

    loop = staticmethod(loops.on_policy)
    stream = Stream.PERMUTATION
    _beside: NativePolicy | None = None  # acts for the policy that PyTorch trains, where a kernel can

    def _make_collector(self, *args: Any, **kwargs: Any) -> RolloutCollector:
        return RolloutCollector(*args, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda, **kwargs)

    @property
    def actor(self) -> nn.Module | NativePolicy:
        """What acts in collection and evaluation."""
        beside = self._beside
        return beside if beside is not None and beside.altered() is None else super().actor

    def check_kernel(self, where: str, functions: bool = False) -> None:
        super().check_kernel(where, functions)
        if functions and self._beside is not None and difference("acting", self.collector, reread=False) is not None:
            self._beside = None

    def update_native(self, batch: RolloutBatch) -> dict[str, float]:
        """What ``update`` defines, by the kernel."""
        raise NotImplementedError

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        return obstacle(self.spec, self.config, policy)

    def _kernel_size(self) -> int:
        spec = self.spec
        n_outputs = spec.n_actions if spec.discrete else spec.act_dim
        return n_parameters(spec.obs_dim, n_outputs, self.config.hidden_sizes, spec.continuous)

    def _make_policy(self, policy: nn.Module | None) -> None:
        self._normalize(self.config.normalize_rewards, self.config.clip_rewards)
        rng = Rng(self.seed, Stream.INIT)
        if self.backend == "native":
            c, spec = self.config, self.spec
            given = policy is not None
            self.native = NativePolicy.adopt(policy, spec, c) if given else NativePolicy.make(spec, c, rng)
            return
        from rlox.nn.policies import check_policy, make_policy

        self.policy = make_policy(self.spec, self.config, rng) if policy is None else policy
        check_policy(self.policy, type(self).__name__)

    def _setup(self) -> None:
        c = self.config
        if self.native is not None:
            self.optimizer = NativeOptimizer(self.native.net, c.learning_rate)
            return
        from rlox.nn.optimizers import FlatOptimizer

        self.optimizer = FlatOptimizer(self.policy.parameters(), c.learning_rate, kind=c.optimizer)
        exact = self.device == "cpu" and obstacle(self.spec, c, self._policy) is None
        if exact and difference("acting", self.collector) is None:
            self._beside = NativePolicy.beside(self._policy, self.spec, c, self.optimizer.flat.detach().numpy())
            self.backend_reason += "; a kernel collects"
