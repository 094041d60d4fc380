"""What the vectorised loop knows about an environment.

State is float64 in structure-of-arrays form: component s of environment i of n is ``state[s * n + i]``.
Observations are float32 rows. An environment's .pxd fills one `EnvSpec` in ``spec()``; the loop in
vec_env.pyx calls it once per batch, so the indirection costs nothing per environment.
"""

from kernels.philox cimport DOMAIN_ENV_RESET, Block, philox
from kernels.types cimport f32, f64, u8, u64

ctypedef void (*reset_f)(f64* state, Py_ssize_t n, Py_ssize_t i, u64 key, u64 episode) noexcept nogil
ctypedef void (*observe_f)(const f64* state, Py_ssize_t n, Py_ssize_t i, f32* obs) noexcept nogil
ctypedef void (*step_f)(
    Py_ssize_t n, f64* state, const void* actions, f32* obs, f64* rewards, u8* terminated
) noexcept nogil


cdef struct EnvSpec:
    const char* env_id
    int state_size          # S
    int obs_dim             # D
    int n_actions           # 0 for continuous actions
    double act_high         # continuous actions lie in [-act_high, act_high]
    int max_episode_steps   # the time limit, which truncates
    reset_f reset           # start episode number `episode` of environment i
    observe_f observe       # write the D numbers of environment i
    step_f step             # actions (n,) int64 or float32 -> next state, obs (n, D), rewards, terminated


cdef inline Block reset_block(u64 key, u64 episode, u64 index) noexcept nogil:
    """Random block `index` of the start of an episode: a pure function of its three arguments."""
    return philox(key, episode, DOMAIN_ENV_RESET | (index << 32))
