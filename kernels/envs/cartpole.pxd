"""CartPole-v1: keep a pole upright on a cart by pushing the cart left or right.

Barto, Sutton, Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems",
1983; the equations (with Florian's correction) and constants are gymnasium's CartPole-v1.

State        x (m), x_dot (m/s), theta (rad, 0 is upright), theta_dot (rad/s), float64.
Observation  the state, float32.
Action       0 pushes left, 1 pushes right.
Reward       1 for every step, the last one included.
Start        each component uniform in (-0.05, 0.05).
Terminated   |x| > 2.4 m or |theta| > 12 degrees.
Truncated    after 500 steps.
"""

from libc.math cimport fabs

from kernels.envs.base cimport EnvSpec, reset_block
from kernels.fmath cimport sincos
from kernels.philox cimport Block, open_unit
from kernels.types cimport f32, f32_r, f64, f64_r, ci64_r, i64, u8, u8_r, u64

cdef enum:
    STATE_SIZE = 4
    OBS_DIM = 4
    N_ACTIONS = 2
    MAX_STEPS = 500


cdef inline bint step_one(f64* x, f64* x_dot, f64* theta, f64* theta_dot, i64 action) noexcept nogil:
    """Advance one environment by Euler's method; return whether it terminated."""
    cdef f64 gravity = 9.8            # m/s^2
    cdef f64 mass_pole = 0.1          # kg
    cdef f64 total_mass = 1.1         # kg, the cart's 1.0 and the pole
    cdef f64 half_length = 0.5        # m, half of the pole
    cdef f64 pole_moment = 0.05       # kg m, mass_pole * half_length
    cdef f64 tau = 0.02               # s per step
    cdef f64 x_limit = 2.4            # m
    cdef f64 theta_limit = 0.20943951023931953  # rad, 12 degrees
    cdef f64 force = -10.0 + 20.0 * <f64><int>action  # N
    cdef f64 sin_theta, cos_theta, push, theta_acc, x_acc
    sincos(theta[0], &sin_theta, &cos_theta)
    push = (force + pole_moment * (theta_dot[0] * theta_dot[0]) * sin_theta) / total_mass
    theta_acc = (gravity * sin_theta - cos_theta * push) / (
        half_length * (4.0 / 3.0 - mass_pole * (cos_theta * cos_theta) / total_mass))
    x_acc = push - pole_moment * theta_acc * cos_theta / total_mass
    x[0] += tau * x_dot[0]
    x_dot[0] += tau * x_acc
    theta[0] += tau * theta_dot[0]
    theta_dot[0] += tau * theta_acc
    return (fabs(x[0]) > x_limit) | (fabs(theta[0]) > theta_limit)


cdef inline void step_all(Py_ssize_t n, f64_r x, f64_r x_dot, f64_r theta, f64_r theta_dot,
                          ci64_r actions, f32_r obs, f64_r rewards, u8_r terminated) noexcept nogil:
    cdef Py_ssize_t i
    cdef f64 p, v, angle, spin
    for i in range(n):
        p = x[i]
        v = x_dot[i]
        angle = theta[i]
        spin = theta_dot[i]
        terminated[i] = step_one(&p, &v, &angle, &spin, actions[i])
        x[i] = p
        x_dot[i] = v
        theta[i] = angle
        theta_dot[i] = spin
        obs[4 * i] = <f32>p
        obs[4 * i + 1] = <f32>v
        obs[4 * i + 2] = <f32>angle
        obs[4 * i + 3] = <f32>spin
        rewards[i] = 1.0


cdef inline void step(Py_ssize_t n, f64* state, const void* actions, f32* obs, f64* rewards,
                      u8* terminated) noexcept nogil:
    step_all(n, state, state + n, state + 2 * n, state + 3 * n, <const i64*>actions, obs, rewards,
             terminated)


cdef inline void reset(f64* state, Py_ssize_t n, Py_ssize_t i, u64 key, u64 episode) noexcept nogil:
    cdef Block block = reset_block(key, episode, 0)
    state[i] = 0.1 * open_unit(block.a) - 0.05
    state[n + i] = 0.1 * open_unit(block.b) - 0.05
    state[2 * n + i] = 0.1 * open_unit(block.c) - 0.05
    state[3 * n + i] = 0.1 * open_unit(block.d) - 0.05


cdef inline void observe(const f64* state, Py_ssize_t n, Py_ssize_t i, f32* obs) noexcept nogil:
    cdef int k
    for k in range(4):
        obs[k] = <f32>state[k * n + i]


cdef inline EnvSpec spec() noexcept:
    return EnvSpec(
        env_id="CartPole-v1", state_size=STATE_SIZE, obs_dim=OBS_DIM, n_actions=N_ACTIONS, act_high=0.0,
        max_episode_steps=MAX_STEPS, reset=reset, observe=observe, step=step,
    )
