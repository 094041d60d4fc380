"""The native update of PPO and A2C: what their PyTorch `update` defines, for actor-critics of plain perceptrons.

Parameters are one flat float32 block in the order of ``policy.parameters()``, each weight (n_out, n_in) as PyTorch has
it, so that a module whose parameters are views of the block and this code always see the same numbers. A minibatch is
worked through `CHUNK` rows at a time, so that activations stay in the cache whatever the batch size; gradients add up.
"""

import numpy as np

cimport numpy as cnp
from libc.math cimport exp, expf, fabs, isfinite, log, logf, sqrt, sqrtf
from libc.string cimport memcpy, memset
from cpython.pycapsule cimport PyCapsule_GetPointer

from kernels.philox cimport DOMAIN_RNG, Block, below, join, philox
from kernels.types cimport cf32_r, f32, f32_r, f64, i64, u8, u64

cnp.import_array()

cdef extern from "gemm.h":
    enum:
        PAD
        RLOX_STORE
        RLOX_ADD
        RLOX_BIAS
        RLOX_BIAS_TANH
        RLOX_BIAS_RELU
        RLOX_DTANH
        RLOX_DRELU
    void rlox_gemm(Py_ssize_t rows, Py_ssize_t n, Py_ssize_t k_size, const f32* a, Py_ssize_t a_row,
                   Py_ssize_t a_col, const f32* b, Py_ssize_t ldb, f32* c, Py_ssize_t ldc, int after,
                   const f32* bias, const f32* h, Py_ssize_t ldh) noexcept nogil
    void rlox_pack_transposed(const f32* w, Py_ssize_t n_out, Py_ssize_t n_in, f32* to) noexcept nogil
    void rlox_pack(const f32* w, Py_ssize_t n_out, Py_ssize_t n_in, f32* to) noexcept nogil

cdef extern from "stepper.h":
    const char* RLOX_STEPPER_CAPSULE
    ctypedef struct rlox_stepper:
        void* self
        i64 n
        i64 obs_dim
        i64 n_actions
        i64 act_dim
        i64 max_episode_steps
        const f32* act_low
        const f32* act_high
        void (*step)(void* self, const void* actions, f32* obs, f64* rewards, u8* terminated, u8* truncated,
                     f32* final_obs, f64* episode_return, i64* episode_length) noexcept nogil

cdef enum:
    MAX_LAYERS = 9
    CHUNK = 256

cdef enum Head:
    CATEGORICAL
    GAUSSIAN

cdef f64 LOG_SQRT_2PI = 0.91893853320467274178


cdef struct Layer:
    Py_ssize_t n_in
    Py_ssize_t n_out
    Py_ssize_t in_pad
    Py_ssize_t out_pad
    f32* weight         # (n_out, n_in), in the block
    f32* bias           # (n_out)
    f32* d_weight       # the same places of the gradient
    f32* d_bias
    f32* forward        # panels of the transposed weight
    f32* backward       # panels of the weight; NULL for the first layer, whose input has no gradient
    f32* padded_bias    # (out_pad)
    f32* out            # (CHUNK, out_pad)
    f32* d_out          # (CHUNK, out_pad)
    f32* d_padded       # (n_out, in_pad), where in_pad != n_in


cdef struct Net:
    int n_layers
    bint tanh
    Layer[MAX_LAYERS] layers


cdef inline Py_ssize_t padded(Py_ssize_t n) noexcept nogil:
    return (n + PAD - 1) // PAD * PAD


cdef void pack(Net* net, bint backward) noexcept nogil:
    """Bring the weights into the form the products read."""
    cdef int l
    cdef Layer* layer
    for l in range(net.n_layers):
        layer = &net.layers[l]
        rlox_pack_transposed(layer.weight, layer.n_out, layer.n_in, layer.forward)
        memcpy(layer.padded_bias, layer.bias, layer.n_out * sizeof(f32))
        if backward and layer.backward != NULL:
            rlox_pack(layer.weight, layer.n_out, layer.n_in, layer.backward)


