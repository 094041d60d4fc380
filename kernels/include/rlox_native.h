/* What a package outside rlox hands over to add a native environment or a native reward function.
 *
 * Build a static `rlox_env_v1` (or `rlox_reward_v1`), wrap its address in a PyCapsule of the name given here, and
 * register the capsule: rlox.register_env(capsule), reward_fn=capsule. Plain C, no Python, no rlox at link time.
 * All functions work on whole batches, hold no GIL, and must neither allocate, raise nor block.
 *
 * A struct may grow at its end only, and `struct_size` says how much of it the caller knows; what would break that
 * gets a new name (v2). Arrays are C-contiguous and do not overlap.
 */
#ifndef RLOX_NATIVE_H
#define RLOX_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RLOX_ENV_CAPSULE "rlox.env.v1"
#define RLOX_REWARD_CAPSULE "rlox.reward.v1"

/* Bits of rlox_env_v1.flags. */
#define RLOX_ENV_AGENTS 1u /* several agents: the fields from n_agents on count; without it they are not read */

/* N environments as the functions below see them: all of a VecEnv or a block of them (256 now), with its own arrays.
 * Component s of environment i is state[s * n + i]. */
typedef struct rlox_batch_v1 {
    int64_t n;                /* N */
    double *state;            /* (S, N) */
    const uint64_t *keys;     /* (N) what decides each environment's randomness */
    const uint64_t *episodes; /* (N) number of the running episode, from 0 */
    const int64_t *steps;     /* (N) steps taken in it so far */
} rlox_batch_v1;

typedef struct rlox_env_v1 {
    uint32_t struct_size;      /* sizeof(rlox_env_v1) */
    uint32_t flags;            /* 0 or RLOX_ENV_AGENTS */
    const char *env_id;        /* "My-v0"; not empty */
    int64_t state_size;        /* S >= 1 numbers per environment: all that its future depends on */
    int64_t obs_dim;           /* D >= 1 */
    int64_t n_actions;         /* discrete: number of actions >= 1, one int64 per environment; 0: continuous */
    int64_t act_dim;           /* A >= 1, float32 numbers per environment; 1 where discrete */
    const float *act_low;      /* (A) bounds; NULL where discrete */
    const float *act_high;     /* (A) */
    int64_t max_episode_steps; /* the time limit, which truncates; 0: none */
    const void *params;        /* handed to every call; may be NULL; must outlive the capsule */
    /* Start the episodes of the m environments index[0..m): write their state and their rows of obs (N, D). */
    void (*reset_n)(const void *params, const rlox_batch_v1 *batch, int64_t m, const int64_t *index, float *obs);
    /* One step of all: next state, obs (N, D), rewards (N), terminated (N) 0 or 1. No reset, no time limit: the
     * caller does both. Actions are in range and not NaN; continuous ones may lie beyond their bounds. */
    void (*step_n)(const void *params, const rlox_batch_v1 *batch, const void *actions, float *obs, double *rewards,
                   uint8_t *terminated);
    /* Write obs (N, D) from the state. */
    void (*observe_n)(const void *params, const rlox_batch_v1 *batch, float *obs);

    /* With RLOX_ENV_AGENTS, A agents act at once in each environment. The fields above are those of one agent, and the
     * arrays of the functions have a row for each: obs (N, A, D), actions (N, A) or (N, A, act_dim), rewards (N, A).
     * terminated stays (N): the agents of an environment begin and end their episode together. */
    int64_t n_agents;    /* A >= 1 */
    int64_t central_dim; /* C numbers that a central critic sees of each environment; 0: what all agents observe */
    /* Write central (N, C) from the state; NULL where central_dim is 0. */
    void (*central_n)(const void *params, const rlox_batch_v1 *batch, float *central);
} rlox_env_v1;

/* What struct_size must be at least without RLOX_ENV_AGENTS. */
#define RLOX_ENV_V1_ONE_AGENT offsetof(rlox_env_v1, n_agents)

typedef struct rlox_reward_v1 {
    uint32_t struct_size; /* sizeof(rlox_reward_v1) */
    uint32_t flags;       /* 0 */
    const char *name;     /* recorded with the run */
    int64_t obs_dim;      /* D it is written for; 0: any */
    const void *params;
    /* Change rewards (N) in place. obs (N, D) is what was acted on; actions (N) int64 or (N, A) float32. */
    void (*reward_n)(const void *params, int64_t n, int64_t obs_dim, const float *obs, int64_t act_dim,
                     const void *actions, double *rewards);
} rlox_reward_v1;

/* Philox4x32-10 (Salmon et al., SC 2011): four random words, a pure function of the arguments. Domains keep the
 * numbers of a reset apart from those of a step. */
#define RLOX_DOMAIN_RESET 1u
#define RLOX_DOMAIN_STEP 2u

static inline void rlox_random(uint64_t key, uint64_t counter, uint32_t domain, uint32_t block, uint32_t out[4]) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t a = (uint32_t)counter, b = (uint32_t)(counter >> 32), c = domain, d = block;
    for (int r = 0; r < 10; r++) {
        uint64_t m0 = (uint64_t)a * 0xD2511F53u, m1 = (uint64_t)c * 0xCD9E8D57u;
        a = (uint32_t)(m1 >> 32) ^ b ^ k0;
        b = (uint32_t)m1;
        c = (uint32_t)(m0 >> 32) ^ d ^ k1;
        d = (uint32_t)m0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* (0, 1), symmetric about 1/2, from one word. */
static inline double rlox_unit(uint32_t word) { return ((double)word + 0.5) * 2.3283064365386963e-10; }

#ifdef __cplusplus
}
#endif
#endif
