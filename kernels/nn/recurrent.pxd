"""One layer of an LSTM or a GRU over T steps of N sequences, with its gradient: the core of `rlox.kernels.nn.recurrent`.

Letters: D inputs, H units, G gates (4 or 3). A vector has VL lanes; widths are padded with zeros to its multiples:
`wide` and `in_wide`. The gates of VL units lie side by side, (wide / VL, G, VL), so that one register tile of a product
contains all gates of its units, and their activations follow before anything is stored.

A row's numbers do not depend on the other rows: sums run over the same terms in the same order for any N.
"""

from rlox.kernels.types cimport f32, u8

cdef extern from *:
    r"""
    #ifndef RLOX_RECURRENT_H
    #define RLOX_RECURRENT_H

    #include <stdint.h>
    #include <string.h>

    #include "gemm.h"

    #if VL == 16 || defined(__aarch64__)
    #define STEP_ROWS 6 /* times 4 gates: as many sums as fit the registers */
    #else
    #define STEP_ROWS 2
    #endif
    #define PACKED_ROWS (VL < 8 ? VL : 8)

    typedef float rlox_quarter __attribute__((vector_size(16), aligned(4), may_alias));

    typedef struct {
        int64_t n_gates; /* 4: LSTM, 3: GRU */
        int64_t size, wide;
        int64_t n_inputs, in_wide;
        int64_t n_steps, n_rows; /* T, N */
        int64_t state_ld;        /* distance of the rows of states before the first and after the last step */
        int64_t chunk;           /* steps between two products for all their rows */
        const uint8_t *is_first; /* (T, N) */
        const uint8_t *running;  /* (T, N), or NULL: all run */
    } rlox_sequences;

    /* What the backward pass needs of the forward pass. */
    typedef struct {
        float *gates;  /* (T, N, G wide), after their activations */
        float *h;      /* (T + 1, N, wide): states before each step, after resets */
        float *c;      /* likewise, of an LSTM */
        float *inner;  /* (T, N, wide): tanh of the cells, or a GRU's candidate as computed from its state */
    } rlox_kept;

    static inline int64_t rlox_multiple(int64_t n) { return (n + VL - 1) / VL * VL; }

    /* ---- weights */

    /* Weights w (G H, n_in) as panels (wide / VL, n_in, G, VL) of their transpose. */
    static void rlox_pack_gates(const rlox_sequences *s, const float *w, int64_t n_in, float *to) {
        const int64_t width = s->n_gates * VL;
        for (int64_t unit = 0; unit < s->size; unit += VL, to += n_in * width)
            for (int64_t part = 0; part < width; part += PACKED_ROWS) {
                const int64_t first = unit + part % VL, left = s->size - first;
                const int64_t real = left < 0 ? 0 : left < PACKED_ROWS ? left : PACKED_ROWS;
                const float *rows = real ? w + (part / VL * s->size + first) * n_in : w;
                float *block = to + part;
                if (real == PACKED_ROWS) {
                    for (int64_t k = 0; k < n_in; k++)
    #pragma GCC unroll 8
                        for (int64_t o = 0; o < PACKED_ROWS; o++) block[k * width + o] = rows[o * n_in + k];
                    continue;
                }
                for (int64_t k = 0; k < n_in; k++)
                    for (int64_t o = 0; o < PACKED_ROWS; o++) block[k * width + o] = o < real ? rows[o * n_in + k] : 0.0f;
            }
    }

    /* Copies w (G H, n_in) to rows in the order of gates (G wide, in_wide), or with `back` rows in that order to w. */
    static void rlox_order_gates(const rlox_sequences *s, float *w, int64_t n_in, int64_t in_wide, float *ordered, int back) {
        for (int64_t unit = 0; unit < s->wide; unit += VL)
            for (int64_t g = 0; g < s->n_gates; g++)
                for (int64_t lane = 0; lane < VL; lane++, ordered += in_wide) {
                    const int64_t u = unit + lane;
                    float *row = u < s->size ? w + (g * s->size + u) * n_in : w;
                    if (back) {
                        if (u < s->size) memcpy(row, ordered, n_in * sizeof(float));
                    } else {
                        const int64_t real = u < s->size ? n_in : 0;
                        memcpy(ordered, row, real * sizeof(float));
                        memset(ordered + real, 0, (in_wide - real) * sizeof(float));
                    }
                }
    }

    /* Biases of the products with x, (G wide): those of both products, except that a GRU's candidate adds the one of its
     * state, in `inner` (wide), before the reset gate. */
    static void rlox_order_biases(const rlox_sequences *s, const float *b_ih, const float *b_hh, float *to, float *inner) {
        for (int64_t u = 0; u < s->wide; u++) {
            float *at = to + u / VL * s->n_gates * VL + u % VL;
            for (int64_t g = 0; g < s->n_gates; g++) {
                const int64_t i = g * s->size + u;
                const int apart = s->n_gates == 3 && g == 2;
                at[g * VL] = u < s->size ? b_ih[i] + (apart ? 0.0f : b_hh[i]) : 0.0f;
                if (apart) inner[u] = u < s->size ? b_hh[i] : 0.0f;
            }
        }
    }

    /* Copies rows of n numbers to rows of `wide` numbers, which end in zeros. */
    static void rlox_widen_rows(int64_t rows, int64_t n, const float *from, int64_t ld, float *to, int64_t wide) {
        for (int64_t i = 0; i < rows; i++, from += ld, to += wide) {
            memcpy(to, from, n * sizeof(float));
            memset(to + n, 0, (wide - n) * sizeof(float));
        }
    }

    static void rlox_narrow_rows(int64_t rows, int64_t n, const float *from, int64_t wide, float *to, int64_t ld) {
        for (int64_t i = 0; i < rows; i++, from += wide, to += ld) memcpy(to, from, n * sizeof(float));
    }

    /* ---- forward */

    /* The first `nv` of x become sigmoids: (1 + tanh(x / 2)) / 2. */
    static inline __attribute__((always_inline)) rlox_vf rlox_half(rlox_vf x) { return 0.5f * x + 0.5f; }

    /* Activations of an LSTM's gates i, f, g, o; returns the next cell. */
    static inline __attribute__((always_inline)) rlox_vf rlox_lstm_gates(rlox_vf *x, rlox_vf c) {
        x[0] *= 0.5f, x[1] *= 0.5f, x[3] *= 0.5f;
        rlox_tanh(x, 4);
        x[0] = rlox_half(x[0]), x[1] = rlox_half(x[1]), x[3] = rlox_half(x[3]);
        return x[1] * c + x[0] * x[2];
    }

    /* Activations of a GRU's gates r and z; x[2] was computed from the state. Returns the candidate before its tanh. */
    static inline __attribute__((always_inline)) rlox_vf rlox_gru_gates(rlox_vf *x, rlox_vf from_input) {
        x[0] *= 0.5f, x[1] *= 0.5f;
        rlox_tanh(x, 2);
        x[0] = rlox_half(x[0]), x[1] = rlox_half(x[1]);
        return x[0] * x[2] + from_input;
    }

    /* All gates of VL units of `mr` rows: gates (mr, G wide) has the products with x, h (mr, wide) the states and w
     * (H, G, VL) a panel. Writes an LSTM's next cells to `after` and the numbers of a GRU's candidate to `inner`. */
    static inline __attribute__((always_inline)) void rlox_step_tile(
        const int mr, const int lstm, const rlox_sequences *s, const float *h, const float *w, const float *bias, float *gates,
        const float *c, float *after, float *inner) {
        const int n_gates = lstm ? 4 : 3;
        const int64_t wide = s->wide, step = n_gates * wide, size = s->size;
        rlox_vf acc[STEP_ROWS][4];
    #pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
    #pragma GCC unroll 4
            for (int g = 0; g < n_gates; g++)
                acc[i][g] = rlox_load(!lstm && g == 2 ? bias : gates + i * step + g * VL);
        for (int64_t k = 0; k < size; k++) {
            rlox_vf row[4];
    #pragma GCC unroll 4
            for (int g = 0; g < n_gates; g++) row[g] = rlox_load(w + (k * n_gates + g) * VL);
    #pragma GCC unroll 8
            for (int i = 0; i < mr; i++) {
                const float value = h[i * wide + k];
    #pragma GCC unroll 4
                for (int g = 0; g < n_gates; g++) acc[i][g] += value * row[g];
            }
        }
    #pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            float *to = gates + i * step;
            if (lstm) {
                rlox_put(after + i * wide, rlox_lstm_gates(acc[i], rlox_load(c + i * wide)));
            } else {
                rlox_put(inner + i * wide, acc[i][2]);
                acc[i][2] = rlox_gru_gates(acc[i], rlox_load(to + 2 * VL));
            }
    #pragma GCC unroll 4
            for (int g = 0; g < n_gates; g++) rlox_put(to + g * VL, acc[i][g]);
        }
    }

    #define RLOX_STEP_ROWS(m, lstm) \
        case m: rlox_step_tile(m, lstm, s, h, w, bias, gates, c, after, inner); break;
    #define RLOX_STEP(name, lstm) \
        static void name(const rlox_sequences *s, int64_t rows, const float *h, const float *w, const float *bias, float *gates, \
                         const float *c, float *after, float *inner) { \
            while (rows) { \
                const int64_t tiles = (rows + STEP_ROWS - 1) / STEP_ROWS, mr = (rows + tiles - 1) / tiles; \
                switch (mr) { RLOX_STEP_CASES(lstm) } \
                rows -= mr; \
                h += mr * s->wide, gates += mr * s->n_gates * s->wide, inner += mr * s->wide; \
                if (lstm) c += mr * s->wide, after += mr * s->wide; \
            } \
        }
    #if STEP_ROWS == 6
    #define RLOX_STEP_CASES(lstm) \
        RLOX_STEP_ROWS(1, lstm) RLOX_STEP_ROWS(2, lstm) RLOX_STEP_ROWS(3, lstm) RLOX_STEP_ROWS(4, lstm) \
        RLOX_STEP_ROWS(5, lstm) RLOX_STEP_ROWS(6, lstm)
    #else
    #define RLOX_STEP_CASES(lstm) RLOX_STEP_ROWS(1, lstm) RLOX_STEP_ROWS(2, lstm)
    #endif
    RLOX_STEP(rlox_step_lstm, 1)
    RLOX_STEP(rlox_step_gru, 0)

    /* The next states of `nv` vectors of units, which share the division of their tanh. */
    static inline __attribute__((always_inline)) void rlox_state_part(const int nv, const int lstm, float *gates,
                                                                      const float *c, float *inner, const float *before,
                                                                      float *after) {
        const int64_t step = lstm ? 4 * VL : 3 * VL;
        rlox_vf x[4];
    #pragma GCC unroll 4
        for (int j = 0; j < nv; j++) x[j] = rlox_load(lstm ? c + j * VL : gates + j * step + 2 * VL);
        rlox_tanh(x, nv);
    #pragma GCC unroll 4
        for (int j = 0; j < nv; j++)
            if (lstm) {
                rlox_put(inner + j * VL, x[j]);
                rlox_put(after + j * VL, rlox_load(gates + j * step + 3 * VL) * x[j]);
            } else {
                rlox_put(gates + j * step + 2 * VL, x[j]);
                rlox_put(after + j * VL, x[j] + rlox_load(gates + j * step + VL) * (rlox_load(before + j * VL) - x[j]));
            }
    }

    static inline __attribute__((always_inline)) void rlox_state_row(const int lstm, int64_t wide, float *gates, const float *c,
                                                                     float *inner, const float *before, float *after) {
        const int64_t step = lstm ? 4 : 3;
        int64_t j = 0;
        for (; j + 4 * VL <= wide; j += 4 * VL)
            rlox_state_part(4, lstm, gates + j * step, lstm ? c + j : c, inner + j, before + j, after + j);
        for (; j < wide; j += VL)
            rlox_state_part(1, lstm, gates + j * step, lstm ? c + j : c, inner + j, before + j, after + j);
    }

    static inline void rlox_clear_first(const rlox_sequences *s, int64_t t, float *x) {
        for (int64_t i = 0; i < s->n_rows; i++)
            if (s->is_first[t * s->n_rows + i]) memset(x + i * s->wide, 0, s->wide * sizeof(float));
    }

    /* Numbers of the packed weights and biases. */
    static inline int64_t rlox_packed_size(const rlox_sequences *s) {
        return s->n_gates * s->wide * (s->n_inputs + s->size + 1) + s->wide;
    }

    /* Packs the weights and biases for `rlox_recurrent_forward`. */
    static void rlox_recurrent_pack(const rlox_sequences *s, const float *w_ih, const float *w_hh, const float *b_ih,
                                    const float *b_hh, float *packed) {
        const int64_t gates_wide = s->n_gates * s->wide;
        float *packed_h = packed + gates_wide * s->n_inputs, *bias = packed_h + gates_wide * s->size;
        rlox_pack_gates(s, w_ih, s->n_inputs, packed);
        rlox_pack_gates(s, w_hh, s->size, packed_h);
        rlox_order_biases(s, b_ih, b_hh, bias, bias + gates_wide);
    }

    /* Runs all steps. x (T, N, D); state and last (N, H or 2 H): the state before the first and after the last step; outputs
     * (T, N, H). */
    static void rlox_recurrent_forward(const rlox_sequences *s, const float *x, const float *state, const float *packed,
                                       const rlox_kept *kept, float *outputs, float *last) {
        const int lstm = s->n_gates == 4;
        const int64_t rows = s->n_rows, wide = s->wide, size = s->size, gates_wide = s->n_gates * wide;
        const int64_t panel = s->n_gates * VL;
        const float *packed_h = packed + gates_wide * s->n_inputs;
        const float *bias = packed_h + gates_wide * size, *inner_bias = bias + gates_wide;
        rlox_widen_rows(rows, size, state, s->state_ld, kept->h, wide);
        if (lstm) rlox_widen_rows(rows, size, state + size, s->state_ld, kept->c, wide);
        for (int64_t t = 0; t < s->n_steps; t++) {
            const int64_t at = t * rows;
            float *gates = kept->gates + at * gates_wide, *inner = kept->inner + at * wide;
            float *h = kept->h + at * wide, *c = lstm ? kept->c + at * wide : 0;
            if (t % s->chunk == 0) {
                const int64_t left = s->n_steps - t, steps = left < s->chunk ? left : s->chunk;
                for (int64_t unit = 0; unit < wide; unit += VL)
                    rlox_gemm(steps * rows, panel, s->n_inputs, x + at * s->n_inputs, s->n_inputs, 1,
                              packed + unit * s->n_gates * s->n_inputs, panel, gates + unit * s->n_gates, gates_wide,
                              RLOX_BIAS, bias + unit * s->n_gates, 0, 0);
            }
            rlox_clear_first(s, t, h);
            if (lstm) rlox_clear_first(s, t, c);
            for (int64_t unit = 0; unit < wide; unit += VL) {
                const float *w = packed_h + unit * s->n_gates * size;
                if (lstm)
                    rlox_step_lstm(s, rows, h, w, 0, gates + unit * 4, c + unit, c + rows * wide + unit, inner);
                else
                    rlox_step_gru(s, rows, h, w, inner_bias + unit, gates + unit * 3, 0, 0, inner + unit);
            }
            for (int64_t i = 0; i < rows; i++) {
                float *output = outputs + (at + i) * size, *before = h + i * wide, *after = before + rows * wide;
                float *cell = lstm ? c + (rows + i) * wide : 0;
                if (s->running && !s->running[at + i]) {
                    memcpy(after, before, wide * sizeof(float));
                    if (lstm) memcpy(cell, c + i * wide, wide * sizeof(float));
                    memset(output, 0, size * sizeof(float));
                    continue;
                }
                if (lstm)
                    rlox_state_row(1, wide, gates + i * gates_wide, cell, inner + i * wide, before, after);
                else
                    rlox_state_row(0, wide, gates + i * gates_wide, 0, inner + i * wide, before, after);
                memcpy(output, after, size * sizeof(float));
            }
        }
        const int64_t end = s->n_steps * rows * wide;
        rlox_narrow_rows(rows, size, kept->h + end, wide, last, s->state_ld);
        if (lstm) rlox_narrow_rows(rows, size, kept->c + end, wide, last + size, s->state_ld);
    }

    /* ---- backward */

    /* Gradients of a row's gates, `d` (G wide), from those of its output dh and cell dc, (wide). dc becomes that of the cell
     * before the step, and dh 0, to which a product is added. */
    static inline void rlox_lstm_row(int64_t wide, const float *gates, const float *inner, const float *c, float *dh, float *dc,
                                     float *d) {
        for (int64_t j = 0; j < wide; j += VL, gates += 4 * VL, d += 4 * VL) {
            const rlox_vf i = rlox_load(gates), f = rlox_load(gates + VL), g = rlox_load(gates + 2 * VL);
            const rlox_vf o = rlox_load(gates + 3 * VL), y = rlox_load(inner + j), by = rlox_load(dh + j);
            const rlox_vf cell = rlox_load(dc + j) + by * o * (1.0f - y * y);
            rlox_put(d, cell * g * i * (1.0f - i));
            rlox_put(d + VL, cell * rlox_load(c + j) * f * (1.0f - f));
            rlox_put(d + 2 * VL, cell * i * (1.0f - g * g));
            rlox_put(d + 3 * VL, by * y * o * (1.0f - o));
            rlox_put(dc + j, cell * f);
            rlox_put(dh + j, (rlox_vf){0});
        }
    }

    /* Likewise of a GRU with the state `h` before the step: gradients of what x gives to the gates, and in `d_h` of what h
     * gives. dh becomes the part of the gradient of h that passes by the gates. */
    static inline void rlox_gru_row(int64_t wide, const float *gates, const float *inner, const float *h, float *dh, float *d,
                                    float *d_h) {
        for (int64_t j = 0; j < wide; j += VL, gates += 3 * VL, d += 3 * VL, d_h += 3 * VL) {
            const rlox_vf r = rlox_load(gates), z = rlox_load(gates + VL), n = rlox_load(gates + 2 * VL);
            const rlox_vf by = rlox_load(dh + j), candidate = by * (1.0f - z) * (1.0f - n * n);
            const rlox_vf reset = candidate * rlox_load(inner + j) * r * (1.0f - r);
            const rlox_vf update = by * (rlox_load(h + j) - n) * z * (1.0f - z);
            rlox_put(d, reset);
            rlox_put(d + VL, update);
            rlox_put(d + 2 * VL, candidate);
            rlox_put(d_h, reset);
            rlox_put(d_h + VL, update);
            rlox_put(d_h + 2 * VL, candidate * r);
            rlox_put(dh + j, by * z);
        }
    }

    /* Adds the sums of the columns of x (rows, n). */
    static void rlox_add_columns(int64_t rows, int64_t n, const float *x, float *to) {
        for (int64_t j = 0; j < n; j += VL) {
            rlox_vf sum = {0};
            for (int64_t i = 0; i < rows; i++) sum += rlox_load(x + i * n + j);
            rlox_put(to + j, rlox_load(to + j) + sum);
        }
    }

    /* Copies ordered biases (G wide) to (G H). */
    static void rlox_restore_biases(const rlox_sequences *s, const float *ordered, float *to) {
        for (int64_t g = 0; g < s->n_gates; g++)
            for (int64_t u = 0; u < s->size; u++)
                to[g * s->size + u] = ordered[u / VL * s->n_gates * VL + g * VL + u % VL];
    }

    /* Gradients that are wanted, in the layout of the arguments of the forward pass; NULL: not wanted. */
    typedef struct {
        float *x;                         /* (T, N, D) */
        float *state;                     /* (N, H or 2 H) */
        float *w_ih, *w_hh, *b_ih, *b_hh; /* all or none */
    } rlox_gradients;

    /* Room for `rlox_recurrent_backward`, in floats. */
    static inline int64_t rlox_backward_room(const rlox_sequences *s) {
        const int64_t gates_wide = s->n_gates * s->wide, rows = s->chunk * s->n_rows;
        return 2 * gates_wide * (s->in_wide + s->wide + 1 + rows) + 2 * s->n_rows * s->wide + 2 * rows * s->in_wide;
    }

    /* Goes back through all steps. outputs (T, N, H) and last (N, H or 2 H) are the gradients with respect to the results of
     * the forward pass; NULL: zeros. */
    static void rlox_recurrent_backward(const rlox_sequences *s, const float *x, const float *w_ih, const float *w_hh,
                                        const rlox_kept *kept, const float *outputs, const float *last, float *room,
                                        const rlox_gradients *wanted) {
        const int lstm = s->n_gates == 4;
        const int64_t rows = s->n_rows, wide = s->wide, size = s->size, gates_wide = s->n_gates * wide;
        const int64_t state_ld = s->state_ld, in_wide = s->in_wide, most = s->chunk * rows;
        float *ordered_x = room, *ordered_h = ordered_x + gates_wide * in_wide;
        float *d_x = ordered_h + gates_wide * wide, *d_h = d_x + gates_wide * in_wide; /* gradients of these weights */
        float *d_bias_x = d_h + gates_wide * wide, *d_bias_h = d_bias_x + gates_wide;
        float *by_x = d_bias_h + gates_wide, *by_h = lstm ? by_x : by_x + most * gates_wide; /* gradients of the gates */
        float *dh = by_x + 2 * most * gates_wide, *dc = dh + rows * wide;
        float *padded = dc + rows * wide, *d_padded = padded + most * in_wide;
        rlox_order_gates(s, (float *)w_hh, size, wide, ordered_h, 0);
        if (wanted->x) rlox_order_gates(s, (float *)w_ih, s->n_inputs, in_wide, ordered_x, 0);
        memset(d_x, 0, gates_wide * (in_wide + wide + 2) * sizeof(float));
        memset(dh, 0, 2 * rows * wide * sizeof(float));
        if (last) rlox_widen_rows(rows, size, last, state_ld, dh, wide);
        if (last && lstm) rlox_widen_rows(rows, size, last + size, state_ld, dc, wide);
        for (int64_t t = s->n_steps - 1; t >= 0; t--) {
            const int64_t at = t * rows, place = t % s->chunk * rows; /* rows of this step, in all and in the chunk */
            float *d = by_x + place * gates_wide, *d_from_h = by_h + place * gates_wide;
            for (int64_t i = 0; i < rows; i++) {
                const float *gates = kept->gates + (at + i) * gates_wide, *inner = kept->inner + (at + i) * wide;
                float *dhi = dh + i * wide, *di = d + i * gates_wide;
                if (s->running && !s->running[at + i]) {
                    memset(di, 0, gates_wide * sizeof(float));
                    memset(d_from_h + i * gates_wide, 0, gates_wide * sizeof(float));
                    continue;
                }
                if (outputs) {
                    const float *by = outputs + (at + i) * size;
                    for (int64_t u = 0; u < size; u++) dhi[u] += by[u];
                }
                if (lstm)
                    rlox_lstm_row(wide, gates, inner, kept->c + (at + i) * wide, dhi, dc + i * wide, di);
                else
                    rlox_gru_row(wide, gates, inner, kept->h + (at + i) * wide, dhi, di, d_from_h + i * gates_wide);
            }
            rlox_gemm(rows, wide, gates_wide, d_from_h, gates_wide, 1, ordered_h, wide, dh, wide, RLOX_ADD, 0, 0, 0);
            rlox_clear_first(s, t, dh);
            if (lstm) rlox_clear_first(s, t, dc);
            if (t % s->chunk) continue;
            const int64_t left = s->n_steps - t, in_chunk = (left < s->chunk ? left : s->chunk) * rows;
            if (wanted->w_ih) {
                const float *inputs = x + at * s->n_inputs;
                if (in_wide != s->n_inputs) {
                    rlox_widen_rows(in_chunk, s->n_inputs, inputs, s->n_inputs, padded, in_wide);
                    inputs = padded;
                }
                rlox_gemm(gates_wide, in_wide, in_chunk, by_x, 1, gates_wide, inputs, in_wide, d_x, in_wide, RLOX_ADD, 0, 0, 0);
                rlox_gemm(gates_wide, wide, in_chunk, by_h, 1, gates_wide, kept->h + at * wide, wide, d_h, wide, RLOX_ADD, 0, 0,
                          0);
                rlox_add_columns(in_chunk, gates_wide, by_x, d_bias_x);
                if (!lstm) rlox_add_columns(in_chunk, gates_wide, by_h, d_bias_h);
            }
            if (wanted->x) {
                float *to = wanted->x + at * s->n_inputs, *wide_to = in_wide == s->n_inputs ? to : d_padded;
                rlox_gemm(in_chunk, in_wide, gates_wide, by_x, gates_wide, 1, ordered_x, in_wide, wide_to, in_wide, RLOX_STORE, 0,
                          0, 0);
                if (wide_to != to) rlox_narrow_rows(in_chunk, s->n_inputs, d_padded, in_wide, to, s->n_inputs);
            }
        }
        if (wanted->w_ih) {
            rlox_order_gates(s, wanted->w_ih, s->n_inputs, in_wide, d_x, 1);
            rlox_order_gates(s, wanted->w_hh, size, wide, d_h, 1);
            rlox_restore_biases(s, d_bias_x, wanted->b_ih);
            rlox_restore_biases(s, lstm ? d_bias_x : d_bias_h, wanted->b_hh);
        }
        rlox_narrow_rows(rows, size, dh, wide, wanted->state, state_ld);
        if (lstm) rlox_narrow_rows(rows, size, dc, wide, wanted->state + size, state_ld);
    }

    /* ---- one step without a gradient: the weights are read where they are, since packing them would take longer */

    /* Adds products a (mr, k) @ w (nj, k) transposed to c (mr, nj). */
    static inline __attribute__((always_inline)) void rlox_dot_tile(const int mr, const int nj, int64_t k_size, const float *a,
                                                                    const float *w, float *c, int64_t ldc) {
        rlox_vf acc[2][4] = {{{0}}};
        const int64_t whole = k_size / VL * VL;
        for (int64_t k = 0; k < whole; k += VL)
    #pragma GCC unroll 2
            for (int i = 0; i < mr; i++)
    #pragma GCC unroll 4
                for (int j = 0; j < nj; j++) acc[i][j] += rlox_load(a + i * k_size + k) * rlox_load(w + j * k_size + k);
    #pragma GCC unroll 2
        for (int i = 0; i < mr; i++)
    #pragma GCC unroll 4
            for (int j = 0; j < nj; j++) {
                float part[VL], rest = 0.0f;
                rlox_put(part, acc[i][j]);
                rlox_quarter sum = *(rlox_quarter *)part;
    #pragma GCC unroll 4
                for (int l = 4; l < VL; l += 4) sum += *(rlox_quarter *)(part + l);
                for (int64_t k = whole; k < k_size; k++) rest += a[i * k_size + k] * w[j * k_size + k];
                c[i * ldc + j] += ((sum[0] + sum[2]) + (sum[1] + sum[3])) + rest;
            }
    }

    /* Adds a (rows, k_size) @ w (n, k_size) transposed to c (rows, n). */
    static void rlox_dots(int64_t rows, int64_t n, int64_t k_size, const float *a, const float *w, float *c, int64_t ldc) {
        int64_t j = 0;
        for (; j + 4 <= n; j += 4, w += 4 * k_size, c += 4) {
            int64_t i = 0;
            for (; i + 2 <= rows; i += 2) rlox_dot_tile(2, 4, k_size, a + i * k_size, w, c + i * ldc, ldc);
            if (i < rows) rlox_dot_tile(1, 4, k_size, a + i * k_size, w, c + i * ldc, ldc);
        }
        for (; j < n; j++, w += k_size, c++)
            for (int64_t i = 0; i < rows; i++) rlox_dot_tile(1, 1, k_size, a + i * k_size, w, c + i * ldc, ldc);
    }

    /* Room for `rlox_recurrent_step`, in floats. */
    static inline int64_t rlox_step_room(const rlox_sequences *s) { return s->n_rows * (4 * s->wide + s->size); }

    /* Runs one step (T = 1) like `rlox_recurrent_forward`. */
    static void rlox_recurrent_step(const rlox_sequences *s, const float *x, const float *state, const float *w_ih,
                                    const float *w_hh, const float *b_ih, const float *b_hh, float *room, float *outputs,
                                    float *last) {
        const int lstm = s->n_gates == 4;
        const int64_t rows = s->n_rows, wide = s->wide, size = s->size, state_ld = s->state_ld;
        float *gates = room, *h = gates + rows * 4 * wide; /* (N, 4, wide), (N, H) */
        for (int64_t i = 0; i < rows; i++) {
            float *to = gates + i * 4 * wide;
            if (s->is_first[i])
                memset(h + i * size, 0, size * sizeof(float));
            else
                memcpy(h + i * size, state + i * state_ld, size * sizeof(float));
            for (int64_t g = 0; g < 4; g++, to += wide) {
                memset(to + size, 0, (wide - size) * sizeof(float));
                for (int64_t u = 0; u < size; u++)
                    if (lstm || g < 2)
                        to[u] = b_ih[g * size + u] + b_hh[g * size + u];
                    else
                        to[u] = (g == 2 ? b_ih : b_hh)[2 * size + u];
            }
        }
        for (int64_t g = 0; g < s->n_gates; g++) {
            float *to = gates + g * wide, *to_h = !lstm && g == 2 ? to + wide : to;
            rlox_dots(rows, size, s->n_inputs, x, w_ih + g * size * s->n_inputs, to, 4 * wide);
            rlox_dots(rows, size, size, h, w_hh + g * size * size, to_h, 4 * wide);
        }
        for (int64_t i = 0; i < rows; i++) {
            float *from = gates + i * 4 * wide, *output = outputs + i * size, *after = last + i * state_ld;
            const float *before = h + i * size, *cell = state + i * state_ld + size;
            const int runs = !s->running || s->running[i];
            for (int64_t u = 0; u < size; u += VL) {
                const int64_t n = (size - u < VL ? size - u : VL) * sizeof(float);
                rlox_vf x4[4], y, c = {0}, old = {0};
                memcpy(&old, before + u, n);
                if (lstm && !s->is_first[i]) memcpy(&c, cell + u, n);
                for (int g = 0; g < 4; g++) x4[g] = rlox_load(from + g * wide + u);
                if (!runs) {
                    y = old;
                } else if (lstm) {
                    y = c = rlox_lstm_gates(x4, c);
                    rlox_tanh(&y, 1);
                    y *= x4[3];
                } else {
                    const rlox_vf from_input = x4[2];
                    x4[2] = x4[3];
                    y = rlox_gru_gates(x4, from_input);
                    rlox_tanh(&y, 1);
                    y += x4[1] * (old - y);
                }
                memcpy(after + u, &y, n);
                if (lstm) memcpy(after + size + u, &c, n);
                if (runs)
                    memcpy(output + u, &y, n);
                else
                    memset(output + u, 0, n);
            }
        }
    }

    #endif
    """
    ctypedef struct Sequences "rlox_sequences":
        Py_ssize_t n_gates, size, wide, n_inputs, in_wide, n_steps, n_rows, state_ld, chunk
        const u8* is_first
        const u8* running
    ctypedef struct Kept "rlox_kept":
        f32* gates
        f32* h
        f32* c
        f32* inner
    ctypedef struct Gradients "rlox_gradients":
        f32* x
        f32* state
        f32* w_ih
        f32* w_hh
        f32* b_ih
        f32* b_hh
    Py_ssize_t rlox_multiple(Py_ssize_t) noexcept nogil
    void rlox_widen_rows(Py_ssize_t rows, Py_ssize_t n, const f32* source, Py_ssize_t ld, f32* to,
                         Py_ssize_t wide) noexcept nogil
    void rlox_narrow_rows(Py_ssize_t rows, Py_ssize_t n, const f32* source, Py_ssize_t wide, f32* to,
                          Py_ssize_t ld) noexcept nogil
    Py_ssize_t rlox_packed_size(const Sequences*) noexcept nogil
    Py_ssize_t rlox_backward_room(const Sequences*) noexcept nogil
    Py_ssize_t rlox_step_room(const Sequences*) noexcept nogil
    void rlox_recurrent_pack(const Sequences*, const f32*, const f32*, const f32*, const f32*, f32*) noexcept nogil
    void rlox_recurrent_forward(const Sequences*, const f32*, const f32*, const f32*, const Kept*, f32*,
                                f32*) noexcept nogil
    void rlox_recurrent_backward(const Sequences*, const f32*, const f32*, const f32*, const Kept*, const f32*,
                                 const f32*, f32*, const Gradients*) noexcept nogil
    void rlox_recurrent_step(const Sequences*, const f32*, const f32*, const f32*, const f32*, const f32*, const f32*,
                             f32*, f32*, f32*) noexcept nogil
