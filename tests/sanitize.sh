#!/usr/bin/env bash
# Runs the tests of the kernels with AddressSanitizer and UBSan. Usage: tests/sanitize.sh [PYTHON] [pytest arguments]
# Builds in place with all checks enabled, and restores the release build at the end.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-.venv/bin/python}
shift || true
trap '"$python" setup.py -q build_ext --inplace' EXIT
RLOX_CYTHON_DEBUG=1 RLOX_SANITIZE=address,undefined "$python" setup.py -q build_ext --inplace
# Python leaks on purpose at exit. Allocations of impossible size must be a MemoryError, which tests expect.
LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)" \
    ASAN_OPTIONS=detect_leaks=0:halt_on_error=1:allocator_may_return_null=1 \
    UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1 \
    "$python" -m pytest -q -p no:cacheprovider -p no:faulthandler "${@:-tests/kernels}"
