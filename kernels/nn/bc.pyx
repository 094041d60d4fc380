"""The native update of behavioural cloning, as defined by `rlox.algorithms.BC.update`, for a plain perceptron."""

cimport numpy as cnp
from libc.math cimport exp, log, tanh
from libc.string cimport memcpy

from rlox.kernels.checks cimport as_flag
from rlox.kernels.nn.layers cimport (
    CHUNK, Layer, Net, backward, build, forward, given, last_of, number, pack, scratch, size_of, unpad,
)
from rlox.kernels.signals cimport check_signals, watching
from rlox.kernels.types cimport f32, f64, i64
from rlox.kernels.nn.core cimport BlockLearner, Weights, clear, move

cnp.import_array()


cdef class NativeBC(BlockLearner):
    """Behavioural cloning: a perceptron whose outputs give the action by tanh, or action probabilities by softmax.

    Parameters and errors are those of `NativeSAC`, with only one block, except for:

    Parameters
    ----------
    policy
        (P,) float32: the perceptron.
    obs_dim, n_outputs
        D, and the number of outputs: A, or the number of actions.
    discrete
        Whether actions are discrete, one of `n_outputs`.
    """

    cdef readonly Py_ssize_t n_outputs
    cdef readonly bint discrete
    cdef Weights weights
    cdef Net actor
    cdef f32* x             # (CHUNK, obs_pad)

    def __cinit__(self, policy, obs_dim, n_outputs, hidden_sizes, activation: str = "relu", discrete: bool = False):
        cdef str where = "NativeBC"
        self.n_outputs = self.begin(where, obs_dim, n_outputs, "n_outputs", hidden_sizes, activation)
        self.discrete = as_flag(discrete, where, "discrete")
        widths = [self.obs_dim, *self.hidden, self.n_outputs]
        self.hold(where, {"policy": policy}, {}, {"policy": size_of(widths)})
        self.weights = self.weights_of("policy")
        build(&self.actor, widths, self.tanh, self.weights.p, self.weights.g, 0, self.held)
        self.x = scratch(self.held, CHUNK * self.obs_pad)

    cdef dict steps(self):
        return {"policy": self.weights.step}

    cdef void set_steps(self, dict steps):
        self.weights.step = steps["policy"]

    cdef void add_squared_error(self, const f32* actions, Py_ssize_t rows, f64 share, f64* loss) noexcept nogil:
        """Add the squared distance of the outputs' actions to `loss`, and write its gradient."""
        cdef Layer* head = last_of(&self.actor)
        cdef Py_ssize_t i, j, a = self.n_outputs, ld = head.out_pad
        cdef f64 action, error
        for i in range(rows):
            for j in range(a):
                action = tanh(head.out[i * ld + j])
                error = action - actions[i * a + j]
                loss[0] += share / a * error * error
                head.d_out[i * ld + j] = <f32>(2.0 * share / a * error * (1.0 - action * action))

    cdef void classify(self, const i64* labels, Py_ssize_t rows, f64 share, f64* loss, f64* accuracy) noexcept nogil:
        """Like `add_squared_error`, for cross-entropy. Also add the share of rows whose most likely action is right."""
        cdef Layer* head = last_of(&self.actor)
        cdef Py_ssize_t i, j, best
        cdef const f32* y
        cdef f32* d_y
        cdef f64 total
        for i in range(rows):
            y, d_y = head.out + i * head.out_pad, head.d_out + i * head.out_pad
            best, total = 0, 0.0
            for j in range(1, self.n_outputs):
                if y[j] > y[best]:
                    best = j
            for j in range(self.n_outputs):
                total += exp(<f64>y[j] - y[best])
            for j in range(self.n_outputs):
                d_y[j] = <f32>(share * (exp(<f64>y[j] - y[best]) / total - (j == labels[i])))
            loss[0] += share * (log(total) + y[best] - y[labels[i]])
            accuracy[0] += share * (best == labels[i])

    def update(self, obs, actions, *, learning_rate, max_grad_norm=None):
        """Update the policy once, as defined by `rlox.algorithms.BC.update`.

        Parameters
        ----------
        obs
            (B, D) float32.
        actions
            (B, A) float32, scaled to [-1, 1]; or (B,) int64.
        learning_rate, max_grad_norm
            As in `rlox.config.BCConfig`, with schedules resolved; None if off.

        Returns
        -------
        dict
            ``policy_loss grad_norm``, and for discrete actions ``accuracy``. NaN in the data or the weights makes the
            first two NaN.
        """
        cdef str where = "NativeBC.update"
        cdef f64 rate = number(learning_rate, 0.0, where, "learning_rate")
        cdef f64 limit = 0.0 if max_grad_norm is None else number(max_grad_norm, 0.0, where, "max_grad_norm")
        cdef cnp.ndarray obs_ = self.rows_of(obs, where)
        cdef Py_ssize_t n = cnp.PyArray_DIM(obs_, 0), start = 0, rows, i, d = self.obs_dim
        cdef cnp.ndarray actions_
        cdef f64 loss = 0.0, accuracy = 0.0, norm = 0.0
        if n < 1:
            raise ValueError(f"{where}: obs must have at least one row, got none")
        if self.discrete:
            actions_ = given(actions, cnp.NPY_INT64, "int64", (n,), where, "actions")
            if actions_.min() < 0 or actions_.max() >= self.n_outputs:
                raise ValueError(f"{where}: actions must be in [0, {self.n_outputs}), got {actions_.min()} to "
                                 f"{actions_.max()}")
        else:
            actions_ = given(actions, cnp.NPY_FLOAT32, "float32", (n, self.n_outputs), where, "actions")
        cdef const f32* from_obs = <const f32*>cnp.PyArray_DATA(obs_)
        cdef const void* from_actions = cnp.PyArray_DATA(actions_)
        with self.lock:
            self.watch = watching()
            with nogil:
                pack(&self.actor, True)
                clear(&self.weights, &self.actor, 1)
                while start < n:
                    check_signals(&self.watch)
                    rows = min(<Py_ssize_t>CHUNK, n - start)
                    for i in range(rows):
                        memcpy(self.x + i * self.obs_pad, from_obs + (start + i) * d, d * sizeof(f32))
                    forward(&self.actor, self.x, self.obs_pad, rows)
                    if self.discrete:
                        self.classify(<const i64*>from_actions + start, rows, 1.0 / n, &loss, &accuracy)
                    else:
                        self.add_squared_error(<const f32*>from_actions + start * self.n_outputs, rows, 1.0 / n, &loss)
                    backward(&self.actor, self.x, self.obs_pad, rows)
                    start += rows
                unpad(&self.actor)
                norm = move(&self.weights, rate, limit)
        return {"policy_loss": loss, "grad_norm": norm, **({"accuracy": accuracy} if self.discrete else {})}
