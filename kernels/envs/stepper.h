/* Lets one kernel step the environments of another: VecEnv.stepper() returns a PyCapsule of this. Internal. */
#ifndef RLOX_STEPPER_H
#define RLOX_STEPPER_H
#include <stdint.h>

#define RLOX_STEPPER_CAPSULE "rlox.stepper"

typedef struct rlox_stepper {
    void *self;
    int64_t n, obs_dim, n_actions, act_dim, max_episode_steps;
    const float *act_low, *act_high;
    /* Like VecEnv.step_all, for actions that are in range; writes every array. */
    void (*step)(void *self, const void *actions, float *obs, double *rewards, uint8_t *terminated, uint8_t *truncated,
                 float *final_obs, double *episode_return, int64_t *episode_length);
} rlox_stepper;
#endif