cdef const f32* forward(Net* net, const f32* x, Py_ssize_t ldx, Py_ssize_t rows) noexcept nogil:
    """Outputs (rows, out_pad) of the last layer for inputs (rows, ldx); rows <= CHUNK."""
    cdef int l, after
    cdef Layer* layer
    for l in range(net.n_layers):
        layer = &net.layers[l]
        after = RLOX_BIAS
        if l < net.n_layers - 1:
            after = RLOX_BIAS_TANH if net.tanh else RLOX_BIAS_RELU
        rlox_gemm(rows, layer.out_pad, layer.n_in, x, ldx, 1, layer.forward, 0, layer.out, layer.out_pad,
                  after, layer.padded_bias, NULL, 0)
        x = layer.out
        ldx = layer.out_pad
    return x


cdef void add_column_sums(cf32_r x, Py_ssize_t rows, Py_ssize_t ld, Py_ssize_t n, f32_r to) noexcept nogil:
    cdef Py_ssize_t i, j
    for i in range(rows):
        for j in range(n):
            to[j] += x[i * ld + j]


cdef void backward(Net* net, const f32* x, Py_ssize_t ldx, Py_ssize_t rows) noexcept nogil:
    """Add the gradient of the last `forward`, from d_out of the last layer; x (rows, ldx) padded with zeros."""
    cdef int l
    cdef Layer* layer
    cdef Layer* below_
    cdef const f32* h
    cdef Py_ssize_t ldh
    for l in range(net.n_layers - 1, -1, -1):
        layer = &net.layers[l]
        h = net.layers[l - 1].out if l else x
        ldh = layer.in_pad if l else ldx
        # d_out read by columns is its transpose: (n_out, rows) @ (rows, n_in).
        if layer.d_padded == NULL:
            rlox_gemm(layer.n_out, layer.in_pad, rows, layer.d_out, 1, layer.out_pad, h, ldh,
                      layer.d_weight, layer.n_in, RLOX_ADD, NULL, NULL, 0)
        else:
            rlox_gemm(layer.n_out, layer.in_pad, rows, layer.d_out, 1, layer.out_pad, h, ldh,
                      layer.d_padded, layer.in_pad, RLOX_ADD, NULL, NULL, 0)
        add_column_sums(layer.d_out, rows, layer.out_pad, layer.n_out, layer.d_bias)
        if l:
            below_ = &net.layers[l - 1]
            rlox_gemm(rows, layer.in_pad, layer.n_out, layer.d_out, layer.out_pad, 1, layer.backward, 0,
                      below_.d_out, below_.out_pad, RLOX_DTANH if net.tanh else RLOX_DRELU, NULL,
                      below_.out, below_.out_pad)


cdef void clear_padded(Net* net) noexcept nogil:
    cdef int l
    cdef Layer* layer
    for l in range(net.n_layers):
        layer = &net.layers[l]
        if layer.d_padded != NULL:
            memset(layer.d_padded, 0, layer.n_out * layer.in_pad * sizeof(f32))


cdef void unpad(Net* net) noexcept nogil:
    """Copy the gradients that were gathered in padded rows to their places."""
    cdef int l
    cdef Py_ssize_t o
    cdef Layer* layer
    for l in range(net.n_layers):
        layer = &net.layers[l]
        if layer.d_padded != NULL:
            for o in range(layer.n_out):
                memcpy(layer.d_weight + o * layer.n_in, layer.d_padded + o * layer.in_pad,
                       layer.n_in * sizeof(f32))


cdef struct Loss:
    bint ppo            # else A2C's policy gradient
    f64 clip_eps
    f64 vf_coef
    f64 ent_coef
    f64 clip_vf         # 0: off


cdef struct Sums:
    f64 policy_loss
    f64 value_loss
    f64 entropy
    f64 approx_kl
    f64 clipped


# A chunk of a minibatch, gathered.
cdef struct Rows:
    const f32* obs      # (B, in_pad)
    const i64* choices  # (B) categorical
    const f32* actions  # (B, A) Gaussian
    const f32* log_probs
    const f32* advantages
    const f32* returns
    const f32* values


cdef inline f64 policy_term(const Loss* loss, f64 log_prob, f64 old, f64 advantage, Sums* sums) noexcept nogil:
    """Add the policy loss of one row; return its derivative by the log-probability."""
    cdef f64 log_ratio, ratio, clipped, first, second
    if not loss.ppo:
        sums.policy_loss -= log_prob * advantage
        return -advantage
    log_ratio = log_prob - old
    ratio = exp(log_ratio)
    clipped = min(max(ratio, 1.0 - loss.clip_eps), 1.0 + loss.clip_eps)
    first = ratio * advantage
    second = clipped * advantage
    sums.approx_kl += ratio - 1.0 - log_ratio
    sums.clipped += ratio != clipped
    sums.policy_loss -= min(first, second)
    # Where the clipped term is the smaller one, nothing depends on the ratio.
    return -first if first <= second else 0.0


