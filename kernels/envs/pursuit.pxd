"""GridPursuit-v0: several pursuers catch a prey that flees over a grid, which no pursuer can do alone.

`Params` contains the size of the grid and the numbers of agents. By default there are 8 x 8 cells and three pursuers,
two of which must be next to the prey.

State        row and column of each pursuer, then of the prey, float64 whole numbers.
Observation  of pursuer a: its own row and column, then the position relative to its own of the prey and of pursuers
             a + 1, a + 2, … (cyclically), all divided by size - 1; float32. Central: all positions in the order of the
             state, also divided by size - 1.
Action       0 stay, 1 up (row - 1), 2 right (column + 1), 3 down (row + 1), 4 left (column - 1). Walls block moves;
             several pursuers may be in one cell.
Prey         Moves after the pursuers and with the same five moves, unless it is caught: with probability `randomness`
             a random move, else the move that takes it farthest from the nearest pursuer, then from all of them.
             Ties are broken by the order of the moves, starting from a random one.
Reward       for each pursuer -0.01 per step, and 1 more for the step that catches the prey.
Start        every position uniform over all cells.
Terminated   n_catchers or more pursuers are at most one cell from the prey, not diagonally.
Truncated    after max_cycles steps.
"""

from rlox.kernels.envs.base cimport RLOX_ENV_AGENTS, rlox_batch_v1, rlox_env_v1, step_block
from rlox.kernels.philox cimport DOMAIN_ENV_RESET, Block, philox
from rlox.kernels.types cimport f32, f64, i64, u8, u32, u64

cdef enum:
    MOST_PURSUERS = 16


cdef struct Params:
    i64 size            # cells in a row and in a column
    i64 n_pursuers
    i64 n_catchers
    i64 max_cycles      # steps
    u64 random_below    # the prey moves at random if a random word of 32 bits is below this


cdef struct Constants:
    f64 step_reward   # for each step
    f64 catch_reward  # more for the step that catches the prey
    i64 reach         # cells, the largest distance from which pursuers catch it
    i64 far           # cells, more than all distances together


# Read by the tensor version of the environment, too (rlox.envs.tensor).
cdef inline Constants constants() noexcept nogil:
    return Constants(
        step_reward=-0.01, catch_reward=1.0, reach=1, far=1 << 16,
    )


cdef inline i64 clipped(i64 x, i64 last) noexcept nogil:
    x = x if x < last else last
    return x if x > 0 else 0


# Changes of the row and column by moves 0 ... 4.
cdef inline i64 down(i64 move) noexcept nogil:
    return <i64>(move == 3) - <i64>(move == 1)


cdef inline i64 right(i64 move) noexcept nogil:
    return <i64>(move == 2) - <i64>(move == 4)


cdef inline i64 distance(i64 r, i64 c, i64 row, i64 column) noexcept nogil:
    r = r - row
    c = c - column
    return (r if r >= 0 else -r) + (c if c >= 0 else -c)


cdef inline void flee(const Params* grid, const i64* rows, const i64* columns, i64* row, i64* column,
                      const Block* words) noexcept nogil:
    """Move the prey from `row` and `column`, which are updated."""
    cdef i64 last = grid.size - 1, far = constants().far
    cdef i64 first = <i64>((<u64>words.b * 5) >> 32)
    cdef i64 k, a, move, r, c, d, nearest, total, score, best = -1, best_row = row[0], best_column = column[0]
    cdef i64 n_moves = 1 if <u64>words.a < grid.random_below else 5
    for k in range(n_moves):
        move = first + k
        move = move - 5 if move >= 5 else move
        r = clipped(row[0] + down(move), last)
        c = clipped(column[0] + right(move), last)
        nearest = far
        total = 0
        for a in range(grid.n_pursuers):
            d = distance(r, c, rows[a], columns[a])
            nearest = d if d < nearest else nearest
            total += d
        score = nearest * far + total
        if score > best:
            best = score
            best_row = r
            best_column = c
    row[0] = best_row
    column[0] = best_column


cdef inline void write_view(const Params* grid, const i64* rows, const i64* columns, i64 row, i64 column,
                            f32* obs) noexcept nogil:
    """Write the observations (A, D) of one environment."""
    cdef i64 n = grid.n_pursuers
    cdef f32 scale = <f32>1.0 / <f32>(grid.size - 1)
    cdef i64 a, k, other
    cdef f32* to = obs
    for a in range(n):
        to[0] = <f32>rows[a] * scale
        to[1] = <f32>columns[a] * scale
        to[2] = <f32>(row - rows[a]) * scale
        to[3] = <f32>(column - columns[a]) * scale
        for k in range(1, n):
            other = a + k
            other = other - n if other >= n else other
            to[2 + 2 * k] = <f32>(rows[other] - rows[a]) * scale
            to[3 + 2 * k] = <f32>(columns[other] - columns[a]) * scale
        to += 2 + 2 * n


