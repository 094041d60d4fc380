"""Long work looks every few milliseconds whether a signal is pending, so that Ctrl-C and SIGTERM need not wait for it."""

from cpython.exc cimport PyErr_CheckSignals

from rlox.kernels.types cimport f64, i64

cdef extern from "<time.h>":
    cdef struct timespec:
        i64 tv_sec
        long tv_nsec
    int timespec_get(timespec* to, int base) nogil
    int TIME_UTC


cdef struct Watch:
    bint off        # handlers run in the main thread only, and work in others need not wait for the GIL
    f64 looked      # seconds


cdef inline f64 now() noexcept nogil:
    cdef timespec t
    timespec_get(&t, TIME_UTC)
    return <f64>t.tv_sec + 1e-9 * t.tv_nsec


cdef inline Watch watching() noexcept nogil:
    """To be passed to `look` by the work that begins now."""
    return Watch(off=False, looked=now())


cdef inline int handle(Watch* watch) except -1:
    from threading import get_ident, main_thread

    watch.off = get_ident() != main_thread().ident
    if not watch.off:
        PyErr_CheckSignals()
    return 0


cdef inline int look(Watch* watch) except -1 nogil:
    """Raise what the handler of a pending signal raises; 30 ns, but for once in 5 ms.

    To be called where all that others can see is whole: what calls it ends there.
    """
    cdef f64 time
    if watch.off:
        return 0
    time = now()
    if watch.looked <= time < watch.looked + 0.005:
        return 0
    watch.looked = time
    with gil:
        handle(watch)
    return 0
