"""Pendulum-v1: swing a pendulum up by a torque that is too weak to lift it at once.

The equations and constants are gymnasium's Pendulum-v1.

State        theta (rad, 0 is upright, not wrapped), theta_dot (rad/s), float64.
Observation  cos(theta), sin(theta), theta_dot, float32.
Action       one torque in N m, clipped to [-2, 2].
Reward       -(theta^2 + 0.1 theta_dot^2 + 0.001 torque^2) before the step, theta wrapped to [-pi, pi).
Start        theta uniform in (-pi, pi), theta_dot uniform in (-1, 1).
Terminated   never.
Truncated    after 200 steps.
"""

from libc.math cimport floor

from rlox.kernels.envs.base cimport reset_block, rlox_batch_v1, rlox_env_v1
from rlox.kernels.fmath cimport sincos
from rlox.kernels.philox cimport Block, open_unit
from rlox.kernels.types cimport cf32_r, cf64_r, f32, f32_r, f64, f64_r, i64, u8, u8_r

cdef extern from *:
    """
    static const float rlox_pendulum_low[1] = {-2.0f}, rlox_pendulum_high[1] = {2.0f};
    """
    const f32* LOW "rlox_pendulum_low"
    const f32* HIGH "rlox_pendulum_high"


cdef struct Constants:
    f64 dt            # s per step
    f64 gravity_term  # 3 g / (2 l) in 1/s^2, with g = 10 m/s^2 and l = 1 m
    f64 torque_term   # 3 / (m l^2) in 1/(kg m^2), with m = 1 kg
    f64 max_speed     # rad/s
    f64 max_torque    # N m
    f64 speed_cost    # per (rad/s)^2
    f64 torque_cost   # per (N m)^2
    f64 start_angle   # rad, the largest of those in which episodes start
    f64 start_speed   # rad/s


# Read by the tensor version of the environment, too (rlox.envs.tensor).
cdef inline Constants constants() noexcept nogil:
    return Constants(
        dt=0.05, gravity_term=15.0, torque_term=3.0, max_speed=8.0, max_torque=2.0, speed_cost=0.1,
        torque_cost=0.001, start_angle=3.14159265358979323846, start_speed=1.0,
    )


cdef inline f64 clip(f64 x, f64 limit) noexcept nogil:
    x = x if x < limit else limit
    return x if x > -limit else -limit


cdef inline f64 step_one(f64* theta, f64* theta_dot, f64 action) noexcept nogil:
    """Advance one environment by semi-implicit Euler; return the reward."""
    cdef f64 pi = 3.14159265358979323846
    cdef Constants c = constants()
    cdef f64 torque = clip(action, c.max_torque)
    cdef f64 turned = theta[0] + pi
    cdef f64 angle = turned - 2.0 * pi * floor(turned / (2.0 * pi)) - pi
    cdef f64 cost = angle * angle + c.speed_cost * (theta_dot[0] * theta_dot[0]) + c.torque_cost * (torque * torque)
    cdef f64 sin_theta, cos_theta
    sincos(theta[0], &sin_theta, &cos_theta)
    theta_dot[0] = clip(
        theta_dot[0] + (c.gravity_term * sin_theta + c.torque_term * torque) * c.dt, c.max_speed)
    theta[0] += theta_dot[0] * c.dt
    return -cost


cdef inline void write_obs(f32* obs, f64 theta, f64 theta_dot) noexcept nogil:
    cdef f64 sin_theta, cos_theta
    sincos(theta, &sin_theta, &cos_theta)
    obs[0] = <f32>cos_theta
    obs[1] = <f32>sin_theta
    obs[2] = <f32>theta_dot


cdef inline void step_all(i64 n, f64_r theta, f64_r theta_dot, cf32_r actions, f32_r obs, f64_r rewards,
                          u8_r terminated) noexcept nogil:
    cdef i64 i
    cdef f64 angle, speed
    for i in range(n):
        angle = theta[i]
        speed = theta_dot[i]
        rewards[i] = step_one(&angle, &speed, actions[i])
        theta[i] = angle
        theta_dot[i] = speed
        write_obs(obs + 3 * i, angle, speed)
    # Bytes in the first loop would make it process 64 environments at a time (see cartpole.pxd).
    for i in range(n):
        terminated[i] = 0


cdef inline void step_n(const void* params, const rlox_batch_v1* batch, const void* actions, f32* obs, f64* rewards,
                        u8* terminated) noexcept nogil:
    step_all(batch.n, batch.state, batch.state + batch.n, <const f32*>actions, obs, rewards, terminated)


cdef inline void reset_n(const void* params, const rlox_batch_v1* batch, i64 m, const i64* index,
                         f32* obs) noexcept nogil:
    cdef Constants c = constants()
    cdef i64 i, j
    cdef Block block
    cdef f64 theta, theta_dot
    for j in range(m):
        i = index[j]
        block = reset_block(batch, i)
        theta = c.start_angle * (2.0 * open_unit(block.a) - 1.0)
        theta_dot = c.start_speed * (2.0 * open_unit(block.b) - 1.0)
        batch.state[i] = theta
        batch.state[batch.n + i] = theta_dot
        write_obs(obs + 3 * i, theta, theta_dot)


cdef inline void observe_all(i64 n, cf64_r theta, cf64_r theta_dot, f32_r obs) noexcept nogil:
    cdef i64 i
    for i in range(n):
        write_obs(obs + 3 * i, theta[i], theta_dot[i])


cdef inline void observe_n(const void* params, const rlox_batch_v1* batch, f32* obs) noexcept nogil:
    observe_all(batch.n, batch.state, batch.state + batch.n, obs)


cdef inline rlox_env_v1 spec() noexcept:
    return rlox_env_v1(
        struct_size=sizeof(rlox_env_v1), flags=0, env_id="Pendulum-v1", state_size=2, obs_dim=3, n_actions=0,
        act_dim=1, act_low=LOW, act_high=HIGH, max_episode_steps=200, params=NULL,
        reset_n=reset_n, step_n=step_n, observe_n=observe_n, n_agents=0, central_dim=0, central_n=NULL, mask_n=NULL,
    )
