"""Networks, and the policies made of them with their values: actor-critics for every action space.

Every on-policy policy, including custom modules, must have the methods

- ``get_action_and_logprob(obs) -> (actions, log_probs)``
- ``get_value(obs) -> values``
- ``get_logprob_and_entropy(obs, actions) -> (log_probs, entropy)``

and, for deterministic evaluation, ``mode(obs) -> actions``. Letters: B rows, D observation size, A action size,
K components of a multi-discrete action. Observations are (B, D) f32 or (B, C, H, W) uint8 images.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from rlox.config import ACTIVATIONS, nearest
from rlox.kernels.rng import Rng
from rlox.nn.memory import Memory, MemoryNetwork, Sequences
from rlox.nn.modules import layer_weights, mlp_weights

POLICY_METHODS = ("get_action_and_logprob", "get_value", "get_logprob_and_entropy")
_LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)
MemoryShape = tuple[str, int, int, int | None]  # lstm or gru, units, layers, and the horizon of the initial gates
_LOWEST = -1e9  # logit of an illegal action
_NONLINEARITIES = {"tanh": nn.Tanh, "relu": nn.ReLU}


# ---- perceptrons and convolutional networks, with initial weights from rlox's own generator


def rng_from_torch() -> Rng:
    """Return a generator seeded from PyTorch's, for modules built outside of a run; see ``torch.manual_seed``."""
    return Rng(int(torch.randint(2**63 - 1, (), device="cpu").item()))


@torch.no_grad()
def _set_(layer: nn.Linear | nn.Conv2d, weight: np.ndarray, bias: np.ndarray) -> nn.Module:
    """Set the weights of `layer` in place; a layer on the device ``meta`` uses the arrays' memory."""
    for name, array in (("weight", weight), ("bias", bias)):
        parameter = getattr(layer, name)
        values = torch.from_numpy(array).view(parameter.shape)
        if parameter.is_meta:
            setattr(layer, name, nn.Parameter(values))
        else:
            parameter.copy_(values)
    return layer


def init_layer_(layer: nn.Linear | nn.Conv2d, gain: float, orthogonal: bool, rng: Rng) -> nn.Module:
    """Set weights in place: orthogonal with zero bias, or U(-1/sqrt(fan_in), 1/sqrt(fan_in)) for weight and bias.

    A convolution's kernel counts as the matrix (channels out, channels in * height * width).
    """
    rows, cols = layer.weight.flatten(1).shape
    return _set_(layer, *layer_weights(rows, cols, gain, orthogonal, rng))


