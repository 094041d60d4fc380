/* Matrix products for networks of 16 to a few hundred units, where a BLAS call spends its time on preparation.
 *
 * One register tile serves all three products of a layer: rows of A are read by broadcast with any strides (so a
 * transposed A costs nothing), B comes in panels of NR columns, and the operation after the product (bias, activation,
 * derivative of the activation) is applied before the tile is stored. GNU vector types let one source compile for
 * AVX-512, AVX2, SSE and NEON. Widths are padded with zeros to multiples of PAD floats.
 */
#ifndef RLOX_GEMM_H
#define RLOX_GEMM_H

#include <stdint.h>
#include <string.h>

#define PAD 16
#if defined(__AVX512F__)
#define VL 16
#define NV 4
#elif defined(__AVX__)
#define VL 8
#define NV 2
#elif defined(__aarch64__)
#define VL 4
#define NV 4
#else
#define VL 4
#define NV 2
#endif
#define NR (VL * NV)
#define MR 6
#define A_AHEAD 32 /* steps after which a column of a transposed A is needed that the processor does not foresee */
#define BLOCK_ROWS 8 /* divides every panel's width */
/* Rows of a tile that is one vector wide: enough independent sums to hide the latency of a multiply-add. */
#define MR1 (VL == 16 ? 16 : 10)

typedef float rlox_vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef int32_t rlox_vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));

/* What follows a product. ADD adds to the existing values; DTANH and DRELU multiply by the derivative of the
 * activation, which is computed from the output of the activation. */
enum { RLOX_STORE, RLOX_ADD, RLOX_BIAS, RLOX_BIAS_TANH, RLOX_BIAS_RELU, RLOX_DTANH, RLOX_DRELU };

static inline rlox_vf rlox_load(const float *p) { return *(const rlox_vf *)p; }
static inline void rlox_put(float *p, rlox_vf x) { *(rlox_vf *)p = x; }
static inline rlox_vf rlox_select(rlox_vi mask, rlox_vf a, rlox_vf b) {
    return (rlox_vf)((mask & (rlox_vi)a) | (~mask & (rlox_vi)b));
}

/* tanh of nv vectors in place, by a rational function of degree 13 over 6 on [-7.9, 7.9], accurate to 5e-7. Exactly 1
 * where tanh rounds to 1 in float32: the derivative of a saturated unit is then 0, and not a small number that Adam
 * would amplify. One division serves all nv vectors, since it costs as much as the rest. */
static inline __attribute__((always_inline)) void rlox_tanh(rlox_vf *x, const int nv) {
    const float top = 7.90531110763549805f, one = 8.3f;
    rlox_vf p[4], q[4], inverse[4];
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) {
        rlox_vf limit = (rlox_vf){0} + top;
        rlox_vf y = rlox_select(x[j] > limit, limit, x[j]);
        y = rlox_select(y < -limit, -limit, y);
        const rlox_vf z = y * y;
        rlox_vf a = z * -2.76076847742355e-16f + 2.00018790482477e-13f;
        a = z * a + -8.60467152213735e-11f;
        a = z * a + 5.12229709037114e-08f;
        a = z * a + 1.48572235717979e-05f;
        a = z * a + 6.37261928875436e-04f;
        a = z * a + 4.89352455891786e-03f;
        rlox_vf b = z * 1.19825839466702e-06f + 1.18534705686654e-04f;
        b = z * b + 2.26843463243900e-03f;
        p[j] = y * a;
        q[j] = z * b + 4.89352518554385e-03f;
    }
    if (nv == 1) inverse[0] = 1.0f / q[0];
    if (nv == 2 || nv == 3) {
        const rlox_vf r = 1.0f / (q[0] * q[1]);
        inverse[0] = q[1] * r, inverse[1] = q[0] * r;
        if (nv == 3) inverse[2] = 1.0f / q[2];
    }
    if (nv == 4) {
        const rlox_vf first = q[0] * q[1], second = q[2] * q[3], r = 1.0f / (first * second);
        const rlox_vf of_first = second * r, of_second = first * r;
        inverse[0] = q[1] * of_first, inverse[1] = q[0] * of_first;
        inverse[2] = q[3] * of_second, inverse[3] = q[2] * of_second;
    }