cdef void categorical_loss(const Loss* loss, const f32* logits, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t n_actions,
                           const Rows* rows, f64 scale, f32* d_logits, Sums* sums) noexcept nogil:
    """Gradients (n, ld) by the logits, times `scale` = 1 / B, and the sums that metrics are made of."""
    cdef Py_ssize_t i, j
    cdef const f32* x
    cdef f32* d
    cdef f32 top
    cdef f64 total, log_total, entropy, d_log_prob, p, log_p
    for i in range(n):
        x = logits + i * ld
        d = d_logits + i * ld
        top = x[0]
        for j in range(1, n_actions):
            top = max(top, x[j])
        total = 0.0
        for j in range(n_actions):
            d[j] = expf(x[j] - top)
            total += d[j]
        log_total = log(total)
        entropy = 0.0
        for j in range(n_actions):
            log_p = x[j] - top - log_total
            d[j] = <f32>(d[j] / total)
            entropy -= d[j] * log_p
        j = rows.choices[i]
        d_log_prob = policy_term(loss, x[j] - top - log_total, rows.log_probs[i], rows.advantages[i], sums)
        sums.entropy += entropy
        for j in range(n_actions):
            p = d[j]
            log_p = x[j] - top - log_total
            d[j] = <f32>(scale * (
                d_log_prob * ((1.0 if j == rows.choices[i] else 0.0) - p)
                + loss.ent_coef * p * (log_p + entropy)))


cdef void gaussian_loss(const Loss* loss, const f32* mean, Py_ssize_t ld, Py_ssize_t n, Py_ssize_t act_dim,
                        const f32* log_std, const Rows* rows, f64 scale, f32* d_mean, f64* d_log_std,
                        Sums* sums) noexcept nogil:
    cdef Py_ssize_t i, j
    cdef f64 z, log_prob, d_log_prob, total = 0.0, entropy
    for j in range(act_dim):
        total += log_std[j]
    entropy = total + act_dim * (0.5 + LOG_SQRT_2PI)
    for i in range(n):
        log_prob = -total - act_dim * LOG_SQRT_2PI
        for j in range(act_dim):
            z = (rows.actions[i * act_dim + j] - mean[i * ld + j]) * exp(-<f64>log_std[j])
            log_prob -= 0.5 * z * z
        d_log_prob = policy_term(loss, log_prob, rows.log_probs[i], rows.advantages[i], sums)
        sums.entropy += entropy
        for j in range(act_dim):
            z = (rows.actions[i * act_dim + j] - mean[i * ld + j]) * exp(-<f64>log_std[j])
            d_mean[i * ld + j] = <f32>(scale * d_log_prob * z * exp(-<f64>log_std[j]))
            d_log_std[j] += scale * (d_log_prob * (z * z - 1.0) - loss.ent_coef)


cdef void value_loss(const Loss* loss, const f32* values, Py_ssize_t ld, Py_ssize_t n, const Rows* rows, f64 scale,
                     f32* d_values, Sums* sums) noexcept nogil:
    cdef Py_ssize_t i
    cdef f64 value, error, moved
    cdef bint inside
    for i in range(n):
        value = values[i * ld]
        inside = True
        if loss.clip_vf > 0.0:
            moved = value - rows.values[i]
            inside = fabs(moved) <= loss.clip_vf
            value = rows.values[i] + min(max(moved, -loss.clip_vf), loss.clip_vf)
        error = value - rows.returns[i]
        sums.value_loss += error * error
        d_values[i * ld] = <f32>(scale * loss.vf_coef * 2.0 * error) if inside else 0.0


cdef f64 norm_of(cf32_r x, Py_ssize_t n) noexcept nogil:
    """Euclidean norm, summed in float64 by sixteen."""
    cdef Py_ssize_t i, j
    cdef f64[16] sums
    cdef f64 total = 0.0
    for j in range(16):
        sums[j] = 0.0
    for i in range(0, n - 15, 16):
        for j in range(16):
            sums[j] += <f64>x[i + j] * x[i + j]
    for i in range(n & ~<Py_ssize_t>15, n):
        total += <f64>x[i] * x[i]
    for j in range(16):
        total += sums[j]
    return sqrt(total)


