/* The C interface for packages that add native environments or native reward functions to rlox.
 *
 * Define a static `rlox_env_v1` (or `rlox_reward_v1`), wrap its address in a PyCapsule named RLOX_ENV_CAPSULE (or
 * RLOX_REWARD_CAPSULE) and pass the capsule to rlox.register_env(capsule) (or as reward_fn=capsule). This header is
 * plain C and needs neither Python nor rlox at link time. Every function works on a whole batch, may be called without
 * the GIL, and must not allocate memory, raise an exception or block.
 *
 * Structs only ever grow at the end; `struct_size` tells rlox how much of a struct your code was compiled with.
 * Incompatible changes get a new name (v2). Arrays are C-contiguous and do not overlap.
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
#define RLOX_ENV_AGENTS 1u /* several agents; without this flag, n_agents, central_dim and central_n are not read */
#define RLOX_ENV_MASKS 2u  /* masks of legal actions; without this flag, mask_n is not read */

/* N environments, as passed to the functions below: all environments of a VecEnv or a block of them (currently 256),
 * with arrays of its own. Component s of environment i is state[s * n + i]. */
typedef struct rlox_batch_v1 {
    int64_t n;                /* N */
    double *state;            /* (S, N), finite: a state with inf or NaN can be saved, but not restored */
    const uint64_t *keys;     /* (N) key of each environment's random numbers */
    const uint64_t *episodes; /* (N) number of the running episode, from 0 */
    const int64_t *steps;     /* (N) steps taken in the running episode so far */
} rlox_batch_v1;

typedef struct rlox_env_v1 {
    uint32_t struct_size;      /* sizeof(rlox_env_v1) */
    uint32_t flags;            /* 0, RLOX_ENV_AGENTS or RLOX_ENV_MASKS */
    const char *env_id;        /* "My-v0"; not empty */
    int64_t state_size;        /* S >= 1 numbers per environment: its complete state */
    int64_t obs_dim;           /* D >= 1 numbers per observation */
    int64_t n_actions;         /* discrete: number of actions >= 1, one int64 per environment; 0: continuous */
    int64_t act_dim;           /* A >= 1 float32 numbers per environment; 1 if discrete */
    const float *act_low;      /* (A) bounds; NULL if discrete */
    const float *act_high;     /* (A) */
    int64_t max_episode_steps; /* time limit, at which rlox truncates an episode; 0: none */
    const void *params;        /* passed to every function; may be NULL; must outlive the capsule */
    /* Start new episodes in the m environments index[0..m): write their states and their rows of obs (N, D). */
    void (*reset_n)(const void *params, const rlox_batch_v1 *batch, int64_t m, const int64_t *index, float *obs);
    /* Step all environments: write the next state, obs (N, D), rewards (N) and terminated (N), 0 or 1. Do not reset or
     * apply the time limit: rlox does both. Discrete actions are in range; continuous actions are never NaN but may lie
     * outside their bounds. */
    void (*step_n)(const void *params, const rlox_batch_v1 *batch, const void *actions, float *obs, double *rewards,
                   uint8_t *terminated);
    /* Write obs (N, D) from the state. */
    void (*observe_n)(const void *params, const rlox_batch_v1 *batch, float *obs);

    /* With RLOX_ENV_AGENTS, A agents act at the same time in each environment. The fields above then describe one
     * agent, and the arrays passed to the functions have one row per agent: obs (N, A, D), actions (N, A) or
     * (N, A, act_dim), rewards (N, A). terminated stays (N): all agents of an environment start and end their episode
     * together. */
    int64_t n_agents;    /* A >= 1 */
    int64_t central_dim; /* C numbers per environment for a central critic; 0: it sees all agents' observations */
    /* Write central (N, C) from the state; NULL if central_dim is 0. */
    void (*central_n)(const void *params, const rlox_batch_v1 *batch, float *central);

    /* With RLOX_ENV_MASKS, for one agent with discrete actions: write mask (N, n_actions) from the state, nonzero for
     * each action that is legal. At least one must be, except in states that terminated, whose mask is not used. A
     * policy then takes only legal actions; step_n must still accept all others, which users may pass. */
    void (*mask_n)(const void *params, const rlox_batch_v1 *batch, uint8_t *mask);
} rlox_env_v1;

/* The smallest valid struct_size without flags, and with RLOX_ENV_AGENTS only. */
#define RLOX_ENV_V1_ONE_AGENT offsetof(rlox_env_v1, n_agents)
#define RLOX_ENV_V1_NO_MASKS offsetof(rlox_env_v1, mask_n)

typedef struct rlox_reward_v1 {
    uint32_t struct_size; /* sizeof(rlox_reward_v1) */
    uint32_t flags;       /* 0 */
    const char *name;     /* recorded with the run; not empty */
    int64_t obs_dim;      /* length D of the observations that the function expects; 0: any */
    const void *params;   /* passed to the function; may be NULL; must outlive the capsule */
    /* Change rewards (N) in place. obs (N, D): observations before the step; actions (N) int64 or (N, A) float32. */
    void (*reward_n)(const void *params, int64_t n, int64_t obs_dim, const float *obs, int64_t act_dim,
                     const void *actions, double *rewards);
} rlox_reward_v1;

/* Philox4x32-10 (Salmon et al., SC 2011): write four random words to `out`, a pure function of the other arguments.
 * Use a different domain for resets and for steps, so that the two never share random numbers. */
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

/* Convert a random word to a number in (0, 1), symmetric about 1/2. */
static inline double rlox_unit(uint32_t word) { return ((double)word + 0.5) * 2.3283064365386963e-10; }

#ifdef __cplusplus
}
#endif
#endif
