"""Which x86-64 level the processor and the operating system support."""

cdef extern from *:
    """
    #if (defined(__x86_64__) || defined(_M_X64)) && defined(__GNUC__)
    /* libgcc and compiler-rt also check (XGETBV) whether the operating system saves the wide registers. */
    static int rlox_cpu_level(void) {
        __builtin_cpu_init();
        if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
              && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")))
            return 2;
        if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
              && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq")
              && __builtin_cpu_supports("avx512vl")))
            return 3;
        return 4;
    }
    #else
    static int rlox_cpu_level(void) { return 2; }
    #endif
    """
    int rlox_cpu_level()


def cpu_level() -> int:
    """Return N of the highest x86-64-vN level that this machine supports, 2 to 4 (2 on other architectures)."""
    return rlox_cpu_level()
