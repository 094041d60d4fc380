"""Base class of algorithms that act in environments: construction, acting, evaluation, and their part of checkpoints.

The families (`on_policy`, `off_policy`, `sequences`, `offline`) add the source of batches; an algorithm adds its
`update`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from rlox.algorithms.table import ALGORITHMS, explain_actions, list_able, resolve
from rlox.callbacks import Callback
from rlox.callbacks.loggers import LoggerCallback
from rlox.checkpoint import Checkpoint, one_line
from rlox.checkpoint.meaning import require_same_meaning
from rlox.checkpoint.shapes import SavedShapes, require_shapes
from rlox.checkpoint.streams import Stream
from rlox.collectors import RewardFn, reward_name
from rlox.collectors.vec_normalize import VecNormalize
from rlox.compiled import NativeAdam, NativeOptimizer
from rlox.compiled.guard import find_update_difference
from rlox.config import MOST_AT_ONCE, Config, RemoteConfig, integer, require, usual_settings
from rlox.config.arguments import POLICIES, refuse_policy_name
from rlox.config.own_updates import require_reads
from rlox.envs import EnvSpec, env_name
from rlox.envs.envpool_env import evaluation_kwargs
from rlox.envs.gym_make import whole_games
from rlox.envs.make import EnvOptions
from rlox.envs.registry import is_multi_agent
from rlox.envs.spec import read_mask, read_observations, split_mask, write_actions
from rlox.evaluation.episodes import Evaluation, evaluate
from rlox.gpu.devices import CUDA_PAYS_FROM, RESIDENT_PAYS_FROM, device_for, use_gpu
from rlox.kernels.rng import Rng
from rlox.nn.acting import Inputs, acting_policy, draw_noise, read_state
from rlox.nn.modes import outside_inference_mode, torch_threads
from rlox.nn.modules import generator_states, load_weights_, weights_of
from rlox.training import restoring
from rlox.training.algorithm import Algorithm
from rlox.training.backend import Backend, Watch

# PyTorch is imported where it is used, because native runs do not need it.

if TYPE_CHECKING:
    from torch import nn

    from rlox.evaluation.session import Session
    from rlox.nn.optimizers import FlatOptimizer
    from rlox.offline.statistics import DatasetStatistics


class Agent(Algorithm):
    """Base class of the families that act in environments; their classes document the arguments.

    Attributes
    ----------
    spec : EnvSpec
        Shapes and bounds of observations and actions.
    collector : RolloutCollector, ReplayCollector or None
        Collects experience; None if the algorithm learns from a dataset only.
    normalizer : VecNormalize, DatasetStatistics or None
        Transforms observations before the networks see them.
    native : NativeActor or None
        The kernel's policy, if the kernel also holds its weights.
    """

    actions: ClassVar[tuple[str, ...]] = ("discrete", "multi-discrete", "continuous")  # supported kinds of actions
    _samples: ClassVar[bool] = True  # whether `predict` can sample; else it takes modes
    _pays_from: float = CUDA_PAYS_FROM  # parameters from which device=auto takes a GPU, if there is one
    _draws_on_device: ClassVar[bool] = True  # whether a captured update draws its numbers from a generator there
    _masks: ClassVar[bool] = False  # whether it takes only the actions that a mask allows
    _mixed_images: ClassVar[bool] = False  # whether it supports images next to other numbers, see `EnvSpec.images`

    env_id: Any  # an id or a callable; None: there is no environment
    spec: EnvSpec
    n_envs: int = 1  # environments of all ranks together
    collector: Any = None
    normalizer: VecNormalize | DatasetStatistics | None = None
    optimizer: FlatOptimizer | NativeOptimizer | NativeAdam
    _lost_reward_fn: str | None = None  # name of a checkpoint's reward_fn that was not passed again
    _saved_shapes: SavedShapes | None = None  # of the weights to restore

    # ---- construction: configuration, environments, backend, networks, optimisers

    def __init__(
        self,
        env_id: str | Callable[[], Any],
        n_envs: int = 8,
        seed: int = 42,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        *,
        device: str = "auto",
        backend: str = "auto",
        threads: int = 1,
        compile: bool = False,
        env_kwargs: dict[str, Any] | None = None,
        reward_fn: RewardFn | None = "auto",
        env_wrappers: Sequence[Any] = (),
        env_workers: int = 0,
        env_backend: str = "auto",
        remote: RemoteConfig | None = None,
        config: Config | None = None,
        **hyper_parameters: Any,
    ):
        where = type(self).__name__
        for name, value in (("env_id", env_id), ("policy", policy)):
            if isinstance(value, str) and value in POLICIES:
                refuse_policy_name(where, name, value)
        if is_multi_agent(env_id) and not self.Config.several_agents:
            raise ValueError(f"{where}: env_id must have one agent, got {env_id}, which has several; use MAPPO for it")
        usual = usual_settings(env_id)
        usual_reward = usual.pop("reward_fn", None)
        if isinstance(reward_fn, str) and reward_fn == "auto":
            reward_fn = usual_reward
        if config is None:
            fields = self.Config.__dataclass_fields__
            hyper_parameters = {name: value for name, value in usual.items() if name in fields} | hyper_parameters
        self.env_id = env_id
        super().__init__(
            seed,
            logger,
            callbacks,
            {"config": config, **hyper_parameters},
            device=device,
            backend=backend,
            threads=threads,
            clock="env_steps",
        )

        # The environments, of all ranks together and of this one.
        self.n_envs = integer(where, "n_envs", n_envs, 1, MOST_AT_ONCE)
        options = EnvOptions.of(where, env_kwargs, env_wrappers, env_workers, env_backend, remote, self.n_envs)
        if self.ranks.joined and env_backend == "envpool":
            raise ValueError(f"{where}: env_backend must be auto or gymnasium with distributed=ddp, got 'envpool'")
        self.env_options = options
        options.compiled = compile
        pays = device == "auto" and backend != "native" and policy is None and self.n_envs >= RESIDENT_PAYS_FROM
        if env_backend == "tensor" or device == "cuda" or pays:
            options.device = self._choose_env_device(where, device, reward_fn)
            device = options.device or device
        n_own = self.ranks.share(where, "n_envs", self.n_envs) if self.ranks.joined else self.n_envs
        self.collector = self._make_collector(n_own, reward_fn)
        self.collector.name = env_name(env_id)
        self.spec = self.collector.spec
        entry = ALGORITHMS.get(self.name)
        if self.spec.discrete and entry is not None and entry.discrete and type(self) is resolve(entry.cls):
            self.__class__ = resolve(entry.discrete)  # the environment decides it, which is only known from here on
        if env_backend == "envpool":
            options.eval_kwargs = evaluation_kwargs(self.collector.env)
        self._require_fitting_spec(where)
        if getattr(self.config, "normalize_obs", False) or getattr(self.config, "normalize_rewards", False):
            self.normalizer = self.collector.normalizer = self._make_normalizer(where)

        self._create_networks(policy, backend, device, compile)

    def _choose_env_device(self, where: str, device: str, reward_fn: RewardFn | None) -> str | None:
        """Return the device on which the environments live as tensors; None if they are on the host."""
        if self.env_options.backend == "tensor":
            raise ValueError(
                f"{where}: env_backend must be auto, gymnasium or envpool, got 'tensor': environments on a device are "
                "for PPO, A2C and MAPPO"
            )
        return None

    def _make_collector(self, n: int, reward_fn: RewardFn | None) -> Any:
        """Create `n` environments and the object that collects experience in them."""
        raise NotImplementedError

    def _require_fitting_spec(self, where: str) -> None:
        """Raise ValueError unless the algorithm supports the environment, and the checkpoint to restore fits it."""
        spec, shapes = self.spec, self._saved_shapes
        if spec.action_kind not in self.actions:
            raise ValueError(f"{where}: the environment's actions must be {explain_actions(type(self), spec)}")
        if spec.images and not self._mixed_images:
            spec.refuse_mixed_images(where)
        if spec.masked and not self._masks and "masks" not in getattr(self, "reads", ()):
            raise ValueError(
                f"{where}: the environment has action masks, which {self.name} does not use: it would take illegal "
                f"actions; take {list_able(lambda cls: cls._masks)}, or a wrapper that removes the masks"
            )
        if shapes is not None:
            require_shapes(where, shapes, self.config, spec)

    def _make_normalizer(self, where: str) -> VecNormalize:
        """Return the normaliser of observations and rewards, as the configuration asks for it."""
        c, spec, rewards = self.config, self.spec, getattr(self.config, "normalize_rewards", False)
        if c.normalize_obs and spec.image:
            raise ValueError(f"{where}: normalize_obs must be false for images, which are scaled to [0, 1] already")
        clip_rewards = getattr(c, "clip_rewards", math.inf)
        sizes = (self.n_envs // self.ranks.size, spec.obs_shape, c.gamma)
        most_return = c.v_max if getattr(c, "fit_rewards", False) else math.inf
        part = spec.part if spec.rounded else None
        rules: Any = (c.normalize_obs, rewards, c.clip_obs, clip_rewards, part, most_return)
        if self.env_options.device is not None:
            from rlox.collectors.tensor_normalize import TensorNormalize

            return TensorNormalize(self.env_options.device, *sizes, *rules)
        return VecNormalize(*sizes, *rules)

    @outside_inference_mode()
    def _create_networks(self, policy: nn.Module | None, backend: str, device: str, compile: bool = False) -> None:
        """Choose the backend, then create networks and optimisers; the last step of construction."""
        self._own_policy = policy is not None
        where, rng = type(self).__name__, Rng(self.seed, Stream.INIT)
        if self.spec.masked or self.config.recurrent:
            require_reads(self)
        if policy is not None:
            device = device_for(device, policy, where)
        self.backend = Backend.choose(where, backend, compile, self.config, self._native_obstacle, policy, device)
        self.make_policy(rng, policy)
        self.device = "cpu"
        if self.backend == "torch":
            import torch

            if device == "cuda" or torch.cuda.is_available():
                use_gpu(self, device, where)
            self.policy.to(self.device)
        if getattr(self.config, "precision", "float32") != "float32":
            self.backend.cast(where, self.config)
        if self.collector is not None:
            self.collector.device = self.device
        if self._draws_on_device and (self.backend.captures or self.env_options.device is not None):
            from rlox.nn.random import DeviceRng

            self.rng = DeviceRng(self.seed, self._stream, self.device)
        else:
            self.rng = self.ranks.rng(self.seed, self._stream) if self.ranks.joined else Rng(self.seed, self._stream)
        self.setup(rng)
        if self.ranks.joined:
            self.ranks.prepare(self)
        if isinstance(self.optimizer, NativeOptimizer):
            self.optimizer.actor = self.native
        if self.backend == "native":
            self.backend.watch = Watch(self)

    def make_policy(self, rng: Rng, policy: nn.Module | None) -> None:
        """Set `policy` to the custom policy after checking it, or to the default one with weights drawn from `rng`; or
        set `native`."""
        raise NotImplementedError

    def _native_obstacle(self, policy: nn.Module | None, device: str, requested: str) -> str | None:
        """Return why the native path cannot or should not run; None if it can."""
        if not hasattr(self, "update_native"):
            return f"{self.name} has no native update"
        if device == "cuda":
            return "it runs on the CPU, and device is cuda"
        if self.env_options.device is not None:
            return "the environments are tensors"
        if self.ranks.joined:
            return "distributed=ddp averages gradients in PyTorch"
        definer = next(cls for cls in type(self).__mro__ if "update" in vars(cls))
        if "update_native" not in vars(definer):
            return f"{definer.__name__} has an update of its own"
        objects = () if self.collector is None else (self.collector,)
        obstacle = self._kernel_obstacle(policy) or find_update_difference(self, *objects, self.counters)
        large = obstacle is None and requested == "auto" and device == "auto"
        if large and sum(self._network_sizes()) >= self._pays_from:
            import torch

            return "networks this large are faster on the GPU" if torch.cuda.is_available() else None
        return obstacle

    def _kernel_obstacle(self, policy: nn.Module | None) -> str | None:
        """Return why the kernel cannot compute this policy exactly; None if it can."""
        raise NotImplementedError

    def _network_sizes(self) -> tuple[int, int]:
        """Return the numbers of parameters of the default policy, and of critics that are not part of the policy."""
        raise NotImplementedError

    # ---- training

    @property
    def policy(self) -> nn.Module:
        """The trained module. If a kernel holds its weights, the module is created on first access, with views of the
        kernel's parameters."""
        return self._policy if self.native is None else self.native.module()

    @policy.setter
    def policy(self, module: nn.Module) -> None:
        if self.native is not None or "_policy" in vars(self):
            raise AttributeError(
                f"{type(self).__name__}: policy must be given to the constructor and cannot be replaced"
            )
        self._policy = module

    @property
    def actor(self) -> Any:
        """The actor of collection and evaluation: a module or an `rlox.nn.acting.ActingPolicy`."""
        return self.policy if self.native is None else self.native

    def _prepare_training(self) -> None:
        if self._lost_reward_fn is not None:
            raise ValueError(
                f"{type(self).__name__}.train: the checkpoint was trained with reward_fn {self._lost_reward_fn}, which "
                "a file cannot store; pass it to from_checkpoint(reward_fn=...)"
            )

    # ---- acting

    def predict(self, obs: Any, deterministic: bool = True, *, state: Any = None, mask: Any = None) -> Any:
        """Return the action for one observation, or actions for a batch of B, without exploration noise.

        An agent with a memory (``algo.memory``) returns the action and the next state, which belongs to the next
        observation of the same episode; `session` keeps it. DreamerV3 acts as in the first step of an episode.

        Parameters
        ----------
        obs : Any
            An observation as the environment returns it, or a batch of them as gymnasium's vector environments return
            it; or the array that the policy sees (`SpaceAdapter` describes it), (D,) or (B, D).
        deterministic : bool
            Whether to take the most likely action, not a sample; a deterministic policy takes the same either way.
        state : array, optional
            State (S,) or (B, S) of the memory, which the last call returned; None at the start of an episode.
        mask : array, optional
            The legal actions, (n,) or (B, n) bool, as the environment gives them; for several choices the flags of one
            after those of the other. None: those under ``action_mask`` in `obs`, or all.

        Returns
        -------
        int or array
            As the environment's ``step`` takes it. Discrete: an int, or (B,) int64. Box: an array of the space's shape,
            or (B, …), clipped to its bounds. MultiDiscrete and MultiBinary: integers of the space's shape, or (B, …).
        state : array
            Only of an agent with a memory: its next state, (S,) or (B, S) f32.

        Raises
        ------
        ValueError
            If `obs` is neither, or contains values that are not finite; if `state` or `mask` does not fit.
        TypeError
            If `obs` is not an array of numbers; if `deterministic` and the policy is a custom module without ``mode``.
        """
        where = f"{type(self).__name__}.predict"
        require(where, "deterministic", deterministic, bool)
        obs, mask = split_mask(self.spec, obs, mask)
        rows, single = read_observations(where, self.spec, obs)
        inputs = Inputs(rows, read_mask(where, self.spec, mask, len(rows)))
        if state is not None:
            inputs.state = read_state(where, state, len(rows), acting_policy(self.actor, self.device).state_dim)
        actions, after = self._act_on(inputs, deterministic)
        action = write_actions(self.spec, actions, single)
        if not self.config.recurrent and state is None:
            return action
        assert after is not None
        return action, (after[0] if single else after)

    def _act_on(self, inputs: Inputs, deterministic: bool = True) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the policy's actions (B, …), clipped, and next states, for observations as a batch has them."""
        self.backend.require_unchanged("predict")
        actor = acting_policy(self.actor, self.device)
        if deterministic:
            actor.require_mode(f"{type(self).__name__}.predict")
        if self.normalizer is not None:
            inputs.obs = self.normalizer.normalize(inputs.obs)
        mode = deterministic or not self._samples
        noise = None if mode else draw_noise(actor, len(inputs.obs))
        actions, state = actor.mode(inputs) if mode else actor.act(inputs, noise)
        return self.spec.clip(actions), state

    def session(self, n: int = 1, deterministic: bool = True, seed: int | None = None) -> Session:
        """Return an object that acts in `n` environments and keeps the state of a memory for each.

        `seed` determines sampled actions; by default that of the algorithm. See `rlox.evaluation.session.Session`.
        """
        from rlox.evaluation.session import Session

        return Session(self, n, deterministic, self.seed if seed is None else seed)

    def evaluate(
        self, n_episodes: int = 20, seed: int | None = None, deterministic: bool = True, **options: Any
    ) -> Evaluation:
        """Run whole episodes in a new environment, without affecting training; normalisation statistics are frozen.

        With ``deterministic=False`` the agent acts as in training, with exploration noise. `seed` defaults to 10_000 +
        the algorithm's own; `options` are passed to `rlox.evaluation.episodes.evaluate`. With several agents,
        `returns` are sums over the agents and `agent_returns` the returns of each agent.

        Raises
        ------
        ValueError
            If there is no environment, or its observations are not those of the training.
        """
        require(f"{type(self).__name__}.evaluate", "deterministic", deterministic, bool)
        with torch_threads(self._threads):
            arguments = self._evaluation_arguments(n_episodes, seed, deterministic)
            by = arguments.pop("by", evaluate)
            if by is evaluate and not deterministic and hasattr(self, "_make_noise"):
                options["noise"] = self._make_noise
            return by(**arguments, **options)

    def _evaluation_arguments(self, n_episodes: int, seed: int | None, deterministic: bool = True) -> dict[str, Any]:
        """Return the arguments of `rlox.evaluation.episodes.evaluate`, without its options.

        If the result contains ``by``, they are the arguments of that function instead.
        """
        self.backend.require_unchanged("evaluate")
        if self.env_id is None:
            raise ValueError(
                f"{type(self).__name__}.evaluate: there must be an environment; pass env_id='…' to the constructor"
            )
        c, seen = self.counters, {}
        if c.clock == "env_steps" and c.env_steps:
            # If no episode has ended yet, they are at least as long as the steps of one environment.
            seen["longest"] = max(c.recent_lengths, default=-(-c.env_steps // self.n_envs))
        return {
            "policy": self.actor,
            "env_id": self.env_id,
            "n_episodes": n_episodes,
            "seed": 10_000 + self.seed if seed is None else seed,
            "deterministic": deterministic,
            "env_kwargs": self.env_options.eval_kwargs,
            "device": self.device,
            "wrappers": whole_games(self.env_options.wrappers),
            "transform": None if self.normalizer is None else self.normalizer.normalize,
            **seen,
        }

    # ---- checkpoints

    def _generators(self) -> dict[str, dict[str, int]]:
        states = {self._stream.name.lower(): self.rng.get_state()}
        return states if self.collector is None else {**states, "action": self.collector.rng.get_state()}

    def _torch_generators(self) -> dict[str, np.ndarray]:
        if self.native is not None:
            return {}
        from rlox.nn.policies import Actor

        # A custom policy samples from PyTorch's generators.
        drawn = self._own_policy or not isinstance(self.policy, Actor)
        return generator_states(self.device) if drawn else {}

    def _weights(self) -> dict[str, np.ndarray]:
        return weights_of(self.policy) if self.native is None else self.native.weights()

    def _own_state(self) -> tuple[dict[str, Any], dict[str, dict[str, np.ndarray]]]:
        info, tensors = super()._own_state()
        info["policy"], options = "custom" if self._own_policy else "default", self.env_options
        info["env"] = {
            "id": None if self.env_id is None else env_name(self.env_id),
            "callable": self.env_id is not None and not isinstance(self.env_id, str),
            "n_envs": self.n_envs,
            "kwargs": options.kwargs,
            "wrappers": options.wrappers,
            "workers": options.workers,
            "backend": options.backend,
        }
        tensors["normalization"] = {} if self.normalizer is None else self.normalizer.state()
        if self.collector is not None:
            reward_fn = self.collector.reward_fn
            info["reward_fn"] = self._lost_reward_fn if reward_fn is None else reward_name(reward_fn)
            tensors["environment"] = self.collector.state() or {}
        return info, tensors

    def _state_of_rank(self) -> dict[str, dict[str, np.ndarray]]:
        own, sections = self._own_state()[1], super()._state_of_rank()
        returns = {name: x for name, x in own["normalization"].items() if name == "returns"}
        for name, arrays in (("environment", own.get("environment")), ("normalization", returns)):
            if arrays is not None:
                sections[name] = {key: np.array(x) for key, x in arrays.items()}
        return sections

    @classmethod
    def from_checkpoint(
        cls,
        path: str | os.PathLike,
        env_id: str | Callable[[], Any] | None = None,
        policy: nn.Module | None = None,
        logger: LoggerCallback | None = None,
        callbacks: Iterable[Callback] | None = None,
        device: str = "auto",
        backend: str | None = None,
        reward_fn: RewardFn | None = None,
        env_wrappers: Sequence[Any] | None = None,
        env_backend: str | None = None,
        **arguments: Any,
    ):
        """Restore an algorithm from a checkpoint.

        `train` without arguments continues as if it had never stopped, in native environments and in those foreign
        environments that can be restored (see `rlox.envs.state`). Other environments start new episodes, and everything
        else is exact; ``collector.restore_note()`` reports this with the reason.

        Off-policy algorithms restore the replay memory when it is first used, from the files next to a checkpoint of
        ``rlox train`` or ``save(path, memory=True)``; or `load_buffer` loads a file of `save_buffer`. Otherwise the
        memory starts empty (with a `RuntimeWarning` if files are missing), and the restored policy fills it with
        `learning_starts` steps before the first update.

        Parameters
        ----------
        path : path
            The checkpoint.
        env_id : str or callable, optional
            By default the environment of the training. Another environment starts new episodes.
        policy : nn.Module, optional
            Required, with the same parameters, if the checkpoint contains a custom policy.
        backend : str, optional
            By default the backend of the training, if it can run.
        reward_fn : callable, optional
            Required for further training if the checkpoint was trained with one.
        env_wrappers : sequence, optional
            Required if the checkpoint names wrappers from outside gymnasium: a file must not choose what is imported.
        env_backend : str, optional
            By default the environment backend of the training.
        **arguments
            Further arguments of the class, including hyper-parameters, which override the saved values.

        Raises
        ------
        FileNotFoundError, ValueError
            See `rlox.checkpoint.load_checkpoint`; also for another algorithm's checkpoint, a policy that does not fit,
            or a damaged state of the environments.
        """
        given = {"logger": logger, "callbacks": callbacks, "device": device, **arguments}
        return restoring.restore_agent(cls, path, env_id, policy, backend, reward_fn, env_wrappers, env_backend, given)

    def _expect_shapes(self, shapes: SavedShapes | None) -> None:
        """Before construction: remember the shapes of the weights to restore, which are compared before anything is
        created whose size the file determines."""
        definer = next(cls for cls in type(self).__mro__ if "make_policy" in vars(cls))
        # Only the policies of rlox have the widths of `hidden_sizes`.
        self._saved_shapes = shapes if definer.__module__.startswith("rlox.") else None

    def _resume(self, checkpoint: Checkpoint, path: Any, lost_reward_fn: str | None, env_id: Any) -> None:
        """Restore a checkpoint's state into this new object, or close it if that fails."""
        self._lost_reward_fn = lost_reward_fn
        same_env = env_id is None or env_name(env_id) == checkpoint.header["env"]["id"]
        where = f"{type(self).__name__}.from_checkpoint"
        try:
            require_same_meaning(self, checkpoint.header, where)
            with restoring.explained(f"{where}: {path} cannot be restored"):
                self._restore(self.ranks.own(checkpoint, self.seed), same_env)
        except ValueError:
            self.close()
            raise

    @classmethod
    def _saved_arguments(cls, header: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
        """Return further arguments of the class from the header."""
        return {}

    def _restore(self, checkpoint: Checkpoint, same_env: bool = False) -> bool:
        exact = super()._restore(checkpoint, same_env)
        if self.collector is not None:
            self.collector.env_steps = self.counters.env_steps
            self.collector.rng.set_state(checkpoint.header["generators"]["action"])
            exact = same_env and self.collector.restore(checkpoint.tensors["environment"])
        if self.normalizer is not None:
            self.normalizer.set_state(checkpoint.tensors["normalization"], returns=exact)
        return exact

    def _start_from(self, checkpoint: Checkpoint, where: str) -> None:
        tensors, theirs = checkpoint.tensors, checkpoint.header["algorithm"]
        if "obs_std" in tensors["normalization"]:
            raise ValueError(
                f"{where}: its policy must take unchanged observations, got a policy that "
                "takes them normalised by its dataset's statistics; train it with normalize_obs=false"
            )
        require_same_meaning(self, checkpoint.header, where)
        try:
            self._load_weights(self._fitted(tensors["policy"]), where)
        except ValueError as e:
            if theirs == self.name:
                raise
            raise ValueError(
                f"{where}: the policy must have the networks of {self.name}, got "
                f"those of {one_line(theirs, 40)}; start from a checkpoint of {self.name}"
            ) from e
        if self.normalizer is not None and tensors["normalization"]:
            self.normalizer.set_state(tensors["normalization"], returns=False)

    def _fitted(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Convert a checkpoint's policy weights, which may be another algorithm's, for `init_from`."""
        return arrays

    def _load_weights(self, arrays: dict[str, np.ndarray], where: str) -> None:
        what = f"{where}: the policy"
        if self.native is not None:
            self.native.load(arrays, what)
        else:
            load_weights_(self.policy, arrays, what)

    # ---- the object

    def _described(self) -> list[str]:
        known = vars(self)
        parts = [] if known.get("env_id") is None else [env_name(known["env_id"])]
        if getattr(known.get("config"), "hidden_sizes", None):
            parts.append(f"hidden_sizes={list(self.config.hidden_sizes)}")
        if known.get("native"):
            return [*parts, f"{self._network_sizes()[0]:,} parameters"]
        return parts + super()._described()

    def close(self) -> None:
        """End the environments' worker processes, if there are any. The trained policy remains usable."""
        if self.collector is not None:
            self.collector.close()