cdef inline void read(const Params* grid, const rlox_batch_v1* batch, i64 i, i64* rows, i64* columns) noexcept nogil:
    """Read the positions of environment i; the last is that of the prey."""
    cdef i64 a
    for a in range(grid.n_pursuers + 1):
        rows[a] = <i64>batch.state[2 * a * batch.n + i]
        columns[a] = <i64>batch.state[(2 * a + 1) * batch.n + i]


cdef inline void step_n(const void* params, const rlox_batch_v1* batch, const void* actions, f32* obs, f64* rewards,
                        u8* terminated) noexcept nogil:
    cdef const Params* grid = <const Params*>params
    cdef const i64* moves = <const i64*>actions
    cdef Constants c = constants()
    cdef i64 n = grid.n_pursuers, last = grid.size - 1
    cdef i64 dim = n * (2 + 2 * n)
    cdef i64[MOST_PURSUERS + 1] rows
    cdef i64[MOST_PURSUERS + 1] columns
    cdef i64 i, a, beside
    cdef f64 reward
    cdef Block words
    for i in range(batch.n):
        read(grid, batch, i, &rows[0], &columns[0])
        beside = 0
        for a in range(n):
            rows[a] = clipped(rows[a] + down(moves[i * n + a]), last)
            columns[a] = clipped(columns[a] + right(moves[i * n + a]), last)
            beside += distance(rows[n], columns[n], rows[a], columns[a]) <= c.reach
        terminated[i] = beside >= grid.n_catchers
        if not terminated[i]:
            words = step_block(batch, i)
            flee(grid, &rows[0], &columns[0], &rows[n], &columns[n], &words)
        reward = c.step_reward + c.catch_reward * <f64>terminated[i]
        for a in range(n):
            rewards[i * n + a] = reward
        for a in range(n + 1):
            batch.state[2 * a * batch.n + i] = <f64>rows[a]
            batch.state[(2 * a + 1) * batch.n + i] = <f64>columns[a]
        write_view(grid, &rows[0], &columns[0], rows[n], columns[n], obs + i * dim)


cdef inline void observe_n(const void* params, const rlox_batch_v1* batch, f32* obs) noexcept nogil:
    cdef const Params* grid = <const Params*>params
    cdef i64 n = grid.n_pursuers
    cdef i64[MOST_PURSUERS + 1] rows
    cdef i64[MOST_PURSUERS + 1] columns
    cdef i64 i
    for i in range(batch.n):
        read(grid, batch, i, &rows[0], &columns[0])
        write_view(grid, &rows[0], &columns[0], rows[n], columns[n], obs + i * n * (2 + 2 * n))


cdef inline void central_n(const void* params, const rlox_batch_v1* batch, f32* central) noexcept nogil:
    cdef const Params* grid = <const Params*>params
    cdef i64 dim = 2 * (grid.n_pursuers + 1)
    cdef f32 scale = <f32>1.0 / <f32>(grid.size - 1)
    cdef i64 i, k
    for i in range(batch.n):
        for k in range(dim):
            central[i * dim + k] = <f32>batch.state[k * batch.n + i] * scale


cdef inline void reset_n(const void* params, const rlox_batch_v1* batch, i64 m, const i64* index,
                         f32* obs) noexcept nogil:
    cdef const Params* grid = <const Params*>params
    cdef i64 n = grid.n_pursuers
    cdef u64 cells = <u64>(grid.size * grid.size)
    cdef i64[MOST_PURSUERS + 1] rows
    cdef i64[MOST_PURSUERS + 1] columns
    cdef i64 i, j, a, cell
    cdef u32 word
    cdef Block words
    for j in range(m):
        i = index[j]
        for a in range(n + 1):
            if a & 3 == 0:  # four words per block
                words = philox(batch.keys[i], batch.episodes[i], DOMAIN_ENV_RESET | <u64>(a >> 2) << 32)
            word = words.a if a & 3 == 0 else words.b if a & 3 == 1 else words.c if a & 3 == 2 else words.d
            cell = <i64>((<u64>word * cells) >> 32)
            rows[a] = cell // grid.size
            columns[a] = cell % grid.size
            batch.state[2 * a * batch.n + i] = <f64>rows[a]
            batch.state[(2 * a + 1) * batch.n + i] = <f64>columns[a]
        write_view(grid, &rows[0], &columns[0], rows[n], columns[n], obs + i * n * (2 + 2 * n))


cdef inline rlox_env_v1 spec(const Params* grid) noexcept:
    return rlox_env_v1(
        struct_size=sizeof(rlox_env_v1), flags=RLOX_ENV_AGENTS, env_id="GridPursuit-v0",
        state_size=2 * (grid.n_pursuers + 1), obs_dim=2 + 2 * grid.n_pursuers, n_actions=5, act_dim=1, act_low=NULL,
        act_high=NULL, max_episode_steps=grid.max_cycles, params=grid, reset_n=reset_n, step_n=step_n,
        observe_n=observe_n, n_agents=grid.n_pursuers, central_dim=2 * (grid.n_pursuers + 1), central_n=central_n, mask_n=NULL,
    )
