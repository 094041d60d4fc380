/* Loops over rows for the recurrent world model, written so that compilers vectorise them. */
#ifndef RLOX_CELLS_H
#define RLOX_CELLS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define RLOX_LANES 16

/* exp(x) as 2**k (1 + r + r**2 g(r)), accurate to about 1 ulp; x is clamped to [-87, 87], NaN stays NaN. */
static inline float rlox_cell_exp(float x) {
    const float magic = 12582912.0f; /* adding 1.5 * 2**23 rounds to an integer, whose bits are the lowest of the sum */
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float shifted = x * 1.44269504f + magic, k = shifted - magic;
    float r = (x - k * 0.693359375f) - k * -2.12194440e-4f;
    float g = (((0.0013814535729759897f * r + 0.008368745149348863f) * r + 0.041668390865111864f) * r
               + 0.16666520398731471f) * r + 0.49999993431811696f;
    float y = g * (r * r) + r + 1.0f;
    uint32_t bits, power;
    memcpy(&bits, &y, 4);
    memcpy(&power, &shifted, 4);
    bits += power << 23;
    memcpy(&y, &bits, 4);
    return y;
}

static inline float rlox_cell_sigmoid(float x) { return 1.0f / (1.0f + rlox_cell_exp(-x)); }

/* The sum of RLOX_LANES partial sums, always added in the same order. */
static inline float rlox_cell_sum(const float *part) {
    float a[RLOX_LANES];
    for (int j = 0; j < RLOX_LANES; j++) a[j] = part[j];
    for (int width = RLOX_LANES / 2; width; width /= 2)
        for (int j = 0; j < width; j++) a[j] += a[j + width];
    return a[0];
}

#define RLOX_CELL_SUM(NAME, TERM, ...)                                                    \
    static inline float NAME(__VA_ARGS__, ptrdiff_t n) {                                  \
        float part[RLOX_LANES] = {0};                                                     \
        ptrdiff_t i = 0;                                                                  \
        for (; i + RLOX_LANES <= n; i += RLOX_LANES)                                      \
            for (ptrdiff_t l = 0; l < RLOX_LANES; l++) {                                  \
                ptrdiff_t j = i + l;                                                      \
                part[l] += TERM;                                                          \
            }                                                                             \
        for (ptrdiff_t j = i; j < n; j++) part[j - i] += TERM;                            \
        return rlox_cell_sum(part);                                                       \
    }
RLOX_CELL_SUM(rlox_cell_squares, x[j] * x[j], const float *x)
RLOX_CELL_SUM(rlox_cell_dot, x[j] * y[j], const float *x, const float *y)
RLOX_CELL_SUM(rlox_cell_exps, rlox_cell_exp(x[j] - top), const float *x, float top)

static inline float rlox_cell_max(const float *x, ptrdiff_t n) {
    float part[RLOX_LANES], top;
    ptrdiff_t i = 0;
    for (int l = 0; l < RLOX_LANES; l++) part[l] = x[0];
    for (; i + RLOX_LANES <= n; i += RLOX_LANES)
        for (int l = 0; l < RLOX_LANES; l++) part[l] = x[i + l] > part[l] ? x[i + l] : part[l];
    for (ptrdiff_t j = i; j < n; j++) part[j - i] = x[j] > part[j - i] ? x[j] : part[j - i];
    top = part[0];
    for (int l = 1; l < RLOX_LANES; l++) top = part[l] > top ? part[l] : top;
    return top;
}

/* SiLU of x / sqrt(mean(x**2) + eps) * scale for `rows` rows of n; stores 1 / sqrt(...) of each row in `inverse`. */
static void rlox_norm_silu(const float *restrict x, const float *restrict scale, float eps, ptrdiff_t rows, ptrdiff_t n,
                           float *restrict out, float *restrict inverse) {
    for (ptrdiff_t i = 0; i < rows; i++, x += n, out += n) {
        float r = 1.0f / sqrtf(rlox_cell_squares(x, n) / (float)n + eps);
        inverse[i] = r;
        for (ptrdiff_t j = 0; j < n; j++) {
            float y = x[j] * r * scale[j];
            out[j] = y * rlox_cell_sigmoid(y);
        }
    }
}

