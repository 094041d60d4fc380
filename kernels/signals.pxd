"""Checks for pending signals every few milliseconds, so that Ctrl-C and SIGTERM need not wait until long work ends."""

from cpython.exc cimport PyErr_CheckSignals

from rlox.kernels.types cimport f64, i64

cdef extern from "<time.h>":
    cdef struct timespec:
        i64 tv_sec
        long tv_nsec
    int timespec_get(timespec* to, int base) nogil
    int TIME_UTC


cdef struct Watch:
    bint off        # True outside the main thread, where handlers never run and waiting for the GIL is pointless
    f64 checked_at      # time of the last check, in seconds


cdef inline f64 now() noexcept nogil:
    cdef timespec t
    timespec_get(&t, TIME_UTC)
    return <f64>t.tv_sec + 1e-9 * t.tv_nsec


cdef inline Watch watching() noexcept nogil:
    """Return a watch for work that starts now, to be passed to `check_signals`."""
    return Watch(off=False, checked_at=now())


cdef inline int handle(Watch* watch) except -1:
    from threading import get_ident, main_thread

    watch.off = get_ident() != main_thread().ident
    if not watch.off:
        PyErr_CheckSignals()
    return 0


cdef inline int check_signals(Watch* watch) except -1 nogil:
    """Run the handlers of pending signals and raise what they raise. Takes 30 ns, except once every 5 ms.

    Call it only while everything that other code can see is consistent, since the caller may be aborted here.
    """
    cdef f64 time
    if watch.off:
        return 0
    time = now()
    if watch.checked_at <= time < watch.checked_at + 0.005:
        return 0
    watch.checked_at = time
    with gil:
        handle(watch)
    return 0
