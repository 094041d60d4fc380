"""MountainCar-v0: rock a car, which is too weak for the slope, out of a valley.

Moore, "Efficient memory-based learning for robot control", 1990; the equations and constants are gymnasium's
MountainCar-v0.

State        position in [-1.2, 0.6], velocity in [-0.07, 0.07] (position per step), float64.
Observation  the state, float32.
Action       0 pushes left, 1 does nothing, 2 pushes right.
Reward       -1 for every step, the last one included.
Start        position uniform in (-0.6, -0.4), velocity 0.
Terminated   position >= 0.5 (with velocity >= 0).
Truncated    after 200 steps.
"""

from rlox.kernels.envs.base cimport reset_block, rlox_batch_v1, rlox_env_v1
from rlox.kernels.fmath cimport sincos
from rlox.kernels.philox cimport open_unit
from rlox.kernels.types cimport cf64_r, ci64_r, f32, f32_r, f64, f64_r, i64, u8, u8_r


cdef struct Constants:
    f64 left_wall    # position
    f64 right_wall
    f64 max_speed    # position per step
    f64 gravity      # position per step and step, as are forces
    f64 force
    f64 goal
    f64 start_low    # episodes start between it and `start_width` beyond it
    f64 start_width
    f64 reward       # per step


# Read by the tensor version of the environment, too (rlox.envs.tensor).
cdef inline Constants constants() noexcept nogil:
    return Constants(
        left_wall=-1.2, right_wall=0.6, max_speed=0.07, gravity=0.0025, force=0.001, goal=0.5, start_low=-0.6,
        start_width=0.2, reward=-1.0,
    )


cdef inline f64 clip(f64 x, f64 low, f64 high) noexcept nogil:
    x = x if x < high else high
    return x if x > low else low


cdef inline void roll(f64* position, f64* velocity, f64 push) noexcept nogil:
    """Let the car roll for a step under `push` and gravity."""
    cdef Constants c = constants()
    cdef f64 sine, cosine, p, v
    sincos(3.0 * position[0], &sine, &cosine)
    v = clip(velocity[0] + (push - c.gravity * cosine), -c.max_speed, c.max_speed)
    p = clip(position[0] + v, c.left_wall, c.right_wall)
    position[0] = p
    velocity[0] = 0.0 if (p == c.left_wall) & (v < 0.0) else v


# Flags, rewards and observations are computed in a second loop over the new state. In a single loop, GCC propagates the
# constants of the clipping into them and introduces branches that prevent vectorisation.

cdef inline void roll_all(i64 n, f64_r position, f64_r velocity, ci64_r actions) noexcept nogil:
    cdef f64 force = constants().force
    cdef i64 i
    cdef f64 p, v
    for i in range(n):
        p = position[i]
        v = velocity[i]
        roll(&p, &v, force * (<f64><int>actions[i] - 1.0))
        position[i] = p
        velocity[i] = v


cdef inline void finish_all(i64 n, cf64_r position, cf64_r velocity, f32_r obs, f64_r rewards,
                            u8_r terminated) noexcept nogil:
    cdef Constants c = constants()
    cdef i64 i
    for i in range(n):
        terminated[i] = (position[i] >= c.goal) & (velocity[i] >= 0.0)
        rewards[i] = c.reward
    observe_all(n, position, velocity, obs)


cdef inline void step_n(const void* params, const rlox_batch_v1* batch, const void* actions, f32* obs, f64* rewards,
                        u8* terminated) noexcept nogil:
    roll_all(batch.n, batch.state, batch.state + batch.n, <const i64*>actions)
    finish_all(batch.n, batch.state, batch.state + batch.n, obs, rewards, terminated)


cdef inline void reset_n(const void* params, const rlox_batch_v1* batch, i64 m, const i64* index,
                         f32* obs) noexcept nogil:
    cdef Constants c = constants()
    cdef i64 i, j
    cdef f64 position
    for j in range(m):
        i = index[j]
        position = c.start_width * open_unit(reset_block(batch, i).a) + c.start_low
        batch.state[i] = position
        batch.state[batch.n + i] = 0.0
        obs[2 * i] = <f32>position
        obs[2 * i + 1] = 0.0


cdef inline void observe_all(i64 n, cf64_r position, cf64_r velocity, f32_r obs) noexcept nogil:
    cdef i64 i
    for i in range(n):
        obs[2 * i] = <f32>position[i]
        obs[2 * i + 1] = <f32>velocity[i]


cdef inline void observe_n(const void* params, const rlox_batch_v1* batch, f32* obs) noexcept nogil:
    observe_all(batch.n, batch.state, batch.state + batch.n, obs)


cdef inline rlox_env_v1 spec() noexcept:
    return rlox_env_v1(
        struct_size=sizeof(rlox_env_v1), flags=0, env_id="MountainCar-v0", state_size=2, obs_dim=2, n_actions=3,
        act_dim=1, act_low=NULL, act_high=NULL, max_episode_steps=200, params=NULL,
        reset_n=reset_n, step_n=step_n, observe_n=observe_n, n_agents=0, central_dim=0, central_n=NULL, mask_n=NULL,
    )
