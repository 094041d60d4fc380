"""GridWorld-v0: walk to the last corner of a grid. `Params` contains its size; the id stands for 5 x 5.

State        row, column, float64 whole numbers.
Observation  row / (rows - 1), column / (columns - 1), float32; 0 if there is only one row or column.
Action       0 up (row - 1), 1 right (column + 1), 2 down (row + 1), 3 left (column - 1). Walls block moves.
Reward       -0.01 for every step, 1 for the one that reaches the goal.
Start        uniform over all cells but the goal.
Terminated   in the last row and last column.
Truncated    after 4 * rows * columns steps.
"""

from rlox.kernels.envs.base cimport reset_block, rlox_batch_v1, rlox_env_v1
from rlox.kernels.philox cimport Block, below, join
from rlox.kernels.types cimport cf64_r, ci64_r, f32, f32_r, f64, f64_r, i64, u8, u8_r, u64


cdef struct Params:
    i64 rows
    i64 columns


cdef struct Constants:
    f64 step_reward  # for each step but the last one
    f64 goal_reward  # for the step that reaches the goal


# Read by the tensor version of the environment, too (rlox.envs.tensor).
cdef inline Constants constants() noexcept nogil:
    return Constants(
        step_reward=-0.01, goal_reward=1.0,
    )


cdef inline f64 move(f64 x, f64 by, f64 last) noexcept nogil:
    x = x + by
    x = x if x < last else last
    return x if x > 0.0 else 0.0


cdef inline void step_all(i64 n, i64 rows, i64 columns, f64_r row, f64_r column, ci64_r actions, f32_r obs,
                          f64_r rewards, u8_r terminated) noexcept nogil:
    cdef Constants reward = constants()
    cdef f64 last_row = <f64>(rows - 1)
    cdef f64 last_column = <f64>(columns - 1)
    cdef f32 height = <f32>max(rows - 1, 1)
    cdef f32 width = <f32>max(columns - 1, 1)
    cdef i64 i
    cdef int action
    cdef f64 r, c
    cdef bint there
    for i in range(n):
        action = <int>actions[i]
        r = move(row[i], <f64>(<int>(action == 2) - <int>(action == 0)), last_row)
        c = move(column[i], <f64>(<int>(action == 1) - <int>(action == 3)), last_column)
        row[i] = r
        column[i] = c
        obs[2 * i] = <f32>r / height
        obs[2 * i + 1] = <f32>c / width
        there = (r == last_row) & (c == last_column)
        terminated[i] = there
        rewards[i] = reward.goal_reward if there else reward.step_reward


cdef inline void step_n(const void* params, const rlox_batch_v1* batch, const void* actions, f32* obs, f64* rewards,
                        u8* terminated) noexcept nogil:
    cdef const Params* grid = <const Params*>params
    step_all(batch.n, grid.rows, grid.columns, batch.state, batch.state + batch.n, <const i64*>actions, obs, rewards,
             terminated)


cdef inline void observe_all(i64 n, i64 rows, i64 columns, cf64_r row, cf64_r column, f32_r obs) noexcept nogil:
    cdef f32 height = <f32>max(rows - 1, 1)
    cdef f32 width = <f32>max(columns - 1, 1)
    cdef i64 i
    for i in range(n):
        obs[2 * i] = <f32>row[i] / height
        obs[2 * i + 1] = <f32>column[i] / width


cdef inline void observe_n(const void* params, const rlox_batch_v1* batch, f32* obs) noexcept nogil:
    cdef const Params* grid = <const Params*>params
    observe_all(batch.n, grid.rows, grid.columns, batch.state, batch.state + batch.n, obs)


cdef inline void reset_n(const void* params, const rlox_batch_v1* batch, i64 m, const i64* index,
                         f32* obs) noexcept nogil:
    cdef const Params* grid = <const Params*>params
    cdef i64 i, j, cell
    cdef Block block
    for j in range(m):
        i = index[j]
        block = reset_block(batch, i)
        cell = <i64>below(join(block.a, block.b), <u64>(grid.rows * grid.columns - 1))  # the goal is the last cell
        batch.state[i] = <f64>(cell // grid.columns)
        batch.state[batch.n + i] = <f64>(cell % grid.columns)
        observe_all(1, grid.rows, grid.columns, batch.state + i, batch.state + batch.n + i, obs + 2 * i)


cdef inline rlox_env_v1 spec(const Params* grid) noexcept:
    return rlox_env_v1(
        struct_size=sizeof(rlox_env_v1), flags=0, env_id="GridWorld-v0", state_size=2, obs_dim=2, n_actions=4,
        act_dim=1, act_low=NULL, act_high=NULL, max_episode_steps=4 * grid.rows * grid.columns, params=grid,
        reset_n=reset_n, step_n=step_n, observe_n=observe_n, n_agents=0, central_dim=0, central_n=NULL, mask_n=NULL,
    )