/* Gradients of `rlox_norm_silu` with respect to x and, added up, to scale; `d` (rows, n) is the gradient with respect
 * to its output. */
static void rlox_norm_silu_backward(const float *restrict x, const float *restrict scale, const float *restrict inverse,
                                    const float *restrict d, ptrdiff_t rows, ptrdiff_t n, float *restrict dx,
                                    float *restrict d_scale) {
    for (ptrdiff_t i = 0; i < rows; i++, x += n, d += n, dx += n) {
        float r = inverse[i];
        for (ptrdiff_t j = 0; j < n; j++) {
            float y = x[j] * r * scale[j], s = rlox_cell_sigmoid(y);
            float dy = d[j] * (s * (1.0f + y * (1.0f - s)));
            d_scale[j] += dy * x[j] * r;
            dx[j] = dy * scale[j];
        }
        float shared = rlox_cell_dot(x, dx, n) * r * r * r / (float)n;
        for (ptrdiff_t j = 0; j < n; j++) dx[j] = dx[j] * r - x[j] * shared;
    }
}

/* The block GRU: x (groups, rows, 3 w) contains reset, candidate and update of each block; h and out are
 * (rows, groups * w). */
static void rlox_gates(const float *restrict x, const float *restrict h, ptrdiff_t groups, ptrdiff_t rows, ptrdiff_t w,
                       float *restrict out) {
    for (ptrdiff_t g = 0; g < groups; g++)
        for (ptrdiff_t i = 0; i < rows; i++) {
            const float *a = x + (g * rows + i) * 3 * w, *from = h + (i * groups + g) * w;
            float *to = out + (i * groups + g) * w;
            for (ptrdiff_t j = 0; j < w; j++) {
                float candidate = 2.0f * rlox_cell_sigmoid(2.0f * rlox_cell_sigmoid(a[j]) * a[w + j]) - 1.0f;
                float update = rlox_cell_sigmoid(a[2 * w + j] - 1.0f);
                to[j] = from[j] + update * (candidate - from[j]);
            }
        }
}

static void rlox_gates_backward(const float *restrict x, const float *restrict h, const float *restrict d,
                                ptrdiff_t groups, ptrdiff_t rows, ptrdiff_t w, float *restrict dx, float *restrict dh) {
    for (ptrdiff_t g = 0; g < groups; g++)
        for (ptrdiff_t i = 0; i < rows; i++) {
            ptrdiff_t at = (g * rows + i) * 3 * w, row = (i * groups + g) * w;
            const float *a = x + at, *from = h + row, *by = d + row;
            float *da = dx + at, *to = dh + row;
            for (ptrdiff_t j = 0; j < w; j++) {
                float reset = rlox_cell_sigmoid(a[j]);
                float candidate = 2.0f * rlox_cell_sigmoid(2.0f * reset * a[w + j]) - 1.0f;
                float update = rlox_cell_sigmoid(a[2 * w + j] - 1.0f);
                float inner = by[j] * update * (1.0f - candidate * candidate);
                da[j] = inner * a[w + j] * reset * (1.0f - reset);
                da[w + j] = inner * reset;
                da[2 * w + j] = by[j] * (candidate - from[j]) * update * (1.0f - update);
                to[j] = by[j] * (1.0f - update);
            }
        }
}

/* One-hot samples of `rows` categoricals with n classes, by uniform numbers. Their probabilities are softmax(x), mixed
 * with the share `mix` of the uniform distribution. Stores the softmax in `probs`. */
static void rlox_pick(const float *restrict x, const float *restrict uniform, float mix, ptrdiff_t rows, ptrdiff_t n,
                      float *restrict out, float *restrict probs) {
    for (ptrdiff_t i = 0; i < rows; i++, x += n, out += n, probs += n) {
        float top = x[0], total = 0.0f, below = 0.0f, even = mix / (float)n;
        ptrdiff_t chosen = 0;
        for (ptrdiff_t j = 1; j < n; j++) top = x[j] > top ? x[j] : top;
        for (ptrdiff_t j = 0; j < n; j++) probs[j] = rlox_cell_exp(x[j] - top);
        for (ptrdiff_t j = 0; j < n; j++) total += probs[j];
        for (ptrdiff_t j = 0; j < n; j++) {
            probs[j] /= total;
            out[j] = 0.0f;
        }
        for (ptrdiff_t j = 0; j < n - 1; j++) {
            below += (1.0f - mix) * probs[j] + even;
            chosen += below < uniform[i];
        }
        out[chosen] = 1.0f;
    }
}

