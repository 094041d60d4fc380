/* The computations between the matrix products of a Llama-style decoder, for one token of each row.
 *
 * Keys are stored in tiles of PAD tokens, component after component: tile[i][token]. The scores of a tile are then sums
 * of whole vectors, without sums across the lanes of a vector. Values are stored token after token, each padded to a
 * multiple of PAD numbers.
 */
#ifndef RLOX_DECODER_H
#define RLOX_DECODER_H

#include "parts.h"

#define TILE_VECTORS (PAD / VL)
/* Independent sums of a tile, so that a multiply-add need not wait for the one before. */
#define CHAINS (TILE_VECTORS < 4 ? 4 / TILE_VECTORS : 1)

/* Rotate d numbers in place by the angles of a position; numbers i and i + d / 2 are a pair. */
static void rlox_rotate(int64_t d, float *x, const float *cosine, const float *sine) {
    const int64_t half = d / 2;
    float *__restrict__ low = x, *__restrict__ high = x + half;
    for (int64_t i = 0; i < half; i++) {
        const float a = low[i], b = high[i];
        low[i] = a * cosine[i] - b * sine[i];
        high[i] = b * cosine[half + i] + a * sine[half + i];
    }
}

/* Store the key of token t in the tiles. */
static void rlox_put_key(int64_t d, const float *key, float *tiles, int64_t t) {
    float *to = tiles + t / PAD * PAD * d + t % PAD;
    for (int64_t i = 0; i < d; i++) to[i * PAD] = key[i];
}

/* Scores q . key * scale of n tokens, and minus infinity for the rest of the last tile. `after` is memory that is read
 * next, and so is prefetched. */
static void rlox_scores(int64_t d, const float *q, const float *tiles, int64_t n, const float *after, float scale,
                        float *scores) {
    for (int64_t t = 0; t < n; t += PAD, tiles += PAD * d) {
        const float *soon = t + PAD < n ? tiles + PAD * d : after;
        rlox_vf sums[CHAINS][TILE_VECTORS];
#pragma GCC unroll 4
        for (int c = 0; c < CHAINS; c++)
#pragma GCC unroll 4
            for (int k = 0; k < TILE_VECTORS; k++) sums[c][k] = (rlox_vf){0};
        int64_t i = 0;
        for (; i + CHAINS <= d; i += CHAINS)
#pragma GCC unroll 4
            for (int c = 0; c < CHAINS; c++)
#pragma GCC unroll 4
                for (int k = 0; k < TILE_VECTORS; k++) {
                    if (k == 0) __builtin_prefetch(soon + (i + c) * PAD);
                    sums[c][k] += q[i + c] * rlox_load(tiles + (i + c) * PAD + k * VL);
                }
        for (; i < d; i++)
#pragma GCC unroll 4
            for (int k = 0; k < TILE_VECTORS; k++) sums[0][k] += q[i] * rlox_load(tiles + i * PAD + k * VL);
#pragma GCC unroll 4
        for (int k = 0; k < TILE_VECTORS; k++) {
            rlox_vf sum = sums[0][k];
#pragma GCC unroll 4
            for (int c = 1; c < CHAINS; c++) sum += sums[c][k];
            rlox_put(scores + t + k * VL, sum * scale);
        }
    }
    for (int64_t t = n; t % PAD; t++) scores[t] = -INFINITY;
}

/* Replaces n scores, a multiple of PAD, by exp(score - largest score); returns their sum. */
static float rlox_exponentials(int64_t n, float *scores) {
    rlox_vf most = rlox_load(scores), sum = {0};
    for (int64_t i = VL; i < n; i += VL) {
        const rlox_vf x = rlox_load(scores + i);
        most = rlox_select(x > most, x, most);
    }
    const float top = rlox_lanes_max(most);
    for (int64_t i = 0; i < n; i += VL) {
        const rlox_vf e = rlox_exp_not_above_0(rlox_load(scores + i) - top);
        sum += e;
        rlox_put(scores + i, e);
    }
    return rlox_lanes_sum(sum);
}

#define AHEAD 8 /* how many tokens ahead values are prefetched */

/* A part of the tokens that a query attends to: those of its own row, or those of the prompt. */
typedef struct {
    const float *keys, *values, *after; /* `after` is read next */
    int64_t n;
} rlox_span;

/* nv vectors of the weighted sum of values, times `scale`; the weights of each span are padded to PAD. */
static inline __attribute__((always_inline)) void rlox_mix(const int nv, int64_t dp, const rlox_span *spans,
                                                           const float *weights, float scale, rlox_vf *mean) {
    rlox_vf even[4], odd[4];
#pragma GCC unroll 4
    for (int k = 0; k < nv; k++) even[k] = odd[k] = (rlox_vf){0};
    for (int s = 0; s < 2; s++) {
        const float *values = spans[s].values;
        int64_t t = 0;
        for (; t + 2 <= spans[s].n; t += 2, values += 2 * dp) {
            const float a = weights[t], b = weights[t + 1];
            const int64_t over = t + AHEAD - spans[s].n;
            const float *soon = over < 0 ? values + AHEAD * dp : spans[s].after + over * dp;
#pragma GCC unroll 4
            for (int k = 0; k < nv; k++) {
                __builtin_prefetch(soon + k * VL);
                __builtin_prefetch(soon + dp + k * VL);
                even[k] += a * rlox_load(values + k * VL);
                odd[k] += b * rlox_load(values + dp + k * VL);
            }
        }
        if (t < spans[s].n)
#pragma GCC unroll 4
            for (int k = 0; k < nv; k++) even[k] += weights[t] * rlox_load(values + k * VL);
        weights += (spans[s].n + PAD - 1) / PAD * PAD;
    }
#pragma GCC unroll 4
    for (int k = 0; k < nv; k++) mean[k] = (even[k] + odd[k]) * scale;
}

/* Attention of `group` queries (group, d) over two spans, written to `to` (group, d). `scores` has room for both spans,
 * padded. */
static void rlox_attend(int64_t group, int64_t d, const float *q, const rlox_span *spans, float scale, float *scores,
                        float *to) {
    const int64_t dp = (d + PAD - 1) / PAD * PAD;
    const int64_t first = (spans[0].n + PAD - 1) / PAD * PAD, second = (spans[1].n + PAD - 1) / PAD * PAD;
    for (int64_t g = 0; g < group; g++, q += d, to += d) {
        rlox_scores(d, q, spans[0].keys, spans[0].n, spans[1].keys, scale, scores);
        rlox_scores(d, q, spans[1].keys, spans[1].n, spans[1].values, scale, scores + first);
        const float share = 1.0f / rlox_exponentials(first + second, scores);
        for (int64_t i = 0; i < dp; i += 4 * VL) {
            const rlox_span here[2] = {{0, spans[0].values + i, spans[1].values + i, spans[0].n},
                                       {0, spans[1].values + i, spans[1].after, spans[1].n}};
            const int64_t left = (dp - i) / VL;
            rlox_vf mean[4];
            switch (left < 4 ? left : 4) {
                case 1: rlox_mix(1, dp, here, scores, share, mean); break;
                case 2: rlox_mix(2, dp, here, scores, share, mean); break;
                case 3: rlox_mix(3, dp, here, scores, share, mean); break;
                default: rlox_mix(4, dp, here, scores, share, mean); break;
            }
            const int64_t wanted = d - i < 4 * VL ? d - i : 4 * VL;
            memcpy(to + i, mean, wanted * sizeof(float));
        }
    }
}

#endif
