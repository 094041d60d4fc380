"""Stores that bypass the cache, for results larger than it: the memory they replace is not read first."""

cdef extern from *:
    """
    #ifndef RLOX_STREAM
    #define RLOX_STREAM
    #include <string.h>
    #if defined(__SSE2__)
    #include <emmintrin.h>
    static inline void rlox_stream(double *to, const double *from, Py_ssize_t n) {
        for (Py_ssize_t i = 0; i < n; i += 2) _mm_stream_pd(to + i, _mm_load_pd(from + i));
    }
    #define rlox_stream_end _mm_sfence
    #else
    static inline void rlox_stream(double *to, const double *from, Py_ssize_t n) {
        memcpy(to, from, (size_t)n * sizeof(double));
    }
    #define rlox_stream_end() ((void)0)
    #endif
    #endif
    """
    # Copy n numbers, a multiple of 2; both addresses are multiples of 16 bytes.
    void stream "rlox_stream"(double* to, const double* source, Py_ssize_t n) noexcept nogil
    # Call this after the last `stream`.
    void stream_end "rlox_stream_end"() noexcept nogil