#pragma GCC unroll 8
    for (int j = 0; j < nv; j++) {
        const rlox_vi above = x[j] > one, below = x[j] < -one;
        rlox_vf y = rlox_select(above, (rlox_vf){0} + 1.0f, p[j] * inverse[j]);
        x[j] = rlox_select(below, (rlox_vf){0} - 1.0f, y);
    }
}

static inline __attribute__((always_inline)) void rlox_tile(
    const int mr, const int nv, int64_t k_size, const float *a, int64_t a_row, int64_t a_col, const float *b, int64_t ldb,
    float *c, int64_t ldc, int after, const float *bias, const float *h, int64_t ldh) {
    rlox_vf acc[MR1][NV];
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++)
            acc[i][j] = bias ? rlox_load(bias + j * VL) : (rlox_vf){0};
    for (int64_t k = 0; k < k_size; k++) {
        rlox_vf row[NV];
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) row[j] = rlox_load(b + k * ldb + j * VL);
        __builtin_prefetch(a + (k + A_AHEAD) * a_col);
#pragma GCC unroll 16
        for (int i = 0; i < mr; i++) {
            const float s = a[i * a_row + k * a_col];
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) acc[i][j] += s * row[j];
        }
    }
    if (after == RLOX_BIAS_TANH)
#pragma GCC unroll 16
        for (int i = 0; i < mr; i++) rlox_tanh(acc[i], nv);
#pragma GCC unroll 16
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) {
            rlox_vf x = acc[i][j];
            if (after == RLOX_ADD) x += rlox_load(c + i * ldc + j * VL);
            if (after == RLOX_BIAS_RELU) x = rlox_select(x <= 0, (rlox_vf){0}, x); /* NaN stays NaN and is noticed */
            if (after == RLOX_DTANH) {
                rlox_vf y = rlox_load(h + i * ldh + j * VL);
                x = x * (1.0f - y * y);
            }
            if (after == RLOX_DRELU) x = rlox_select(rlox_load(h + i * ldh + j * VL) <= 0, (rlox_vf){0}, x);
            rlox_put(c + i * ldc + j * VL, x);
        }
}

#define RLOX_ROWS(m, nv) \
    case m: rlox_tile(m, nv, k_size, a, a_row, a_col, b, ldb, c, ldc, after, bias, h, ldh); break;
#define RLOX_COLUMNS(nv, mr) \
    static void rlox_rows_##nv(int64_t rows, int64_t k_size, const float *a, int64_t a_row, int64_t a_col, const float *b, \
                               int64_t ldb, float *c, int64_t ldc, int after, const float *bias, const float *h, \
                               int64_t ldh) { \
        for (; rows >= mr; rows -= mr, a += mr * a_row, c += mr * ldc, h += h ? mr * ldh : 0) \
            rlox_tile(mr, nv, k_size, a, a_row, a_col, b, ldb, c, ldc, after, bias, h, ldh); \
        for (; rows >= MR; rows -= MR, a += MR * a_row, c += MR * ldc, h += h ? MR * ldh : 0) \
            rlox_tile(MR, nv, k_size, a, a_row, a_col, b, ldb, c, ldc, after, bias, h, ldh); \
        switch (rows) { RLOX_ROWS(1, nv) RLOX_ROWS(2, nv) RLOX_ROWS(3, nv) RLOX_ROWS(4, nv) RLOX_ROWS(5, nv) } \
    }
RLOX_COLUMNS(1, MR1)
RLOX_COLUMNS(2, MR)
#if NV == 4
RLOX_COLUMNS(3, MR)
RLOX_COLUMNS(4, MR)
#endif

