"""Gusts: fly to the pad at the origin through changing wind. Thrust in four directions, or in two continuous ones.

Observation: position, velocity and wind, two numbers each. Reward: the progress towards the pad, minus 0.01 per step
and 0.02 per unit of thrust; 10 for arriving slowly, -5 for leaving the square. The time limit is 200 steps.

rlox calls the three functions at the end with whole batches; component s of environment i is at ``state[s * n + i]``.
"""

from cpython.pycapsule cimport PyCapsule_New
from libc.math cimport fabs, sqrt
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "rlox_native.h":
    const char* RLOX_ENV_CAPSULE
    const uint32_t RLOX_DOMAIN_RESET
    const uint32_t RLOX_DOMAIN_STEP

    ctypedef struct rlox_batch_v1:
        int64_t n
        double* state
        const uint64_t* keys
        const uint64_t* episodes
        const int64_t* steps

    ctypedef struct rlox_env_v1:
        uint32_t struct_size
        uint32_t flags
        const char* env_id
        int64_t state_size
        int64_t obs_dim
        int64_t n_actions
        int64_t act_dim
        const float* act_low
        const float* act_high
        int64_t max_episode_steps
        const void* params
        void (*reset_n)(const void* params, const rlox_batch_v1* batch, int64_t m, const int64_t* index,
                        float* obs) noexcept nogil
        void (*step_n)(const void* params, const rlox_batch_v1* batch, const void* actions, float* obs,
                       double* rewards, uint8_t* terminated) noexcept nogil
        void (*observe_n)(const void* params, const rlox_batch_v1* batch, float* obs) noexcept nogil

    void rlox_random(uint64_t key, uint64_t counter, uint32_t domain, uint32_t block, uint32_t* out) noexcept nogil
    double rlox_unit(uint32_t word) noexcept nogil

cdef enum:
    # Rows of the state: position, velocity, wind, and the gust that the wind turns to.
    X, Y, VX, VY, WX, WY, GX, GY, STATE_SIZE
    OBS_DIM = 6
    GUST_EVERY = 8    # steps


cdef inline void fly(const rlox_batch_v1* batch, const int64_t* choices, const float* thrusts, float* obs,
                     double* rewards, uint8_t* terminated) noexcept nogil:
    cdef Py_ssize_t n = batch.n
    cdef double* x = batch.state + X * n
    cdef double* y = batch.state + Y * n
    cdef double* vx = batch.state + VX * n
    cdef double* vy = batch.state + VY * n
    cdef double* wx = batch.state + WX * n
    cdef double* wy = batch.state + WY * n
    cdef double* gx = batch.state + GX * n
    cdef double* gy = batch.state + GY * n
    cdef Py_ssize_t i
    cdef double dt = 0.05, power = 2.0, drag = 0.95, turn = 0.1
    cdef double before, after, speed, ax, ay, px, py
    cdef bint arrived, lost
    for i in range(n):
        if choices != NULL:
            ax = <double>(choices[i] == 1) - <double>(choices[i] == 2)
            ay = <double>(choices[i] == 3) - <double>(choices[i] == 4)
        else:
            ax = min(max(<double>thrusts[2 * i], -1.0), 1.0)
            ay = min(max(<double>thrusts[2 * i + 1], -1.0), 1.0)
        px = x[i]
        py = y[i]
        before = sqrt(px * px + py * py)
        wx[i] += turn * (gx[i] - wx[i])
        wy[i] += turn * (gy[i] - wy[i])
        vx[i] = drag * vx[i] + dt * (power * ax + wx[i])
        vy[i] = drag * vy[i] + dt * (power * ay + wy[i])
        px += dt * vx[i]
        py += dt * vy[i]
        x[i] = px
        y[i] = py
        after = sqrt(px * px + py * py)
        speed = sqrt(vx[i] * vx[i] + vy[i] * vy[i])
        arrived = (after < 0.2) & (speed < 0.5)
        lost = (fabs(px) > 2.0) | (fabs(py) > 2.0)
        rewards[i] = (before - after - 0.01 - 0.02 * (fabs(ax) + fabs(ay))
                      + 10.0 * <double>arrived - 5.0 * <double>lost)
        terminated[i] = arrived | lost
        obs[OBS_DIM * i] = <float>px
        obs[OBS_DIM * i + 1] = <float>py
        obs[OBS_DIM * i + 2] = <float>vx[i]
        obs[OBS_DIM * i + 3] = <float>vy[i]
        obs[OBS_DIM * i + 4] = <float>wx[i]
        obs[OBS_DIM * i + 5] = <float>wy[i]