/* The gradient with respect to x, where `d` is that with respect to the mixed probabilities. */
static void rlox_pick_backward(const float *restrict probs, const float *restrict d, float mix, ptrdiff_t rows,
                               ptrdiff_t n, float *restrict dx) {
    for (ptrdiff_t i = 0; i < rows; i++, probs += n, d += n, dx += n) {
        float mean = 0.0f;
        for (ptrdiff_t j = 0; j < n; j++) mean += probs[j] * d[j];
        for (ptrdiff_t j = 0; j < n; j++) dx[j] = (1.0f - mix) * probs[j] * (d[j] - mean);
    }
}

/* Cross-entropies (rows, targets) of softmax(x) with targets whose weight is split between the classes `at` and at + 1,
 * with `share` on the second. Stores log(sum(exp(x))) of each row in `lse`. */
static void rlox_two_hot(const float *restrict x, const int64_t *restrict at, const float *restrict share,
                         ptrdiff_t rows, ptrdiff_t n, ptrdiff_t targets, float *restrict out, float *restrict lse) {
    for (ptrdiff_t i = 0; i < rows; i++, x += n) {
        float top = rlox_cell_max(x, n);
        lse[i] = top + logf(rlox_cell_exps(x, top, n));
        for (ptrdiff_t k = 0; k < targets; k++) {
            ptrdiff_t t = i * targets + k, low = at[t];
            out[t] = lse[i] - ((1.0f - share[t]) * x[low] + share[t] * x[low + 1]);
        }
    }
}

static void rlox_two_hot_backward(const float *restrict x, const int64_t *restrict at, const float *restrict share,
                                  const float *restrict lse, const float *restrict d, ptrdiff_t rows, ptrdiff_t n,
                                  ptrdiff_t targets, float *restrict dx) {
    for (ptrdiff_t i = 0; i < rows; i++, x += n, dx += n) {
        float all = 0.0f;
        for (ptrdiff_t k = 0; k < targets; k++) all += d[i * targets + k];
        for (ptrdiff_t j = 0; j < n; j++) dx[j] = all * rlox_cell_exp(x[j] - lse[i]);
        for (ptrdiff_t k = 0; k < targets; k++) {
            ptrdiff_t t = i * targets + k, low = at[t];
            dx[low] -= d[t] * (1.0f - share[t]);
            dx[low + 1] -= d[t] * share[t];
        }
    }
}

/* The mean of `values` under softmax(x). The values are symmetric about 0; n is odd. Probabilities of symmetric pairs are
 * subtracted before they are multiplied by values of up to 5e8, so that small means are exact. */
static void rlox_two_hot_mean(const float *restrict x, const float *restrict values, ptrdiff_t rows, ptrdiff_t n,
                              float *restrict room, float *restrict out) {
    ptrdiff_t half = n / 2;
    for (ptrdiff_t i = 0; i < rows; i++, x += n) {
        float top = rlox_cell_max(x, n), part[RLOX_LANES] = {0}, total[RLOX_LANES] = {0};
        for (ptrdiff_t j = 0; j < n; j++) room[j] = rlox_cell_exp(x[j] - top);
        for (ptrdiff_t first = 0; first < half; first += RLOX_LANES) {
            ptrdiff_t m = half - first < RLOX_LANES ? half - first : RLOX_LANES;
            for (ptrdiff_t l = 0; l < m; l++) {
                ptrdiff_t j = first + l, k = n - 1 - j;
                part[l] += (room[k] - room[j]) * values[k];
                total[l] += room[j] + room[k];
            }
        }
        out[i] = rlox_cell_sum(part) / (rlox_cell_sum(total) + room[half]);
    }
}

#endif