def mlp(
    sizes: Sequence[int],
    activation: str = "tanh",
    out_gain: float = 1.0,
    orthogonal: bool = True,
    rng: Rng | None = None,
) -> nn.Sequential:
    """Build a perceptron with widths `sizes` (input, hidden …, output) and no activation after the last layer.

    Raises
    ------
    ValueError
        If `activation` is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"mlp: activation must be known, got {activation!r}; {nearest(activation, ACTIVATIONS)}")
    rng = rng or rng_from_torch()
    layers: list[nn.Module] = []
    for weight, bias in mlp_weights(sizes, out_gain, orthogonal, rng):
        # On other devices than meta, nn.Linear would draw weights from PyTorch's global generator, which is the user's.
        linear = nn.Linear(*weight.shape[::-1], device="meta")
        layers += [_set_(linear, weight, bias), _NONLINEARITIES[activation]()]
    layers = layers[:-1]
    return nn.Sequential(*layers)


def nature_cnn(shape: tuple[int, ...], orthogonal: bool, rng: Rng) -> tuple[nn.Sequential, int]:
    """Build the convolutional network of Mnih et al. 2015 (doi:10.1038/nature14236) for images (C, H, W). Returns it
    with its number of features, 512.

    Its convolutions need 36 x 36 pixels. An image with a shorter side gets as many channels from windows of 3 x 3
    pixels with a border of zeros, with strides 1, 2 and 2.
    """
    channels, height, width = shape
    large = min(height, width) >= 36
    windows, border = (((8, 4), (4, 2), (3, 1)), 0) if large else (((3, 1), (3, 2), (3, 2)), 1)
    gain, layers = math.sqrt(2.0), []
    for n_out, (size, stride) in zip((32, 64, 64), windows, strict=True):
        convolution = nn.Conv2d(channels, n_out, size, stride, border, device="meta")
        layers += [init_layer_(convolution, gain, orthogonal, rng), nn.ReLU()]
        channels = n_out
        height, width = ((side + 2 * border - size) // stride + 1 for side in (height, width))
    linear = nn.Linear(channels * height * width, 512, device="meta")
    return nn.Sequential(*layers, nn.Flatten(), init_layer_(linear, gain, orthogonal, rng), nn.ReLU()), 512


class NetworkSpec:
    """Common settings of all networks of a module; builds them one after the other from one generator.

    Parameters
    ----------
    obs : int or (C, H, W)
        Observation size D, or the shape of an image.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves; after the features of an image they may be ``()``.
    activation : str
        ``tanh`` or ``relu``.
    orthogonal : bool
        Orthogonal initial weights and zero biases; else both start at U(-1/sqrt(fan_in), 1/sqrt(fan_in)).
    rng : Rng, optional
        Generator of the initial weights; by default seeded from PyTorch's.
    memory : (str, int, int, int or None), optional
        ``lstm`` or ``gru``, units, layers and horizon of a `rlox.nn.memory.Memory` between the hidden layers and the
        last one; None: there is none.

    Attributes
    ----------
    body : nn.Module or None
        `nature_cnn` for images.
    widths : list of int
        Width of the perceptrons' input (the observation, or the features of an image), and of their hidden layers.
    """

    def __init__(
        self,
        obs: int | Sequence[int],
        hidden: int | Sequence[int],
        activation: str,
        orthogonal: bool,
        rng: Rng | None,
        memory: MemoryShape | None = None,
    ):
        self.activation, self.orthogonal, self.rng = activation, orthogonal, rng or rng_from_torch()
        self.memory = memory
        self.body: nn.Module | None = None
        if isinstance(obs, int):
            n_inputs = obs
        else:
            self.body, n_inputs = nature_cnn(tuple(obs), orthogonal, self.rng)
        self.widths = [n_inputs, *([hidden, hidden] if isinstance(hidden, int) else hidden)]

    def mlp(self, n_outputs: int, out_gain: float = 1.0, first: int = 0) -> nn.Sequential:
        """Build a perceptron of these widths, or of the widths from index `first` on."""
        return mlp([*self.widths[first:], n_outputs], self.activation, out_gain, self.orthogonal, self.rng)

    def network(self, n_outputs: int, out_gain: float = 1.0) -> nn.Sequential | MemoryNetwork:
        """Build a perceptron, or with a `memory` hidden layers, memory and a last layer."""
        if self.memory is None:
            return self.mlp(n_outputs, out_gain)
        kind, size, n_layers, horizon = self.memory
        trunk = nn.Sequential()
        if len(self.widths) > 1:
            gain = math.sqrt(2.0)
            hidden = mlp(self.widths, self.activation, gain, self.orthogonal, self.rng)
            trunk = nn.Sequential(*hidden, _NONLINEARITIES[self.activation]())
        memory = Memory(kind, self.widths[-1], size, n_layers, self.orthogonal, self.rng, horizon)
        return MemoryNetwork(trunk, memory, mlp([size, n_outputs], "tanh", out_gain, self.orthogonal, self.rng))


# ---- policies


class Actor(nn.Module):
    """Base class of policies whose noise is an argument, so that rlox's generator determines the actions."""

    adds_noise_to_logits: ClassVar[bool] = False  # whether an action is the argmax of logits plus noise

    def noise_shape(self, n: int) -> tuple[int, ...]:
        """Return the shape of the noise that `act` takes for `n` observations."""
        raise NotImplementedError

    def fill_noise(self, rng: Rng, out) -> None:
        """Fill the f32 array `out` with the noise with which this policy samples."""
        raise NotImplementedError

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return sampled actions, a function of observation and noise only."""
        raise NotImplementedError

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the most likely actions."""
        raise NotImplementedError

    def sample(self, obs: torch.Tensor) -> torch.Tensor:
        """Return sampled actions, differentiable if `act` is. The noise is seeded by ``torch.manual_seed``."""
        noise = torch.empty(self.noise_shape(len(obs)), dtype=torch.float32, device="cpu")
        self.fill_noise(rng_from_torch(), noise.numpy())
        return self.act(obs, noise.to(obs.device))


