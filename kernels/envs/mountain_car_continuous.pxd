"""MountainCarContinuous-v0: MountainCar with a continuous force, which has a cost.

The equations and constants are gymnasium's MountainCarContinuous-v0, which rounds its state to float32 after every
step; here it stays float64, as in the other environments.

State        position in [-1.2, 0.6], velocity in [-0.07, 0.07] (position per step), float64.
Observation  the state, float32.
Action       one force, clipped to [-1, 1].
Reward       -0.1 force^2 (before the clipping), and 100 for reaching the goal.
Start        position uniform in (-0.6, -0.4), velocity 0.
Terminated   position >= 0.45 (with velocity >= 0).
Truncated    after 999 steps.
"""

from rlox.kernels.envs.base cimport rlox_batch_v1, rlox_env_v1
from rlox.kernels.envs.mountain_car cimport clip, observe_all, observe_n, reset_n, roll
from rlox.kernels.types cimport cf32_r, cf64_r, f32, f32_r, f64, f64_r, i64, u8, u8_r

cdef extern from *:
    """
    static const float rlox_mountain_car_low[1] = {-1.0f}, rlox_mountain_car_high[1] = {1.0f};
    """
    const f32* LOW "rlox_mountain_car_low"
    const f32* HIGH "rlox_mountain_car_high"


cdef struct Constants:
    f64 force        # position per step and step
    f64 max_action   # factor of it
    f64 goal         # position
    f64 goal_reward
    f64 action_cost  # per action^2


# Read by the tensor version of the environment, too (rlox.envs.tensor).
cdef inline Constants constants() noexcept nogil:
    return Constants(
        force=0.0015, max_action=1.0, goal=0.45, goal_reward=100.0, action_cost=0.1,
    )


cdef inline void roll_all(i64 n, f64_r position, f64_r velocity, cf32_r actions) noexcept nogil:
    cdef Constants c = constants()
    cdef i64 i
    cdef f64 p, v
    for i in range(n):
        p = position[i]
        v = velocity[i]
        roll(&p, &v, c.force * clip(actions[i], -c.max_action, c.max_action))
        position[i] = p
        velocity[i] = v


cdef inline void finish_all(i64 n, cf64_r position, cf64_r velocity, cf32_r actions, f32_r obs, f64_r rewards,
                            u8_r terminated) noexcept nogil:
    cdef Constants c = constants()
    cdef i64 i
    cdef f64 force
    cdef bint reached
    for i in range(n):
        force = actions[i]
        reached = (position[i] >= c.goal) & (velocity[i] >= 0.0)
        terminated[i] = reached
        rewards[i] = (c.goal_reward if reached else 0.0) - c.action_cost * (force * force)
    observe_all(n, position, velocity, obs)


cdef inline void step_n(const void* params, const rlox_batch_v1* batch, const void* actions, f32* obs, f64* rewards,
                        u8* terminated) noexcept nogil:
    roll_all(batch.n, batch.state, batch.state + batch.n, <const f32*>actions)
    finish_all(batch.n, batch.state, batch.state + batch.n, <const f32*>actions, obs, rewards, terminated)


cdef inline rlox_env_v1 spec() noexcept:
    return rlox_env_v1(
        struct_size=sizeof(rlox_env_v1), flags=0, env_id="MountainCarContinuous-v0", state_size=2, obs_dim=2,
        n_actions=0, act_dim=1, act_low=LOW, act_high=HIGH, max_episode_steps=999, params=NULL,
        reset_n=reset_n, step_n=step_n, observe_n=observe_n, n_agents=0, central_dim=0, central_n=NULL, mask_n=NULL,
    )
