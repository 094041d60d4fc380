"""Acrobot-v1: swing the lower of two links above a line by a torque at the joint between them.

Sutton, "Generalization in reinforcement learning", 1996; the equations are in Sutton and Barto's book. The equations,
constants and integration here (one Runge-Kutta step of fourth order) are gymnasium's Acrobot-v1 ("book" dynamics).

State        theta1, theta2 (rad, 0 hangs down, wrapped to [-pi, pi]), their speeds (rad/s, within 4 pi and 9 pi),
             float64.
Observation  cos theta1, sin theta1, cos theta2, sin theta2, both speeds, float32.
Action       torque of -1, 0 or 1 N m, as 0, 1, 2.
Reward       -1 for every step, 0 for the one that terminates.
Start        each component uniform in (-0.1, 0.1), rounded to float32.
Terminated   -cos(theta1) - cos(theta1 + theta2) > 1: the tip is above the line.
Truncated    after 500 steps.
"""

from rlox.kernels.envs.base cimport reset_block, rlox_batch_v1, rlox_env_v1
from rlox.kernels.fmath cimport sincos
from rlox.kernels.philox cimport Block, open_unit
from rlox.kernels.types cimport cf64_r, ci64_r, f32, f32_r, f64, f64_r, i64, u8, u8_r


cdef struct Constants:
    f64 h            # s per step
    f64 max_speed_1  # rad/s
    f64 max_speed_2
    f64 gravity_1    # N m, of links of length 1, mass 1, centre of mass at 1/2, inertia 1, for g = 9.8
    f64 gravity_2
    f64 inertia_1    # kg m^2
    f64 inertia_2
    f64 coupling
    f64 height       # m, above which the tip must be
    f64 start        # largest number of the state in which episodes start
    f64 reward       # per step that does not end the episode


# Read by the tensor version of the environment, too (rlox.envs.tensor).
cdef inline Constants constants() noexcept nogil:
    return Constants(
        h=0.2, max_speed_1=4.0 * 3.14159265358979323846, max_speed_2=9.0 * 3.14159265358979323846,
        gravity_1=14.7, gravity_2=4.9, inertia_1=3.5, inertia_2=1.25, coupling=0.5, height=1.0, start=0.1,
        reward=-1.0,
    )


cdef inline f64 wrap(f64 x) noexcept nogil:
    """Turn an angle into [-pi, pi]."""
    cdef f64 pi = 3.14159265358979323846
    cdef f64 magic = 6755399441055744.0  # 1.5 * 2**52: adding it rounds to the nearest integer
    x = x - 2.0 * pi * ((x * (0.5 / pi) + magic) - magic)
    # The rounding above may be off if x is close to an odd multiple of pi.
    x = x - 2.0 * pi if x > pi else x
    return x + 2.0 * pi if x < -pi else x


cdef inline f64 bound(f64 x, f64 limit) noexcept nogil:
    x = x if x < limit else limit
    return x if x > -limit else -limit


cdef inline void accelerate(f64 theta1, f64 theta2, f64 speed1, f64 speed2, f64 torque, f64* acc1,
                            f64* acc2) noexcept nogil:
    """Compute the accelerations of the links."""
    cdef Constants c = constants()
    cdef f64 sin1, cos1, sin2, cos2, d1, d2, phi1, phi2, turn, determinant, per
    sincos(theta1, &sin1, &cos1)
    sincos(theta2, &sin2, &cos2)
    d1 = c.inertia_1 + cos2
    d2 = c.inertia_2 + c.coupling * cos2
    phi2 = c.gravity_2 * (sin1 * cos2 + cos1 * sin2)
    phi1 = c.gravity_1 * sin1 + phi2 - sin2 * speed2 * (c.coupling * speed2 + speed1)
    turn = torque - c.coupling * (speed1 * speed1) * sin2 - phi2
    # One division for both accelerations.
    determinant = c.inertia_2 * d1 - d2 * d2
    per = 1.0 / (d1 * determinant)
    acc2[0] = (d1 * turn + d2 * phi1) * (d1 * per)
    acc1[0] = -(d2 * acc2[0] + phi1) * (determinant * per)


cdef inline void write_obs(f32* obs, f64 sin1, f64 cos1, f64 sin2, f64 cos2, f64 speed1, f64 speed2) noexcept nogil:
    obs[0] = <f32>cos1
    obs[1] = <f32>sin1
    obs[2] = <f32>cos2
    obs[3] = <f32>sin2
    obs[4] = <f32>speed1
    obs[5] = <f32>speed2


