"""Prefetching of memory that will be read a few records later."""

cdef extern from *:
    """
    #ifndef RLOX_PREFETCH
    #if defined(__GNUC__) || defined(__clang__)
    #define RLOX_PREFETCH(p) __builtin_prefetch((const void *)(p), 0, 3)
    #else
    #define RLOX_PREFETCH(p) ((void)(p))
    #endif
    #endif
    """
    void prefetch "RLOX_PREFETCH"(const void* address) noexcept nogil
