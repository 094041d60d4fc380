"""Compare each kernel with the Python functions it replaces, and record these: ``python tests/record_kernels.py``.

Run it after an edit of a function that `rlox.compiled.shadows.KERNELS` names, when the kernel computes the same again.
It writes `rlox/compiled/fingerprints.py` if the tests below pass; otherwise that file is not changed. Run it again to
resolve a conflict in that file.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "rlox" / "compiled" / "fingerprints.py"
HEAD = '''"""The functions that kernels stand for, as they were when the kernels were last compared with them.

Written by ``python tests/record_kernels.py``; see `rlox.compiled.shadows`.
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


def record() -> int:
    """Run the comparison, write the record and return the exit code."""
    before = RECORD.read_text(encoding="utf-8") if RECORD.exists() else ""
    # A record with conflict markers cannot be imported.
    RECORD.write_text(HEAD + "}\n", encoding="utf-8")
    try:
        from rlox.compiled.shadows import present

        text = HEAD + "".join(f'    "{name}": "{value}",\n' for name, value in present().items()) + "}\n"
    except BaseException:
        RECORD.write_text(before, encoding="utf-8")
        raise
    RECORD.write_text(text, encoding="utf-8")
    if text == before:
        print("nothing that a kernel stands for has changed since it was compared")
        return 0
    code = 1
    try:
        # Kernels run only if the record allows it.
        code = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *TESTS], cwd=ROOT, check=False).returncode
    finally:
        if code:
            RECORD.write_text(before, encoding="utf-8")
    old, new = ({line for line in one.splitlines() if line.startswith("    ")} for one in (before, text))
    changed = sorted({line.split('"')[1] for line in old ^ new})
    word = "not recorded, for the comparison failed" if code else "compared and recorded"
    print(f"{word}: {', '.join(changed)}")
    return code


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(record())