cdef void draw_gusts(const rlox_batch_v1* batch) noexcept nogil:
    """Draw a new gust every GUST_EVERY steps: a pure function of the environment's key, its episode and the step."""
    cdef Py_ssize_t i, n = batch.n
    cdef uint32_t[4] words
    for i in range(n):
        if batch.steps[i] % GUST_EVERY == 0:
            rlox_random(batch.keys[i], batch.episodes[i], RLOX_DOMAIN_STEP, <uint32_t>batch.steps[i], &words[0])
            batch.state[GX * n + i] = 2.0 * rlox_unit(words[0]) - 1.0
            batch.state[GY * n + i] = 2.0 * rlox_unit(words[1]) - 1.0


cdef void step_discrete(const void* params, const rlox_batch_v1* batch, const void* actions, float* obs,
                        double* rewards, uint8_t* terminated) noexcept nogil:
    draw_gusts(batch)
    fly(batch, <const int64_t*>actions, NULL, obs, rewards, terminated)


cdef void step_continuous(const void* params, const rlox_batch_v1* batch, const void* actions, float* obs,
                          double* rewards, uint8_t* terminated) noexcept nogil:
    draw_gusts(batch)
    fly(batch, NULL, <const float*>actions, obs, rewards, terminated)


cdef inline void look(const rlox_batch_v1* batch, Py_ssize_t i, float* obs) noexcept nogil:
    cdef Py_ssize_t k
    for k in range(OBS_DIM):
        obs[OBS_DIM * i + k] = <float>batch.state[k * batch.n + i]


cdef void reset(const void* params, const rlox_batch_v1* batch, int64_t m, const int64_t* index,
                float* obs) noexcept nogil:
    cdef Py_ssize_t j, k, i, n = batch.n
    cdef uint32_t[4] words
    for j in range(m):
        i = index[j]
        for k in range(STATE_SIZE):
            batch.state[k * n + i] = 0.0
        rlox_random(batch.keys[i], batch.episodes[i], RLOX_DOMAIN_RESET, 0, &words[0])
        batch.state[X * n + i] = 2.0 * rlox_unit(words[0]) - 1.0
        batch.state[Y * n + i] = 2.0 * rlox_unit(words[1]) - 1.0
        look(batch, i, obs)


cdef void observe(const void* params, const rlox_batch_v1* batch, float* obs) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(batch.n):
        look(batch, i, obs)


cdef float[2] LOW = [-1.0, -1.0]
cdef float[2] HIGH = [1.0, 1.0]
cdef rlox_env_v1 DISCRETE = rlox_env_v1(
    struct_size=sizeof(rlox_env_v1), flags=0, env_id="Gusts-v0", state_size=STATE_SIZE, obs_dim=OBS_DIM, n_actions=5,
    act_dim=1, act_low=NULL, act_high=NULL, max_episode_steps=200, params=NULL, reset_n=reset, step_n=step_discrete,
    observe_n=observe,
)
cdef rlox_env_v1 CONTINUOUS = rlox_env_v1(
    struct_size=sizeof(rlox_env_v1), flags=0, env_id="GustsContinuous-v0", state_size=STATE_SIZE, obs_dim=OBS_DIM,
    n_actions=0, act_dim=2, act_low=&LOW[0], act_high=&HIGH[0], max_episode_steps=200, params=NULL, reset_n=reset,
    step_n=step_continuous, observe_n=observe,
)

discrete = PyCapsule_New(&DISCRETE, RLOX_ENV_CAPSULE, NULL)
continuous = PyCapsule_New(&CONTINUOUS, RLOX_ENV_CAPSULE, NULL)
