"""Common parts of native learners: blocks of parameters trained in place, an optimiser for each, and their state."""

import threading

import numpy as np

cimport numpy as cnp
from libc.math cimport sqrt
from libc.string cimport memset

from rlox.kernels.checks cimport as_index, check_out, share_memory
from rlox.kernels.nn.layers cimport (
    MAX_LAYERS, Net, adam, bounded, clear_padded, given, lerp, norm_of, number, padded, rmsprop,
)
from rlox.kernels.types cimport f32, f64, i64

cnp.import_array()

MAX_HIDDEN = MAX_LAYERS - 1  # maximum number of hidden layers of a native learner
# Moments by PyTorch's names.
ADAM = ("exp_avg", "exp_avg_sq")
RMSPROP = ("square_avg",)

cdef enum:
    SWEEP = 4096  # parameters that the optimiser and the target update process at a time, to stay in the cache


cdef f64 move(Weights* w, f64 rate, f64 limit, f32* target=NULL, f64 tau=0.0) noexcept nogil:
    """Take an optimiser step with the gradient clipped to norm `limit` (0: not clipped); return the norm before.

    Then move `target`, unless NULL, towards the new parameters by the fraction tau, while both are in the cache.
    """
    cdef Py_ssize_t at = 0, n
    cdef f64 norm = norm_of(w.g, w.size), clip = 1.0
    if limit > 0.0:
        clip = bounded(limit / (norm + 1e-6), 0.0, 1.0)
    w.step += 1
    cdef f32 step_size = <f32>(rate / (1.0 - 0.9 ** <f64>w.step))
    cdef f32 root2 = <f32>sqrt(1.0 - 0.999 ** <f64>w.step)
    while at < w.size:
        n = min(<Py_ssize_t>SWEEP, w.size - at)
        if w.m == NULL:
            rmsprop(w.p + at, w.g + at, w.v + at, n, <f32>clip, <f32>rate, <f32>w.eps)
        else:
            adam(w.p + at, w.g + at, w.m + at, w.v + at, n, <f32>clip, step_size, root2, <f32>w.eps)
        if target != NULL and at < w.followed:
            lerp(target + at, w.p + at, min(n, w.followed - at), <f32>tau)
        at += n
    return norm


cdef void clear(Weights* w, Net* nets, int n_nets) noexcept nogil:
    """Set the gradients of these networks to zero."""
    cdef int k
    memset(w.g, 0, w.size * sizeof(f32))
    for k in range(n_nets):
        clear_padded(&nets[k])


cdef dict moments_out(dict moments, i64 step):
    """Return copies of an optimiser's moments (P,) and its step count (), in the form of `FlatOptimizer.state`."""
    return {**{name: array.copy() for name, array in moments.items()}, "step": np.float32(step)}


cdef i64 moments_fit(dict moments, object state, str where) except -1:
    """Raise unless `state` has the form that `moments_out` returns for `moments`; return the step count."""
    if set(state) != {*moments, "step"}:
        raise ValueError(f"{where}: state must hold {', '.join(moments)} and step, got {sorted(state)}")
    for name, array in moments.items():
        if np.shape(state[name]) != array.shape:
            raise ValueError(
                f"{where}: {name} must have shape {array.shape}, got {np.shape(state[name])}; "
                "the policy differs from the one that was saved"
            )
    return int(state["step"])


cdef i64 moments_in(dict moments, object state, str where) except -1:
    """Restore a state from `moments_out`; return the step count."""
    cdef i64 step = moments_fit(moments, state, where)
    for name, array in moments.items():
        array[:] = state[name]
    return step


cdef f32* data_of(cnp.ndarray array) except NULL:
    return <f32*>cnp.PyArray_DATA(array)


cdef Weights weights_on(cnp.ndarray block, cnp.ndarray gradient, dict moments, f64 eps) except *:
    cdef Weights w
    last, *first = reversed(moments.values())
    w.size, w.eps, w.step = cnp.PyArray_SIZE(block), eps, 0
    w.followed = w.size
    w.p, w.g, w.m, w.v = data_of(block), data_of(gradient), NULL, data_of(last)
    if first:
        w.m = data_of(first[0])
    return w