/* c (rows, n) = after(a (rows, k_size) @ b (k_size, n)); n must be a multiple of PAD. If ldb is 0, b consists of
 * panels: panel p begins at b + p * NR * k_size, and its rows are as wide as the panel. Otherwise b is a matrix whose
 * rows are `ldb` apart. bias (n) and h (rows, n) are needed depending on `after`. */
static void rlox_gemm(int64_t rows, int64_t n, int64_t k_size, const float *a, int64_t a_row, int64_t a_col, const float *b,
                      int64_t ldb, float *c, int64_t ldc, int after, const float *bias, const float *h, int64_t ldh) {
    for (int64_t j = 0; j < n; j += NR) {
        const int64_t width = n - j < NR ? n - j : NR;
        const float *panel = ldb ? b + j : b + j * k_size;
        const int64_t step = ldb ? ldb : width;
        const float *hj = h ? h + j : h, *bj = bias ? bias + j : bias;
        switch (width / VL) {
            case 1: rlox_rows_1(rows, k_size, a, a_row, a_col, panel, step, c + j, ldc, after, bj, hj, ldh); break;
            case 2: rlox_rows_2(rows, k_size, a, a_row, a_col, panel, step, c + j, ldc, after, bj, hj, ldh); break;
#if NV == 4
            case 3: rlox_rows_3(rows, k_size, a, a_row, a_col, panel, step, c + j, ldc, after, bj, hj, ldh); break;
            case 4: rlox_rows_4(rows, k_size, a, a_row, a_col, panel, step, c + j, ldc, after, bj, hj, ldh); break;
#endif
        }
    }
}

/* Writes panels of the transpose of w (n_out, n_in): b of rlox_gemm with k_size n_in, n = n_out, padded with zeros. */
static void rlox_pack_transposed(const float *w, int64_t n_out, int64_t n_in, float *to) {
    const int64_t n = (n_out + PAD - 1) / PAD * PAD;
    for (int64_t j = 0; j < n; j += NR) {
        const int64_t width = n - j < NR ? n - j : NR;
        float *panel = to + j * n_in;
        /* A few rows at a time: with whole columns of a large panel, cache lines would be evicted between accesses. */
        for (int64_t first = 0; first < width; first += BLOCK_ROWS) {
            const int64_t left = n_out - j - first, real = left < 0 ? 0 : left < BLOCK_ROWS ? left : BLOCK_ROWS;
            const float *rows = w + (j + first) * n_in;
            float *block = panel + first;
            if (real == BLOCK_ROWS) {
                for (int64_t i = 0; i < n_in; i++)
#pragma GCC unroll 8
                    for (int64_t o = 0; o < BLOCK_ROWS; o++) block[i * width + o] = rows[o * n_in + i];
                continue;
            }
            for (int64_t i = 0; i < n_in; i++)
                for (int64_t o = 0; o < BLOCK_ROWS; o++) block[i * width + o] = o < real ? rows[o * n_in + i] : 0.0f;
        }
    }
}

/* Writes panels of w (n_out, n_in) itself: b of rlox_gemm with k_size n_out and n = n_in. */
static void rlox_pack(const float *w, int64_t n_out, int64_t n_in, float *to) {
    const int64_t n = (n_in + PAD - 1) / PAD * PAD;
    for (int64_t j = 0; j < n; j += NR) {
        const int64_t width = n - j < NR ? n - j : NR;
        /* If panels are narrower than PAD, the last one may be only padding. */
        const int64_t left = n_in - j > 0 ? n_in - j : 0, real = left < width ? left : width;
        float *panel = to + j * n_out;
        for (int64_t o = 0; o < n_out; o++) {
            memcpy(panel + o * width, w + o * n_in + j, real * sizeof(float));
            if (real < width) memset(panel + o * width + real, 0, (width - real) * sizeof(float));
        }
    }
}

#endif
