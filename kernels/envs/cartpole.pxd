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

from rlox.kernels.envs.base cimport reset_block, rlox_batch_v1, rlox_env_v1
from rlox.kernels.fmath cimport sincos
from rlox.kernels.philox cimport Block, open_unit
from rlox.kernels.types cimport cf64_r, ci64_r, f32, f32_r, f64, f64_r, i64, u8, u8_r


cdef struct Constants:
    f64 gravity      # m/s^2
    f64 per_mass     # 1/kg, of the cart's 1.0 and the pole's 0.1
    f64 pole_mass    # kg
    f64 half_length  # m, half of the pole
    f64 pole_moment  # kg m, mass of the pole times half its length
    f64 force        # N
    f64 tau          # s per step
    f64 x_limit      # m
    f64 theta_limit  # rad, 12 degrees
    f64 start        # largest number of the state in which episodes start
    f64 reward       # per step


# Read by the tensor version of the environment, too (rlox.envs.tensor).
cdef inline Constants constants() noexcept nogil:
    return Constants(
        gravity=9.8, per_mass=1.0 / 1.1, pole_mass=0.1, half_length=0.5, pole_moment=0.05, force=10.0, tau=0.02,
        x_limit=2.4, theta_limit=0.20943951023931953, start=0.05, reward=1.0,
    )


cdef inline void step_one(f64* x, f64* x_dot, f64* theta, f64* theta_dot, i64 action) noexcept nogil:
    """Advance one environment by Euler's method."""
    cdef Constants c = constants()
    cdef f64 force = -c.force + 2.0 * c.force * <f64><int>action
    cdef f64 sin_theta, cos_theta, push, theta_acc, x_acc
    sincos(theta[0], &sin_theta, &cos_theta)
    # Multiplying by 1 / mass saves three divisions, which halves the time of a step; results differ by rounding.
    push = (force + c.pole_moment * (theta_dot[0] * theta_dot[0]) * sin_theta) * c.per_mass
    theta_acc = (c.gravity * sin_theta - cos_theta * push) / (
        c.half_length * (4.0 / 3.0 - c.pole_mass * c.per_mass * (cos_theta * cos_theta)))
    x_acc = push - c.pole_moment * c.per_mass * theta_acc * cos_theta
    x[0] += c.tau * x_dot[0]
    x_dot[0] += c.tau * x_acc
    theta[0] += c.tau * theta_dot[0]
    theta_dot[0] += c.tau * theta_acc


# The bytes of `terminated` are written in a loop of their own. In the first loop, they would make the vectoriser take
# 64 environments at a time, which are too many for the registers and for a batch of 8.

cdef inline void step_all(i64 n, f64_r x, f64_r x_dot, f64_r theta, f64_r theta_dot, ci64_r actions,
                          f32_r obs) noexcept nogil:
    cdef i64 i
    cdef f64 p, v, angle, spin
    for i in range(n):
        p = x[i]
        v = x_dot[i]
        angle = theta[i]
        spin = theta_dot[i]
        step_one(&p, &v, &angle, &spin, actions[i])
        x[i] = p
        x_dot[i] = v
        theta[i] = angle
        theta_dot[i] = spin
        obs[4 * i] = <f32>p
        obs[4 * i + 1] = <f32>v
        obs[4 * i + 2] = <f32>angle
        obs[4 * i + 3] = <f32>spin


cdef inline void rewards_and_ends(i64 n, cf64_r x, cf64_r theta, f64_r rewards, u8_r terminated) noexcept nogil:
    cdef Constants c = constants()
    cdef i64 i
    for i in range(n):
        terminated[i] = (fabs(x[i]) > c.x_limit) | (fabs(theta[i]) > c.theta_limit)
    for i in range(n):
        rewards[i] = c.reward


cdef inline void step_n(const void* params, const rlox_batch_v1* batch, const void* actions, f32* obs, f64* rewards,
                        u8* terminated) noexcept nogil:
    cdef i64 n = batch.n
    step_all(n, batch.state, batch.state + n, batch.state + 2 * n, batch.state + 3 * n, <const i64*>actions, obs)
    rewards_and_ends(n, batch.state, batch.state + 2 * n, rewards, terminated)


cdef inline void reset_n(const void* params, const rlox_batch_v1* batch, i64 m, const i64* index,
                         f32* obs) noexcept nogil:
    cdef f64 most = constants().start
    cdef i64 i, j
    cdef int k
    cdef Block block
    cdef f64[4] start
    for j in range(m):
        i = index[j]
        block = reset_block(batch, i)
        start[0] = 2.0 * most * open_unit(block.a) - most
        start[1] = 2.0 * most * open_unit(block.b) - most
        start[2] = 2.0 * most * open_unit(block.c) - most
        start[3] = 2.0 * most * open_unit(block.d) - most
        for k in range(4):
            batch.state[k * batch.n + i] = start[k]
            obs[4 * i + k] = <f32>start[k]


cdef inline void observe_all(i64 n, cf64_r x, cf64_r x_dot, cf64_r theta, cf64_r theta_dot, f32_r obs) noexcept nogil:
    cdef i64 i
    for i in range(n):
        obs[4 * i] = <f32>x[i]
        obs[4 * i + 1] = <f32>x_dot[i]
        obs[4 * i + 2] = <f32>theta[i]
        obs[4 * i + 3] = <f32>theta_dot[i]


cdef inline void observe_n(const void* params, const rlox_batch_v1* batch, f32* obs) noexcept nogil:
    cdef i64 n = batch.n
    observe_all(n, batch.state, batch.state + n, batch.state + 2 * n, batch.state + 3 * n, obs)


cdef inline rlox_env_v1 spec() noexcept:
    return rlox_env_v1(
        struct_size=sizeof(rlox_env_v1), flags=0, env_id="CartPole-v1", state_size=4, obs_dim=4, n_actions=2,
        act_dim=1, act_low=NULL, act_high=NULL, max_episode_steps=500, params=NULL,
        reset_n=reset_n, step_n=step_n, observe_n=observe_n, n_agents=0, central_dim=0, central_n=NULL, mask_n=NULL,
    )
