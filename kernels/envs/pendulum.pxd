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

from kernels.envs.base cimport EnvSpec, reset_block
from kernels.fmath cimport sincos
from kernels.philox cimport Block, open_unit
from kernels.types cimport cf32_r, f32, f32_r, f64, f64_r, u8, u8_r, u64

cdef enum:
    STATE_SIZE = 2
    OBS_DIM = 3
    MAX_STEPS = 200


cdef inline f64 clip(f64 x, f64 limit) noexcept nogil:
    x = x if x < limit else limit
    return x if x > -limit else -limit


cdef inline f64 step_one(f64* theta, f64* theta_dot, f64 action) noexcept nogil:
    """Advance one environment by semi-implicit Euler; return the reward."""
    cdef f64 pi = 3.14159265358979323846
    cdef f64 dt = 0.05           # s per step
    cdef f64 gravity_term = 15.0  # 3 g / (2 l) in 1/s^2, with g = 10 m/s^2 and l = 1 m
    cdef f64 torque_term = 3.0   # 3 / (m l^2) in 1/(kg m^2), with m = 1 kg
    cdef f64 max_speed = 8.0     # rad/s
    cdef f64 max_torque = 2.0    # N m
    cdef f64 torque = clip(action, max_torque)
    cdef f64 turned = theta[0] + pi
    cdef f64 angle = turned - 2.0 * pi * floor(turned / (2.0 * pi)) - pi
    cdef f64 cost = angle * angle + 0.1 * (theta_dot[0] * theta_dot[0]) + 0.001 * (torque * torque)
    cdef f64 sin_theta, cos_theta
    sincos(theta[0], &sin_theta, &cos_theta)
    theta_dot[0] = clip(
        theta_dot[0] + (gravity_term * sin_theta + torque_term * torque) * dt, max_speed)
    theta[0] += theta_dot[0] * dt
    return -cost


cdef inline void step_all(Py_ssize_t n, f64_r theta, f64_r theta_dot, cf32_r actions, f32_r obs,
                          f64_r rewards, u8_r terminated) noexcept nogil:
    cdef Py_ssize_t i
    cdef f64 angle, speed, sin_theta, cos_theta
    for i in range(n):
        angle = theta[i]
        speed = theta_dot[i]
        rewards[i] = step_one(&angle, &speed, actions[i])
        theta[i] = angle
        theta_dot[i] = speed
        sincos(angle, &sin_theta, &cos_theta)
        obs[3 * i] = <f32>cos_theta
        obs[3 * i + 1] = <f32>sin_theta
        obs[3 * i + 2] = <f32>speed
        terminated[i] = 0


cdef inline void step(Py_ssize_t n, f64* state, const void* actions, f32* obs, f64* rewards,
                      u8* terminated) noexcept nogil:
    step_all(n, state, state + n, <const f32*>actions, obs, rewards, terminated)


cdef inline void reset(f64* state, Py_ssize_t n, Py_ssize_t i, u64 key, u64 episode) noexcept nogil:
    cdef Block block = reset_block(key, episode, 0)
    state[i] = 3.14159265358979323846 * (2.0 * open_unit(block.a) - 1.0)
    state[n + i] = 2.0 * open_unit(block.b) - 1.0


cdef inline void observe(const f64* state, Py_ssize_t n, Py_ssize_t i, f32* obs) noexcept nogil:
    cdef f64 sin_theta, cos_theta
    sincos(state[i], &sin_theta, &cos_theta)
    obs[0] = <f32>cos_theta
    obs[1] = <f32>sin_theta
    obs[2] = <f32>state[n + i]


cdef inline EnvSpec spec() noexcept:
    return EnvSpec(
        env_id="Pendulum-v1", state_size=STATE_SIZE, obs_dim=OBS_DIM, n_actions=0, act_high=2.0,
        max_episode_steps=MAX_STEPS, reset=reset, observe=observe, step=step,
    )