cdef void adam(f32_r p, cf32_r g, f32_r m, f32_r v, Py_ssize_t n, f32 clip, f32 step_size, f32 root2,
               f32 eps) noexcept nogil:
    """Kingma & Ba 2015 with PyTorch's order of operations: sqrt(v) / sqrt(1 - beta2^t) + eps."""
    cdef Py_ssize_t i
    cdef f32 gradient
    for i in range(n):
        gradient = g[i] * clip
        m[i] = m[i] + <f32>0.1 * (gradient - m[i])
        v[i] = <f32>0.999 * v[i] + <f32>0.001 * gradient * gradient
        p[i] = p[i] - step_size * m[i] / (sqrtf(v[i]) / root2 + eps)


cdef void rmsprop(f32_r p, cf32_r g, f32_r v, Py_ssize_t n, f32 clip, f32 step_size, f32 eps) noexcept nogil:
    cdef Py_ssize_t i
    cdef f32 gradient
    for i in range(n):
        gradient = g[i] * clip
        v[i] = <f32>0.99 * v[i] + <f32>0.01 * gradient * gradient
        p[i] = p[i] - step_size * gradient / (sqrtf(v[i]) + eps)


cdef void shuffle(i64* out, Py_ssize_t n, u64 key, u64 position) noexcept nogil:
    """The permutation that `Rng.permutation` gives at this key and position."""
    cdef Py_ssize_t i, j
    cdef Block x
    cdef u64 word
    for i in range(n):
        if i & 1:
            word = join(x.c, x.d)
        else:
            x = philox(key, position, DOMAIN_RNG)
            position += 1
            word = join(x.a, x.b)
        j = <Py_ssize_t>below(word, <u64>i + 1)
        out[i] = out[j]
        out[j] = i


