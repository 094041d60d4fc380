"""The loop of `rlox.training.loops.off_policy` for native environments and a native replay memory."""

cimport numpy as cnp
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid
from libc.string cimport memcpy

from rlox.kernels.buffers.access cimport RLOX_REPLAY_CAPSULE, rlox_replay_access
from rlox.kernels.checks cimport as_index, check_out
from rlox.kernels.envs.stepper cimport RLOX_STEPPER_CAPSULE, rlox_stepper
from rlox.kernels.nn.layers cimport bounded, number
from rlox.kernels.philox cimport DOMAIN_RNG, Block, below, join, philox
from rlox.kernels.signals cimport now
from rlox.kernels.types cimport f32, f64, i64, u8, u64

# N environments, their replay memory, and a batch of B transitions from it.
cdef struct Loop:
    rlox_stepper* env
    rlox_replay_access* replay
    Py_ssize_t n
    Py_ssize_t size
    i64 n_rounds
    i64 steps_per_round     # of each environment
    i64 updates_per_round
    i64 env_steps
    i64 horizon_start
    i64 horizon_steps
    i64 learning_starts
    i64 update_from
    f64 gamma
    f64 patience            # no round begins after this many seconds
    f64 began               # start of this time
    u64 key                 # of the generator for the updates
    u64 position
    f32* here               # (N, D): the current observations
    f32* after              # the next ones
    f32* final_obs
    f32* actions            # (N, A): as stored in the memory
    f32* rewards_f32        # (N)
    f64* rewards
    f64* episode_return
    i64* episode_length
    u8* terminated          # (N) or (B)
    u8* truncated
    i64 ended               # number of episodes that ended so far
    f64* returns            # of these episodes
    i64* lengths
    f32* batch_obs          # (B, D)
    f32* batch_next
    f32* batch_actions      # (B, A)
    f32* batch_rewards      # (B)
    f32* discounts
    f32* td_errors


cdef inline i64 whole(object value, i64 low, str where, str name) except? -2:
    """Return `value` after checking that it is an integer of at least `low`."""
    found = as_index(value, where, name)
    if not low <= found < 1 << 62:
        raise ValueError(f"{where}: {name} must be >= {low} and below 2**62, got {found}")
    return found


cdef inline list open_loop(Loop* loop, object stepper, object memory, object obs, object action_rng,
                           object replay_rng, dict counts, Py_ssize_t obs_dim, Py_ssize_t n_actions, Py_ssize_t act_dim,
                           str where):
    """Check the arguments and fill in `loop`; return the arrays of episode returns and lengths, and all others used."""
    import numpy as np

    from rlox.kernels.rng import Rng

    if not PyCapsule_IsValid(stepper, RLOX_STEPPER_CAPSULE):
        raise TypeError(f"{where}: stepper must be what VecEnv.stepper() returns, got {type(stepper).__name__}")
    if not PyCapsule_IsValid(memory, RLOX_REPLAY_CAPSULE):
        raise TypeError(f"{where}: memory must be what ReplayBuffer.access() returns, got {type(memory).__name__}")
    cdef rlox_stepper* env = <rlox_stepper*>PyCapsule_GetPointer(stepper, RLOX_STEPPER_CAPSULE)
    cdef rlox_replay_access* replay = <rlox_replay_access*>PyCapsule_GetPointer(memory, RLOX_REPLAY_CAPSULE)
    cdef Py_ssize_t n = env.n, d = env.obs_dim, a = replay.act_dim
    found = (env.obs_dim, env.n_actions, env.act_dim, replay.obs_dim, replay.act_dim)
    wanted = (obs_dim, n_actions, act_dim, obs_dim, act_dim if act_dim else 1)
    if found != wanted:
        raise ValueError(
            f"{where}: obs_dim, n_actions and act_dim of stepper, obs_dim and act_dim of memory must be {wanted}, "
            f"got {found}"
        )
    check_out(obs, cnp.NPY_FLOAT32, "float32", (n, d), where, "obs")
    loop.n_rounds = whole(counts["n_rounds"], 1, where, "n_rounds")
    loop.steps_per_round = (whole(counts["train_freq"], 1, where, "train_freq") + n - 1) // n
    loop.updates_per_round = whole(counts["gradient_steps"], -1, where, "gradient_steps")
    if loop.updates_per_round == 0:
        raise ValueError(f"{where}: gradient_steps must be >= 1, or -1, got 0")
    if loop.updates_per_round < 0:
        loop.updates_per_round = loop.steps_per_round * n
    loop.size = whole(counts["batch_size"], 1, where, "batch_size")
    loop.env_steps = whole(counts["env_steps"], 0, where, "env_steps")
    loop.horizon_start = whole(counts["horizon_start"], 0, where, "horizon_start")
    loop.horizon_steps = max(1, whole(counts["horizon_steps"], 0, where, "horizon_steps"))
    loop.learning_starts = whole(counts["learning_starts"], 0, where, "learning_starts")
    loop.update_from = whole(counts["update_from"], 0, where, "update_from")
    loop.gamma = number(counts["gamma"], 0.0, where, "gamma")
    loop.patience = number(counts["seconds"], 0.0, where, "seconds")
    for name, rng in (("action_rng", action_rng), ("replay_rng", replay_rng)):
        if not isinstance(rng, Rng):
            raise TypeError(f"{where}: {name} must be a rlox.kernels.rng.Rng, got {type(rng).__name__}")
    loop.env, loop.replay, loop.n, loop.ended, loop.began = env, replay, n, 0, now()
    loop.key, loop.position = replay_rng.key, replay_rng.position
    size = loop.size
    most = loop.n_rounds * loop.steps_per_round * n
    cdef cnp.ndarray states = np.empty((3, n, d), np.float32)
    cdef cnp.ndarray kept = np.empty(n * (a + 1), np.float32)
    cdef cnp.ndarray numbers = np.empty((3, n), np.float64)
    cdef cnp.ndarray flags = np.empty((2, max(n, size)), np.uint8)
    cdef cnp.ndarray batch = np.empty(size * (2 * d + a + 3), np.float32)
    cdef cnp.ndarray returns = np.empty(most, np.float64)
    cdef cnp.ndarray lengths = np.empty(most, np.int64)
    loop.here = <f32*>cnp.PyArray_DATA(states)
    loop.after, loop.final_obs = loop.here + n * d, loop.here + 2 * n * d
    loop.actions = <f32*>cnp.PyArray_DATA(kept)
    loop.rewards_f32 = loop.actions + n * a
    loop.rewards = <f64*>cnp.PyArray_DATA(numbers)
    loop.episode_return, loop.episode_length = loop.rewards + n, <i64*>(loop.rewards + 2 * n)
    loop.terminated = <u8*>cnp.PyArray_DATA(flags)
    loop.truncated = loop.terminated + max(n, loop.size)
    loop.returns, loop.lengths = <f64*>cnp.PyArray_DATA(returns), <i64*>cnp.PyArray_DATA(lengths)
    loop.batch_obs = <f32*>cnp.PyArray_DATA(batch)
    loop.batch_next = loop.batch_obs + loop.size * d
    loop.batch_actions = loop.batch_next + loop.size * d
    loop.batch_rewards = loop.batch_actions + loop.size * a
    loop.discounts = loop.batch_rewards + loop.size
    loop.td_errors = loop.discounts + loop.size
    states[0] = obs
    return [returns, lengths, states, kept, numbers, flags, batch]