cdef inline void step_all(i64 n, f64_r theta1, f64_r theta2, f64_r speed1, f64_r speed2, ci64_r actions, f32_r obs,
                          f64_r rewards, u8_r terminated) noexcept nogil:
    cdef Constants c = constants()
    cdef f64 h = c.h
    cdef i64 i
    cdef f64 a, b, u, v, u1, v1, u2, v2, u3, v3, p1, q1, p2, q2, p3, q3, p4, q4
    cdef f64 torque, sin1, cos1, sin2, cos2
    cdef bint up
    for i in range(n):
        a = theta1[i]
        b = theta2[i]
        u = speed1[i]
        v = speed2[i]
        torque = <f64><int>actions[i] - 1.0
        accelerate(a, b, u, v, torque, &p1, &q1)
        u1 = u + 0.5 * h * p1
        v1 = v + 0.5 * h * q1
        accelerate(a + 0.5 * h * u, b + 0.5 * h * v, u1, v1, torque, &p2, &q2)
        u2 = u + 0.5 * h * p2
        v2 = v + 0.5 * h * q2
        accelerate(a + 0.5 * h * u1, b + 0.5 * h * v1, u2, v2, torque, &p3, &q3)
        u3 = u + h * p3
        v3 = v + h * q3
        accelerate(a + h * u2, b + h * v2, u3, v3, torque, &p4, &q4)
        a = wrap(a + h / 6.0 * (u + 2.0 * u1 + 2.0 * u2 + u3))
        b = wrap(b + h / 6.0 * (v + 2.0 * v1 + 2.0 * v2 + v3))
        u = bound(u + h / 6.0 * (p1 + 2.0 * p2 + 2.0 * p3 + p4), c.max_speed_1)
        v = bound(v + h / 6.0 * (q1 + 2.0 * q2 + 2.0 * q3 + q4), c.max_speed_2)
        theta1[i] = a
        theta2[i] = b
        speed1[i] = u
        speed2[i] = v
        sincos(a, &sin1, &cos1)
        sincos(b, &sin2, &cos2)
        write_obs(obs + 6 * i, sin1, cos1, sin2, cos2, u, v)
        up = sin1 * sin2 - cos1 * cos2 - cos1 > c.height
        rewards[i] = 0.0 if up else c.reward
    # Bytes in the first loop would make it process 64 environments at a time (see cartpole.pxd).
    for i in range(n):
        terminated[i] = rewards[i] == 0.0


cdef inline void step_n(const void* params, const rlox_batch_v1* batch, const void* actions, f32* obs, f64* rewards,
                        u8* terminated) noexcept nogil:
    cdef i64 n = batch.n
    step_all(n, batch.state, batch.state + n, batch.state + 2 * n, batch.state + 3 * n, <const i64*>actions, obs,
             rewards, terminated)


cdef inline void reset_n(const void* params, const rlox_batch_v1* batch, i64 m, const i64* index,
                         f32* obs) noexcept nogil:
    cdef f64 most = constants().start
    cdef i64 i, j
    cdef int k
    cdef Block block
    cdef f64[4] start
    cdef f64 sin1, cos1, sin2, cos2
    for j in range(m):
        i = index[j]
        block = reset_block(batch, i)
        start[0] = <f32>(2.0 * most * open_unit(block.a) - most)
        start[1] = <f32>(2.0 * most * open_unit(block.b) - most)
        start[2] = <f32>(2.0 * most * open_unit(block.c) - most)
        start[3] = <f32>(2.0 * most * open_unit(block.d) - most)
        for k in range(4):
            batch.state[k * batch.n + i] = start[k]
        sincos(start[0], &sin1, &cos1)
        sincos(start[1], &sin2, &cos2)
        write_obs(obs + 6 * i, sin1, cos1, sin2, cos2, start[2], start[3])


cdef inline void observe_all(i64 n, cf64_r theta1, cf64_r theta2, cf64_r speed1, cf64_r speed2,
                             f32_r obs) noexcept nogil:
    cdef i64 i
    cdef f64 sin1, cos1, sin2, cos2
    for i in range(n):
        sincos(theta1[i], &sin1, &cos1)
        sincos(theta2[i], &sin2, &cos2)
        write_obs(obs + 6 * i, sin1, cos1, sin2, cos2, speed1[i], speed2[i])


cdef inline void observe_n(const void* params, const rlox_batch_v1* batch, f32* obs) noexcept nogil:
    cdef i64 n = batch.n
    observe_all(n, batch.state, batch.state + n, batch.state + 2 * n, batch.state + 3 * n, obs)


cdef inline rlox_env_v1 spec() noexcept:
    return rlox_env_v1(
        struct_size=sizeof(rlox_env_v1), flags=0, env_id="Acrobot-v1", state_size=4, obs_dim=6, n_actions=3,
        act_dim=1, act_low=NULL, act_high=NULL, max_episode_steps=500, params=NULL,
        reset_n=reset_n, step_n=step_n, observe_n=observe_n, n_agents=0, central_dim=0, central_n=NULL, mask_n=NULL,
    )
