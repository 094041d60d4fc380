/* Lets another kernel fill and sample a replay memory: ReplayBuffer.access() returns a PyCapsule of this. Internal. */
#ifndef RLOX_REPLAY_ACCESS_H
#define RLOX_REPLAY_ACCESS_H
#include <stdint.h>

#define RLOX_REPLAY_CAPSULE "rlox.replay"

typedef struct rlox_replay_access {
    void *self;
    int64_t obs_dim, act_dim, n_step;
    /* Like ReplayBuffer.push_batch. */
    void (*push)(void *self, int64_t n, const float *obs, const float *next_obs, const float *actions,
                 const float *rewards, const uint8_t *terminated, const uint8_t *truncated);
    /* Like ReplayBuffer.sample; discounts is written only if n_step > 1. */
    void (*sample)(void *self, int64_t n, uint64_t seed, float *obs, float *next_obs, float *actions, float *rewards,
                   uint8_t *terminated, uint8_t *truncated, float *discounts);
} rlox_replay_access;
#endif