cdef class Learner:
    """Networks on blocks of parameters, which are kept and changed in place. Other arguments are not kept.

    Calls from several threads wait for each other.
    """

    cdef Py_ssize_t begin(self, str where, obs_dim, width, str label, hidden_sizes, activation) except -1:
        """Check and store the arguments that every learner takes; return `width`, which errors call `label`."""
        cdef Py_ssize_t found
        obs_dim, width = as_index(obs_dim, where, "obs_dim"), as_index(width, where, label)
        self.hidden = [as_index(size, where, "hidden_sizes") for size in hidden_sizes]
        if min(self.hidden, default=1) < 1:
            raise ValueError(f"{where}: hidden_sizes must be >= 1, got {self.hidden}")
        if len(self.hidden) > MAX_HIDDEN:
            raise ValueError(f"{where}: hidden_sizes must have at most {MAX_HIDDEN} widths, got {len(self.hidden)}")
        if activation not in ("tanh", "relu"):
            raise ValueError(f"{where}: activation must be tanh or relu, got {activation!r}")
        if obs_dim < 1 or width < 1:
            raise ValueError(f"{where}: obs_dim and {label} must be >= 1, got {obs_dim} and {width}")
        self.obs_dim, self.tanh, found = obs_dim, activation == "tanh", width
        self.obs_pad = padded(self.obs_dim)
        self.held = []
        self.lock = threading.Lock()
        return found

    cdef cnp.ndarray rows_of(self, object obs, str where):
        """Return `obs`, (B, D) float32, after checking it."""
        shape = np.shape(obs)
        n = shape[0] if len(shape) == 2 else "B"
        return given(obs, cnp.NPY_FLOAT32, "float32", (n, self.obs_dim), where, "obs")


cdef class FlatLearner(Learner):
    """A learner with one block.

    Attributes
    ----------
    parameters, gradient
        (P,) float32: the block, and the unclipped gradient of the last batch in the same order.
    moments
        The optimiser's (P,) float32 arrays by their names in PyTorch.
    """

    cdef int hold(self, parameters, size, str where, f64 eps, bint adam=True) except -1:
        """Check and keep the block."""
        check_out(parameters, cnp.NPY_FLOAT32, "float32", (size,), where, "parameters")
        self.parameters, self.gradient = parameters, np.zeros_like(parameters)
        self.moments = {name: np.zeros_like(parameters) for name in (ADAM if adam else RMSPROP)}
        self.weights = weights_on(self.parameters, self.gradient, self.moments, eps)
        return 0

    @property
    def step(self):
        """Optimiser steps taken."""
        return self.weights.step

    def get_state(self) -> dict:
        """Return copies of the optimiser's moments (P,) and step count (), in the form of `FlatOptimizer.state`."""
        with self.lock:
            return moments_out(self.moments, self.weights.step)

    def set_state(self, state) -> None:
        """Restore a state from `get_state`. Raises ValueError if the optimiser or size differs."""
        with self.lock:
            self.weights.step = moments_in(self.moments, state, f"{type(self).__name__}.set_state")

    def apply(self, learning_rate, max_grad_norm=None) -> float:
        """Take an optimiser step with `gradient`, clipped to the global norm; return the norm before clipping."""
        cdef str where = f"{type(self).__name__}.apply"
        cdef f64 rate = number(learning_rate, 0.0, where, "learning_rate")
        cdef f64 limit = 0.0 if max_grad_norm is None else number(max_grad_norm, 0.0, where, "max_grad_norm")
        with self.lock:
            return move(&self.weights, rate, limit)


cdef class BlockLearner(Learner):
    """A learner with several blocks, each with its own Adam optimiser.

    Attributes
    ----------
    parameters, gradients, moments
        By block: the given arrays, the unclipped gradients of the last update, and Adam's arrays by their names in
        PyTorch (betas 0.9 and 0.999, eps 1e-8).
    """

    cdef int hold(self, str where, dict trained, dict others, dict sizes) except -1:
        """Check and keep the blocks in `trained` and `others`; those missing in `sizes` must have one number."""
        seen = {}
        for name, block in {**trained, **others}.items():
            check_out(block, cnp.NPY_FLOAT32, "float32", (sizes.get(name, 1),), where, name)
            for other, before in seen.items():
                if share_memory(block, before):
                    raise ValueError(f"{where}: {name} must share no memory with {other}, got overlapping arrays")
            seen[name] = block
        self.parameters = trained
        self.gradients = {name: np.zeros_like(block) for name, block in trained.items()}
        self.moments = {
            name: {moment: np.zeros_like(block) for moment in ADAM} for name, block in trained.items()
        }
        return 0

    cdef Weights weights_of(self, str name) except *:
        return weights_on(self.parameters[name], self.gradients[name], self.moments[name], 1e-8)

    cdef dict steps(self):
        """Return the number of optimiser steps taken, by block."""
        raise NotImplementedError

    cdef void set_steps(self, dict steps):
        """Restore the result of `steps`."""

    def get_state(self) -> dict:
        """Return, by block, copies of the moments (P,) and step count (), in the form of `FlatOptimizer.state`."""
        with self.lock:
            steps = self.steps()
            return {name: moments_out(self.moments[name], steps[name]) for name in self.moments}

    def set_state(self, state) -> None:
        """Restore a state from `get_state`. If blocks, moments or sizes differ, raise ValueError and change nothing."""
        where = f"{type(self).__name__}.set_state"
        if set(state) != set(self.moments):
            raise ValueError(f"{where}: state must hold {', '.join(self.moments)}, got {sorted(state)}")
        for name, moments in self.moments.items():
            moments_fit(moments, state[name], where)
        with self.lock:
            self.set_steps({name: moments_in(self.moments[name], state[name], where) for name in self.moments})
