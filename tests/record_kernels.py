"""Compare each kernel with the source files it stands for, and record these: ``python tests/record_kernels.py``.

Run it after an edit of a file that `rlox.compiled.guard.KERNELS` lists, when the kernel computes the same again. It
writes `rlox/compiled/record.py` if the tests below pass; otherwise that file is not changed. Run it again to resolve a
conflict in that file. After an edit of comments and the like, it writes the record without the tests; with ``--quick``
it always does, and leaves the comparison to the whole test suite.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "rlox" / "compiled" / "record.py"
HEAD = '''"""Hashes of the source files that kernels stand for, from the last comparison: of all text, and of the code.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.guard`.
"""

COMPARED: dict[str, str] = {
'''
# Tests that compare the numbers of a kernel with PyTorch, or its rounds with the loop in Python.
TESTS = (
    "tests/kernels/test_policy_gradient.py",
    "tests/kernels/test_native_dqn.py",
    "tests/kernels/test_twin_critics.py",
    "tests/algorithms/test_native_offline.py",
    "tests/algorithms/test_mappo.py::test_the_kernel_learns_what_pytorch_does",
    "tests/test_backends.py",
)


def read_record(text: str) -> dict[str, str]:
    """Return the hash of the code of each file in a record; conflict markers in it are skipped."""
    lines = [line.split('"') for line in text.splitlines() if line.startswith('    "')]
    return {module: hashes.split()[1] for _, module, _, hashes, _ in lines}


def record(quick: bool) -> int:
    """Run the comparison, write the record and return the exit code."""
    before = RECORD.read_text(encoding="utf-8") if RECORD.exists() else ""
    # A record with conflict markers cannot be imported.
    RECORD.write_text(HEAD + "}\n", encoding="utf-8")
    try:
        from rlox.compiled.guard import compute_hashes

        text = HEAD + "".join(f'    "{name}": "{value}",\n' for name, value in compute_hashes().items()) + "}\n"
    except BaseException:
        RECORD.write_text(before, encoding="utf-8")
        raise
    RECORD.write_text(text, encoding="utf-8")
    old, new = read_record(before), read_record(text)
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if not changed:
        print("no code that a kernel stands for has changed since it was compared")
        return 0
    code = 0
    if not quick:
        code = 1
        try:
            # Kernels run only if the record allows it.
            code = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", *TESTS], cwd=ROOT, check=False
            ).returncode
        finally:
            if code:
                RECORD.write_text(before, encoding="utf-8")
    word = "recorded without a comparison" if quick else "compared and recorded"
    print(f"{'not recorded, for the comparison failed' if code else word}: {', '.join(changed)}")
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(record("--quick" in sys.argv[1:]))