cdef inline f64 progress_of(const Loop* loop, i64 steps) noexcept nogil:
    """Like `rlox.checkpoint.Counters.progress`, at this number of environment steps."""
    return bounded((steps - loop.horizon_start) / <f64>loop.horizon_steps, 0.0, 1.0)


cdef inline void take_in(Loop* loop, const void* chosen) noexcept nogil:
    """Step the environments with the actions `chosen`; store the transitions, with `loop.actions`, in the memory."""
    cdef Py_ssize_t i, n = loop.n
    cdef f32* swapped
    loop.env.step(loop.env.self, chosen, loop.after, loop.rewards, loop.terminated, loop.truncated, loop.final_obs,
                  loop.episode_return, loop.episode_length)
    for i in range(n):
        loop.rewards_f32[i] = <f32>loop.rewards[i]
        if loop.terminated[i] or loop.truncated[i]:
            loop.returns[loop.ended] = loop.episode_return[i]
            loop.lengths[loop.ended] = loop.episode_length[i]
            loop.ended += 1
    loop.replay.push(loop.replay.self, n, loop.here, loop.final_obs, loop.actions, loop.rewards_f32, loop.terminated,
                     loop.truncated)
    swapped = loop.here
    loop.here = loop.after
    loop.after = swapped
    loop.env_steps += n


cdef inline void draw(Loop* loop) noexcept nogil:
    """Draw the batch of the next update, like `OffPolicyAlgorithm.sample`."""
    cdef Py_ssize_t i
    cdef Block x = philox(loop.key, loop.position, DOMAIN_RNG)
    loop.position += 1
    loop.replay.sample(loop.replay.self, loop.size, below(join(x.a, x.b), <u64>1 << 63), loop.batch_obs,
                       loop.batch_next, loop.batch_actions, loop.batch_rewards, loop.terminated, loop.truncated,
                       loop.discounts)
    for i in range(loop.size):
        if loop.terminated[i]:
            loop.discounts[i] = 0.0
        elif loop.replay.n_step == 1:
            loop.discounts[i] = <f32>loop.gamma


cdef inline tuple close_loop(const Loop* loop, list arrays, object obs, object replay_rng, u64 begun):
    """Write back the observations and the generator's position; return the returns and lengths of the episodes."""
    cdef Py_ssize_t d = loop.env.obs_dim
    memcpy(cnp.PyArray_DATA(<cnp.ndarray>obs), loop.here, loop.n * d * sizeof(f32))
    replay_rng.skip(loop.position - begun)
    return arrays[0][:loop.ended], arrays[1][:loop.ended]
