/* Parts of a transformer layer, row by row, and their gradients.
 *
 * A file that includes this header must also contain the exponential of vexp.pxd.
 */
#ifndef RLOX_PARTS_H
#define RLOX_PARTS_H

#include <math.h>
#include "gemm.h"

static inline float rlox_lanes_sum(rlox_vf x) {
    for (int step = VL / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}

static inline float rlox_lanes_max(rlox_vf x) {
    for (int step = VL / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
    return x[0];
}

/* to = x / rms(x) * weight, n numbers; `to` may be x. Returns 1 / rms(x). */
static inline float rlox_rms_norm(int64_t n, const float *x, const float *weight, float eps, float *to) {
    rlox_vf sums[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + 4 * VL <= n; i += 4 * VL)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            const rlox_vf v = rlox_load(x + i + k * VL);
            sums[k] += v * v;
        }
    float sum = rlox_lanes_sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / (float)n + eps);
    for (i = 0; i + VL <= n; i += VL) rlox_put(to + i, rlox_load(weight + i) * (rlox_load(x + i) * scale));
    for (; i < n; i++) to[i] = weight[i] * (x[i] * scale);
    return scale;
}

/* The gradients of `rlox_rms_norm`, which returned `scale`: with respect to x written to dx, and with respect to the
 * weights added to d_weight. */
static inline void rlox_rms_norm_back(int64_t n, const float *__restrict__ x, const float *__restrict__ weight, float scale,
                               const float *__restrict__ dy, float *__restrict__ dx, double *__restrict__ d_weight) {
    rlox_vf sum = {0};
    int64_t i = 0;
    for (; i + VL <= n; i += VL) sum += rlox_load(dy + i) * rlox_load(weight + i) * rlox_load(x + i);
    float dot = rlox_lanes_sum(sum);
    for (; i < n; i++) dot += dy[i] * weight[i] * x[i];
    const float back = dot * scale * scale / (float)n;
    for (i = 0; i < n; i++) {
        dx[i] = scale * (dy[i] * weight[i] - back * x[i]);
        d_weight[i] += dy[i] * x[i] * scale;
    }
}

static inline rlox_vf rlox_exp_not_above_0(rlox_vf x) {
    /* Exponentials below 1e-37 are clamped: their exact value is not worth a second code path. */
    const rlox_vf low = (rlox_vf){0} - RLOX_EXP_RANGE_f32;
    return (rlox_vf)rlox_exp_fast_f32((rlox_xf32)rlox_select(x < low, low, x));
}

static inline rlox_vf rlox_sigmoid(rlox_vf x) {
    /* 1 / (1 + exp(-x)), computed from exp(-|x|), which cannot overflow. */
    const rlox_vf e = rlox_exp_not_above_0(rlox_select(x > 0, -x, x));
    return rlox_select(x > 0, (rlox_vf){0} + 1.0f, e) / (1.0f + e);
}

/* to = silu(gate) * up, n numbers; `to` may be the gate. */
static inline void rlox_gated(int64_t n, const float *gate, const float *up, float *to) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        const rlox_vf g = rlox_load(gate + i);
        rlox_put(to + i, g * rlox_sigmoid(g) * rlox_load(up + i));
    }
    for (; i < n; i++) to[i] = gate[i] * rlox_sigmoid((rlox_vf){0} + gate[i])[0] * up[i];
}

/* The gradients of `rlox_gated`. */
static inline void rlox_gated_back(int64_t n, const float *gate, const float *up, const float *dy, float *d_gate, float *d_up) {
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        const rlox_vf g = rlox_load(gate + i), share = rlox_sigmoid(g), slope = rlox_load(dy + i);
        rlox_put(d_up + i, slope * (g * share));
        rlox_put(d_gate + i, slope * rlox_load(up + i) * share * (1.0f + g * (1.0f - share)));
    }
    for (; i < n; i++) {
        const float share = rlox_sigmoid((rlox_vf){0} + gate[i])[0];
        d_up[i] = dy[i] * gate[i] * share;
        d_gate[i] = dy[i] * up[i] * share * (1.0f + gate[i] * (1.0f - share));
    }
}

#endif