cdef class NativeActorCritic:
    """A perceptron actor and a perceptron critic on one flat block of parameters.

    Parameters
    ----------
    parameters
        (P,) float32, C-contiguous and writeable: the block, kept and changed in place. Order: `log_std` (A) where
        Gaussian, the actor's weight and bias of each layer, the critic's.
    obs_dim, n_outputs
        D, and the actor's outputs: the number of actions, or A.
    hidden_sizes
        Widths of the hidden layers, at most 8, actor and critic alike.
    activation
        ``tanh`` or ``relu``.
    gaussian
        Whether actions are continuous.
    """

    cdef readonly cnp.ndarray parameters
    cdef readonly cnp.ndarray gradient
    cdef readonly dict moments
    cdef readonly i64 step
    cdef readonly Py_ssize_t obs_dim
    cdef readonly Py_ssize_t n_outputs
    cdef readonly bint gaussian
    cdef bint use_adam
    cdef Net actor
    cdef Net critic
    cdef Py_ssize_t obs_pad
    cdef list held
    cdef f32* x

    def __cinit__(self, cnp.ndarray parameters not None, obs_dim: int, n_outputs: int, hidden_sizes: list,
                  activation: str = "tanh", gaussian: bool = False, optimizer: str = "adam"):
        cdef Py_ssize_t at = 0
        self.parameters = parameters
        self.gradient = np.zeros_like(parameters)
        self.obs_dim, self.n_outputs, self.gaussian = obs_dim, n_outputs, gaussian
        self.use_adam = optimizer == "adam"
        names = ("exp_avg", "exp_avg_sq") if self.use_adam else ("square_avg",)
        self.moments = {name: np.zeros_like(parameters) for name in names}
        self.step = 0
        self.held = []
        self.obs_pad = padded(obs_dim)
        self.x = self.scratch(CHUNK * self.obs_pad)
        if gaussian:
            at = n_outputs
        at = self.build(&self.actor, [obs_dim, *hidden_sizes, n_outputs], activation == "tanh", at)
        at = self.build(&self.critic, [obs_dim, *hidden_sizes, 1], activation == "tanh", at)
        if at != cnp.PyArray_SIZE(parameters):
            raise ValueError(f"NativeActorCritic: parameters must hold {at} numbers, got {parameters.size}")

    cdef f32* scratch(self, Py_ssize_t n):
        """Zeros that start on a cache line."""
        cdef cnp.ndarray array = np.zeros(n + 16, np.float32)
        cdef size_t address = <size_t>cnp.PyArray_DATA(array)
        self.held.append(array)
        return <f32*>((address + 63) & ~<size_t>63)

    cdef Py_ssize_t build(self, Net* net, list sizes, bint tanh, Py_ssize_t at):
        cdef Layer* layer
        cdef f32* block = <f32*>cnp.PyArray_DATA(self.parameters)
        cdef f32* gradient = <f32*>cnp.PyArray_DATA(self.gradient)
        cdef int l
        net.n_layers = len(sizes) - 1
        net.tanh = tanh
        for l in range(net.n_layers):
            layer = &net.layers[l]
            layer.n_in, layer.n_out = sizes[l], sizes[l + 1]
            layer.in_pad, layer.out_pad = padded(layer.n_in), padded(layer.n_out)
            layer.weight, layer.d_weight = block + at, gradient + at
            at += layer.n_in * layer.n_out
            layer.bias, layer.d_bias = block + at, gradient + at
            at += layer.n_out
            layer.forward = self.scratch(layer.n_in * layer.out_pad)
            layer.backward = self.scratch(layer.n_out * layer.in_pad) if l else NULL
            layer.padded_bias = self.scratch(layer.out_pad)
            layer.out = self.scratch(CHUNK * layer.out_pad)
            layer.d_out = self.scratch(CHUNK * layer.out_pad)
            layer.d_padded = self.scratch(layer.n_out * layer.in_pad) if layer.in_pad != layer.n_in else NULL
        return at

    def outputs(self, cnp.ndarray obs not None):
        """Actor outputs (B, n_outputs) and values (B,) for observations (B, D)."""
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs, 0)
        cdef cnp.ndarray out = np.empty((n, self.n_outputs), np.float32)
        cdef cnp.ndarray values = np.empty(n, np.float32)
        with nogil:
            pack(&self.actor, False)
            pack(&self.critic, False)
            self.run(<const f32*>cnp.PyArray_DATA(obs), n, <f32*>cnp.PyArray_DATA(out),
                     <f32*>cnp.PyArray_DATA(values))
        return out, values

    cdef void run(self, const f32* obs, Py_ssize_t n, f32* out, f32* values) noexcept nogil:
        cdef Py_ssize_t start, i, rows
        cdef const f32* y
        cdef Py_ssize_t ld = self.actor.layers[self.actor.n_layers - 1].out_pad
        start = 0
        while start < n:
            rows = min(CHUNK, n - start)
            if out != NULL:
                y = forward(&self.actor, obs + start * self.obs_dim, self.obs_dim, rows)
                for i in range(rows):
                    memcpy(out + (start + i) * self.n_outputs, y + i * ld, self.n_outputs * sizeof(f32))
            y = forward(&self.critic, obs + start * self.obs_dim, self.obs_dim, rows)
            for i in range(rows):
                values[start + i] = y[i * PAD]
            start += rows

    cdef void gradients(self, const Loss* loss, const f32* obs, const i64* choices, const f32* actions,
                        const f32* log_probs, const f32* advantages, const f32* returns, const f32* values,
                        const i64* order, Py_ssize_t n, bint normalize, Sums* sums, f32* gathered) noexcept nogil:
        """Gradient of the minibatch rows `order` (NULL: the first n), into self.gradient."""
        cdef Py_ssize_t start, rows, i, k, a = self.n_outputs, d = self.obs_dim
        cdef f64 scale = 1.0 / n, mean = 0.0, deviation = 1.0, square = 0.0, shift
        cdef f32* log_probs_ = gathered
        cdef f32* advantages_ = gathered + CHUNK
        cdef f32* returns_ = gathered + 2 * CHUNK
        cdef f32* values_ = gathered + 3 * CHUNK
        cdef i64* choices_ = <i64*>(gathered + 4 * CHUNK)
        cdef f32* actions_ = gathered + 4 * CHUNK
        cdef Rows held
        cdef Layer* head = &self.actor.layers[self.actor.n_layers - 1]
        cdef Layer* value = &self.critic.layers[self.critic.n_layers - 1]
        cdef f64[64] d_log_std
        memset(cnp.PyArray_DATA(self.gradient), 0, cnp.PyArray_NBYTES(self.gradient))
        clear_padded(&self.actor)
        clear_padded(&self.critic)
        for k in range(64):
            d_log_std[k] = 0.0
        if normalize and n > 1:
            for i in range(n):
                mean += advantages[order[i] if order != NULL else i]
            mean *= scale
            for i in range(n):
                shift = advantages[order[i] if order != NULL else i] - mean
                square += shift * shift
            deviation = sqrt(square / (n - 1)) + 1e-8
        held = Rows(obs=self.x, choices=choices_, actions=actions_, log_probs=log_probs_, advantages=advantages_,
                    returns=returns_, values=values_)
        start = 0
        while start < n:
            rows = min(CHUNK, n - start)
            for i in range(rows):
                k = order[start + i] if order != NULL else start + i
                memcpy(self.x + i * self.obs_pad, obs + k * d, d * sizeof(f32))
                log_probs_[i] = log_probs[k]
                advantages_[i] = <f32>((advantages[k] - mean) / deviation)
                returns_[i] = returns[k]
                values_[i] = values[k]
                if self.gaussian:
                    memcpy(actions_ + i * a, actions + k * a, a * sizeof(f32))
                else:
                    choices_[i] = choices[k]
            forward(&self.actor, self.x, self.obs_pad, rows)
            forward(&self.critic, self.x, self.obs_pad, rows)
            if self.gaussian:
                gaussian_loss(loss, head.out, head.out_pad, rows, a, <f32*>cnp.PyArray_DATA(self.parameters),
                              &held, scale, head.d_out, d_log_std, sums)
            else:
                categorical_loss(loss, head.out, head.out_pad, rows, a, &held, scale, head.d_out, sums)
            value_loss(loss, value.out, value.out_pad, rows, &held, scale, value.d_out, sums)
            backward(&self.actor, self.x, self.obs_pad, rows)
            backward(&self.critic, self.x, self.obs_pad, rows)
            start += rows
        unpad(&self.actor)
        unpad(&self.critic)
        if self.gaussian:
            for k in range(a):
                (<f32*>cnp.PyArray_DATA(self.gradient))[k] = <f32>d_log_std[k]

    cdef void act_on(self, const f32* obs, Py_ssize_t n, const f32* noise, i64* choices, f32* actions) noexcept nogil:
        """Sample actions: argmax(logits + Gumbel noise), or mean + noise * std. The actor must be packed."""
        cdef Py_ssize_t start = 0, rows, i, j, best, a = self.n_outputs
        cdef const f32* y
        cdef const f32* log_std = <const f32*>cnp.PyArray_DATA(self.parameters)
        cdef const f32* z
        cdef Py_ssize_t ld = self.actor.layers[self.actor.n_layers - 1].out_pad
        while start < n:
            rows = min(CHUNK, n - start)
            y = forward(&self.actor, obs + start * self.obs_dim, self.obs_dim, rows)
            for i in range(rows):
                z = noise + (start + i) * a
                if self.gaussian:
                    for j in range(a):
                        actions[(start + i) * a + j] = y[i * ld + j] + z[j] * expf(log_std[j])
                else:
                    best = 0
                    for j in range(1, a):
                        if y[i * ld + j] + z[j] > y[i * ld + best] + z[best]:
                            best = j
                    choices[start + i] = best
            start += rows

    def act(self, cnp.ndarray obs not None, cnp.ndarray noise not None):
        """Sampled actions for observations (N, D) and noise (N, n_outputs): (N,) int64, or (N, A) float32."""
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs, 0)
        cdef cnp.ndarray out = np.empty((n, self.n_outputs), np.float32) if self.gaussian else np.empty(n, np.int64)
        with nogil:
            pack(&self.actor, False)
            self.act_on(<const f32*>cnp.PyArray_DATA(obs), n, <const f32*>cnp.PyArray_DATA(noise),
                        <i64*>cnp.PyArray_DATA(out), <f32*>cnp.PyArray_DATA(out))
        return out

    def rollout(self, stepper, Py_ssize_t n_steps, cnp.ndarray noise, cnp.ndarray obs, cnp.ndarray actions,
                cnp.ndarray rewards, cnp.ndarray terminated, cnp.ndarray truncated, cnp.ndarray episode_return,
                cnp.ndarray episode_length):
        """Act and step `n_steps` times in one go, filling (T, N, ...) arrays; obs is (T + 1, N, D) with row 0 given.

        Returns
        -------
        limits, reached
            (K, 2) int64 steps and environments that a time limit cut, and (K, D) what they truly led to.
        """
        cdef rlox_stepper* env = <rlox_stepper*>PyCapsule_GetPointer(stepper, RLOX_STEPPER_CAPSULE)
        cdef Py_ssize_t n = env.n, d = env.obs_dim, a = self.n_outputs, t, i, j, k = 0, most
        most = n * (n_steps // env.max_episode_steps + 1) if env.max_episode_steps else 0
        cdef cnp.ndarray limits = np.empty((most, 2), np.int64)
        cdef cnp.ndarray reached = np.empty((most, d), np.float32)
        cdef cnp.ndarray final_obs = np.empty((n, d), np.float32)
        cdef cnp.ndarray clipped = np.empty((n, a), np.float32)
        cdef f32* final_ = <f32*>cnp.PyArray_DATA(final_obs)
        cdef f32* clipped_ = <f32*>cnp.PyArray_DATA(clipped)
        cdef i64* limits_ = <i64*>cnp.PyArray_DATA(limits)
        cdef f32* reached_ = <f32*>cnp.PyArray_DATA(reached)
        cdef const f32* noise_ = <const f32*>cnp.PyArray_DATA(noise)
        cdef f32* obs_ = <f32*>cnp.PyArray_DATA(obs)
        cdef i64* choices = <i64*>cnp.PyArray_DATA(actions)
        cdef f32* continuous = <f32*>cnp.PyArray_DATA(actions)
        cdef f64* rewards_ = <f64*>cnp.PyArray_DATA(rewards)
        cdef u8* terminated_ = <u8*>cnp.PyArray_DATA(terminated)
        cdef u8* truncated_ = <u8*>cnp.PyArray_DATA(truncated)
        cdef f64* return_ = <f64*>cnp.PyArray_DATA(episode_return)
        cdef i64* length_ = <i64*>cnp.PyArray_DATA(episode_length)
        cdef const void* taken
        with nogil:
            pack(&self.actor, False)
            for t in range(n_steps):
                self.act_on(obs_ + t * n * d, n, noise_ + t * n * a, choices + t * n, continuous + t * n * a)
                taken = choices + t * n
                if self.gaussian:
                    for i in range(n):
                        for j in range(a):
                            clipped_[i * a + j] = min(max(continuous[(t * n + i) * a + j], env.act_low[j]),
                                                      env.act_high[j])
                    taken = clipped_
                env.step(env.self, taken, obs_ + (t + 1) * n * d, rewards_ + t * n, terminated_ + t * n,
                         truncated_ + t * n, final_, return_ + t * n, length_ + t * n)
                for i in range(n):
                    if truncated_[t * n + i]:
                        limits_[2 * k] = t
                        limits_[2 * k + 1] = i
                        memcpy(reached_ + k * d, final_ + i * d, d * sizeof(f32))
                        k += 1
        return limits[:k], reached[:k]

    def log_probs(self, cnp.ndarray obs not None, cnp.ndarray actions not None):
        """Log-probabilities (B,) of actions, and values (B,), for observations (B, D)."""
        outputs, values = self.outputs(obs)
        cdef cnp.ndarray y = outputs
        cdef Py_ssize_t n = cnp.PyArray_DIM(y, 0), a = self.n_outputs, i, j
        cdef cnp.ndarray out = np.empty(n, np.float32)
        cdef f32* out_ = <f32*>cnp.PyArray_DATA(out)
        cdef const f32* x
        cdef const f32* log_std = <const f32*>cnp.PyArray_DATA(self.parameters)
        cdef const i64* choices = <const i64*>cnp.PyArray_DATA(actions)
        cdef const f32* continuous = <const f32*>cnp.PyArray_DATA(actions)
        cdef f32 top
        cdef f64 total, z
        with nogil:
            for i in range(n):
                x = <const f32*>cnp.PyArray_DATA(y) + i * a
                if self.gaussian:
                    total = -a * LOG_SQRT_2PI
                    for j in range(a):
                        z = (continuous[i * a + j] - x[j]) * exp(-<f64>log_std[j])
                        total -= 0.5 * z * z + log_std[j]
                    out_[i] = <f32>total
                else:
                    top = x[0]
                    for j in range(1, a):
                        top = max(top, x[j])
                    total = 0.0
                    for j in range(a):
                        total += expf(x[j] - top)
                    out_[i] = <f32>(x[choices[i]] - top - log(total))
        return out, values

    def ppo(self, cnp.ndarray obs, cnp.ndarray actions, cnp.ndarray log_probs, cnp.ndarray advantages,
            cnp.ndarray returns, cnp.ndarray values, rng, *, n_epochs, batch_size, learning_rate, clip_eps, vf_coef,
            ent_coef, max_grad_norm, clip_vf, target_kl, normalize_advantages, eps=1e-5, a2c=False):
        """All epochs of an update; the means over its minibatches."""
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs, 0), start, rows, size = batch_size
        cdef int epoch, epochs = n_epochs
        cdef Loss loss = Loss(ppo=not a2c, clip_eps=clip_eps, vf_coef=vf_coef, ent_coef=ent_coef,
                              clip_vf=clip_vf or 0.0)
        cdef Sums sums
        cdef f64[6] totals
        cdef f64 norm, clip, limit = max_grad_norm or 0.0, kl_limit = 1.5 * (target_kl or 0.0), rate = learning_rate
        cdef f64 eps_ = eps
        cdef i64 count = 0
        cdef bint normalize = normalize_advantages, stop = False
        cdef cnp.ndarray order = np.empty(n, np.int64)
        cdef cnp.ndarray gathered = np.empty(CHUNK * (4 + 2 * max(1, self.n_outputs)), np.float32)
        cdef i64* at = <i64*>cnp.PyArray_DATA(order)
        cdef f32* g = <f32*>cnp.PyArray_DATA(self.gradient)
        cdef f32* p = <f32*>cnp.PyArray_DATA(self.parameters)
        cdef Py_ssize_t size_p = cnp.PyArray_SIZE(self.parameters)
        cdef cnp.ndarray m_ = self.moments["exp_avg"] if self.use_adam else None
        cdef cnp.ndarray v_ = self.moments["exp_avg_sq" if self.use_adam else "square_avg"]
        cdef f32* m = <f32*>cnp.PyArray_DATA(m_) if self.use_adam else NULL
        cdef f32* v = <f32*>cnp.PyArray_DATA(v_)
        cdef u64 key = rng.key, position = rng.position
        cdef const f32* obs_ = <const f32*>cnp.PyArray_DATA(obs)
        cdef const void* actions_ = cnp.PyArray_DATA(actions)
        cdef const f32* log_probs_ = <const f32*>cnp.PyArray_DATA(log_probs)
        cdef const f32* advantages_ = <const f32*>cnp.PyArray_DATA(advantages)
        cdef const f32* returns_ = <const f32*>cnp.PyArray_DATA(returns)
        cdef const f32* values_ = <const f32*>cnp.PyArray_DATA(values)
        memset(totals, 0, sizeof(totals))
        with nogil:
            for epoch in range(epochs):
                shuffle(at, n, key, position)
                position += <u64>(n + 1) // 2
                start = 0
                while start < n:
                    rows = min(size, n - start)
                    pack(&self.actor, True)
                    pack(&self.critic, True)
                    memset(&sums, 0, sizeof(sums))
                    self.gradients(&loss, obs_, <const i64*>actions_, <const f32*>actions_, log_probs_, advantages_,
                                   returns_, values_, at + start, rows, normalize, &sums,
                                   <f32*>cnp.PyArray_DATA(gathered))
                    if kl_limit > 0.0 and count and sums.approx_kl / rows > kl_limit:
                        stop = True
                        break
                    norm = norm_of(g, size_p)
                    clip = 1.0
                    if limit > 0.0:
                        clip = limit / (norm + 1e-6)
                        clip = 1.0 if clip > 1.0 else clip
                    self.step += 1
                    if self.use_adam:
                        adam(p, g, m, v, size_p, <f32>clip, <f32>(rate / (1.0 - 0.9 ** self.step)),
                             <f32>sqrt(1.0 - 0.999 ** self.step), <f32>eps_)
                    else:
                        rmsprop(p, g, v, size_p, <f32>clip, <f32>rate, <f32>eps_)
                    totals[0] += sums.policy_loss / rows
                    totals[1] += sums.value_loss / rows
                    totals[2] += sums.entropy / rows
                    totals[3] += sums.approx_kl / rows
                    totals[4] += sums.clipped / rows
                    totals[5] += norm
                    count += 1
                    start += rows
                if stop:
                    break
        names = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "grad_norm")
        return {name: totals[k] / count for k, name in enumerate(names)}