class ActorCritic(Actor):
    """Base class of on-policy policies: actions with their probabilities, and values.

    Vector observations go to separate actor and critic networks. Images go through one convolutional `body` (Mnih et
    al. 2015) whose features both heads read.

    Parameters
    ----------
    obs_dim : int or (C, H, W)
        Observation size D, or the shape of an image.
    n_outputs : int
        Outputs of the actor's head.
    hidden : int or sequence of int
        Width of both hidden layers, or the widths themselves; after the features of an image they may be ``()``.
    activation : str
        ``tanh`` or ``relu``.
    ortho_init : bool
        Orthogonal initial weights, with gain 0.01 in the actor's head, else uniform 1/sqrt(fan_in).
    rng : Rng, optional
        Generator of the initial weights; by default seeded from PyTorch's.
    memory : (str, int, int, int or None), optional
        ``lstm`` or ``gru``, units, layers and horizon of a `rlox.nn.memory.Memory`; actor and critic each have their
        own. Without sequences, every row then counts as the first step of an episode.

    Attributes
    ----------
    central : bool
        Whether the critic reads states instead of observations.
    """

    central: bool = False

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_outputs: int,
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        ortho_init: bool = True,
        rng: Rng | None = None,
        memory: MemoryShape | None = None,
    ):
        super().__init__()
        spec = NetworkSpec(obs_dim, hidden, activation, ortho_init, rng, memory)
        self.body, self.actor, self.critic = spec.body, spec.network(n_outputs, 0.01), spec.network(1)

    @property
    def state_dim(self) -> int:
        """S, the numbers of the memories of actor and critic, in this order; 0: there are none."""
        return sum(net.state_dim for net in (self.actor, self.critic) if isinstance(net, MemoryNetwork))

    def features(self, obs: torch.Tensor) -> torch.Tensor:
        """Return the input of both heads: the observation itself, or the body's features of an image."""
        return obs if self.body is None else self.body(obs.float() / 255.0)

    def distribution(self, outputs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of `actions` and entropies, both (B,) in nats, from the actor's outputs."""
        raise NotImplementedError

    def pick(self, outputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B, …) sampled with `noise`, from the actor's outputs."""
        raise NotImplementedError

    def pick_mode(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the most likely actions (B, …), from the actor's outputs."""
        raise NotImplementedError

    def act(self, obs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        return self.pick(self.actor(self.features(obs)), noise)

    def mode(self, obs: torch.Tensor) -> torch.Tensor:
        return self.pick_mode(self.actor(self.features(obs)))

    def follow(
        self, obs: torch.Tensor, sequences: Sequences, states: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run the memories through sequences of T steps each, with B rows in all.

        A central critic reads `states` (B, …) instead of the observations.

        Returns
        -------
        outputs, values
            The actor's outputs (B, …) and values (B,); with `sequences.running` only of those rows.
        state
            (n, S), after the last step of each sequence.
        """
        features, size = self.features(obs), self.actor.state_dim
        before = sequences.state
        outputs, acted = self.actor.follow(features, sequences._replace(state=before[:, :size]))
        judged = features if states is None else states
        values, remembered = self.critic.follow(judged, sequences._replace(state=before[:, size:]))
        return outputs, values.squeeze(-1), torch.cat([acted, remembered], 1)

    def get_value(self, obs: torch.Tensor) -> torch.Tensor:
        """Return values (B,), in units of discounted return."""
        return self.critic(self.features(obs)).squeeze(-1)

    def get_logprob_and_entropy(
        self, obs: torch.Tensor, actions: torch.Tensor, masks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities of `actions` and entropies of the distributions, both (B,), in nats.

        `masks` (B, n_outputs) bool are the legal actions; None: all.
        """
        outputs = self.actor(self.features(obs))
        return self.distribution(outputs if masks is None else mask_outputs(outputs, masks), actions)

    @torch.no_grad()
    def sample(self, obs: torch.Tensor) -> torch.Tensor:
        """Return actions, seeded by ``torch.manual_seed``, without a gradient: it would cancel a Gaussian mean's."""
        return super().sample(obs)

    def get_action_and_logprob(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return actions as `sample` does, and their log-probabilities (B,) with a gradient."""
        actions = self.sample(obs)
        return actions, self.get_logprob_and_entropy(obs, actions)[0]


def policy_outputs(
    policy: nn.Module,
    obs: torch.Tensor,
    actions: torch.Tensor,
    states: torch.Tensor | None = None,
    masks: torch.Tensor | None = None,
    sequences: Sequences | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log-probabilities, entropies and values, each (B,); a shared body is run only once.

    An `ActorCritic` may have a critic that reads `states` (B, S) instead of the observations, `masks`
    (B, n_outputs) bool of legal actions, and a memory, for which the rows are `sequences`.
    """
    if isinstance(policy, ActorCritic):
        if sequences is None:
            features = policy.features(obs)
            outputs = policy.actor(features)
            values = policy.critic(features if states is None else states).squeeze(-1)
        else:
            outputs, values, _ = policy.follow(obs, sequences, states)
        if masks is not None:
            outputs = mask_outputs(outputs, masks)
        return *policy.distribution(outputs, actions), values
    log_probs, entropy = policy.get_logprob_and_entropy(obs, actions)
    values = policy.get_value(obs)
    for name, found in (("log-probabilities", log_probs), ("entropies", entropy), ("values", values)):
        if found.shape != obs.shape[:1]:  # (B, 1) would become (B, B)
            raise ValueError(f"the policy's {name} must have shape (B,), got {tuple(found.shape)} for B = {len(obs)}")
    return log_probs, entropy, values


def mask_outputs(outputs: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    """Return the actor's outputs (B, n_outputs), with those of illegal actions so low that their probability is 0."""
    return outputs.masked_fill(~masks, _LOWEST)


def _categorical(logits: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = F.log_softmax(logits, -1)
    log_prob = log_p.gather(-1, actions.long().unsqueeze(-1)).squeeze(-1)
    return log_prob, -(log_p.exp() * log_p).sum(-1)


class DiscretePolicy(ActorCritic):
    """Categorical policy over `n_actions` actions; further parameters as in `ActorCritic`."""

    adds_noise_to_logits = True

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_actions: int,
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        ortho_init: bool = True,
        rng: Rng | None = None,
        memory: MemoryShape | None = None,
    ):
        super().__init__(obs_dim, n_actions, hidden, activation, ortho_init, rng, memory)
        self.n_actions = n_actions

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.n_actions)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.gumbel(out=out)

    def pick(self, outputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B,) int64. argmax(logits + Gumbel noise) samples softmax(logits) without computing it."""
        return (outputs + noise).argmax(-1)

    def pick_mode(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs.argmax(-1)

    def distribution(self, outputs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _categorical(outputs, actions)


class MultiDiscretePolicy(ActorCritic):
    """K independent categorical choices, `n_choices[k]` each; further parameters as in `ActorCritic`."""

    adds_noise_to_logits = True

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        n_choices: Sequence[int],
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        ortho_init: bool = True,
        rng: Rng | None = None,
        memory: MemoryShape | None = None,
    ):
        super().__init__(obs_dim, sum(n_choices), hidden, activation, ortho_init, rng, memory)
        self.n_choices = list(n_choices)

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, sum(self.n_choices))

    def fill_noise(self, rng: Rng, out) -> None:
        rng.gumbel(out=out)

    def _argmax(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.argmax(-1) for part in scores.split(self.n_choices, -1)], -1)

    def pick(self, outputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B, K) int64."""
        return self._argmax(outputs + noise)

    def pick_mode(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._argmax(outputs)

    def distribution(self, outputs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(outputs.split(self.n_choices, -1), actions.unbind(-1), strict=True)
        log_probs, entropies = zip(*(_categorical(logits, action) for logits, action in parts), strict=True)
        return torch.stack(log_probs).sum(0), torch.stack(entropies).sum(0)


class ContinuousPolicy(ActorCritic):
    """Diagonal Gaussian policy whose standard deviation does not depend on the observation.

    Parameters
    ----------
    obs_dim, hidden, activation, ortho_init, rng
        As in `ActorCritic`.
    act_dim : int
        Action size A.
    log_std_init : float
        Initial log standard deviation of every action component.
    """

    def __init__(
        self,
        obs_dim: int | Sequence[int],
        act_dim: int,
        hidden: int | Sequence[int] = 64,
        activation: str = "tanh",
        log_std_init: float = 0.0,
        ortho_init: bool = True,
        rng: Rng | None = None,
        memory: MemoryShape | None = None,
    ):
        super().__init__(obs_dim, act_dim, hidden, activation, ortho_init, rng, memory)
        self.act_dim = act_dim
        self.log_std = nn.Parameter(torch.full((act_dim,), float(log_std_init), dtype=torch.float32, device="cpu"))

    def noise_shape(self, n: int) -> tuple[int, ...]:
        return (n, self.act_dim)

    def fill_noise(self, rng: Rng, out) -> None:
        rng.normal(out=out)

    def pick(self, outputs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return actions (B, A) f32, not clipped: the environment clips, log-probabilities are of unclipped actions."""
        return torch.addcmul(outputs, noise, self.log_std.exp())

    def pick_mode(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs

    def distribution(self, outputs: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = (actions - outputs) * (-self.log_std).exp()
        log_prob = -0.5 * z.square().sum(-1) - (self.log_std.sum() + self.act_dim * _LOG_SQRT_2PI)
        entropy = self.log_std.sum() + self.act_dim * (0.5 + _LOG_SQRT_2PI)
        return log_prob, entropy.expand(len(log_prob))


def make_policy(spec, config, rng: Rng, state_dim: int | None = None) -> ActorCritic:
    """Create the default policy for an `rlox.envs.EnvSpec` and an `rlox.config.OnPolicyConfig`.

    The critic reads the observations, or with `state_dim` as many numbers of its own.
    """
    if state_dim is not None:
        # These weights are replaced below; uniform weights are faster to draw.
        policy, c = make_policy(spec, replace(config, ortho_init=False), Rng(0)), config
        n_outputs = spec.model_width
        rest = (c.hidden_sizes, c.activation, c.ortho_init, rng, memory_of(c))
        policy.actor = NetworkSpec(spec.obs_dim, *rest).network(n_outputs, 0.01)
        policy.critic = NetworkSpec(state_dim, *rest).network(1)
        policy.central = True
        return policy
    obs = spec.obs_shape[0] if len(spec.obs_shape) == 1 else spec.obs_shape
    common = {
        "hidden": config.hidden_sizes,
        "activation": config.activation,
        "ortho_init": config.ortho_init,
        "rng": rng,
        "memory": memory_of(config),
    }
    if spec.discrete:
        return DiscretePolicy(obs, spec.n_actions, **common)
    if spec.n_choices is not None:
        return MultiDiscretePolicy(obs, spec.n_choices, **common)
    return ContinuousPolicy(obs, spec.act_dim, log_std_init=config.log_std_init, **common)


def give_critic(
    policy: ActorCritic, state_dim: int, hidden: Sequence[int], activation: str, ortho_init: bool, rng: Rng
) -> ActorCritic:
    """Replace the critic by one that reads `state_dim` numbers of its own; return `policy`."""
    policy.critic, policy.central = mlp([state_dim, *hidden, 1], activation, 1.0, ortho_init, rng), True
    return policy


def memory_of(config: Any) -> MemoryShape | None:
    """Return the shape of the memory in a configuration; None without one."""
    if not config.recurrent:
        return None
    return config.memory, config.memory_size, config.memory_layers, config.memory_horizon


class PlayerPolicies(nn.Module):
    """The actor-critics of all players, in the order of the players, named from ``players.0`` on."""

    def __init__(self, policies: Sequence[ActorCritic]):
        super().__init__()
        self.players = nn.ModuleList(policies)


def check_policy(policy: nn.Module, where: str) -> None:
    """Raise TypeError unless `policy` is a module with the three methods that collection and updates call, and
    ValueError if it is one of rlox's own in another data type than the observations."""
    if not isinstance(policy, nn.Module):
        raise TypeError(f"{where}: policy must be a torch.nn.Module, got {type(policy).__name__}")
    missing = [name for name in POLICY_METHODS if not callable(getattr(policy, name, None))]
    if missing:
        raise TypeError(
            f"{where}: policy must define {', '.join(POLICY_METHODS)}; "
            f"{type(policy).__name__} lacks {', '.join(missing)}"
        )
    if isinstance(policy, ActorCritic) and (dtypes := {p.dtype for p in policy.parameters()} - {torch.float32}):
        raise ValueError(
            f"{where}: policy must be in float32, as observations are, got {dtypes.pop()}; call policy.float(), or "
            "pass a module that converts observations itself"
        )
