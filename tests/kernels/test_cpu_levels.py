"""Every CPU level that this machine supports gives the same numbers, and a wrong choice is a clear error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlox.kernels

PROGRAM = """
import hashlib, json, sys
import numpy as np
import rlox.kernels
from rlox.kernels.advantage import gae
from rlox.kernels.envs import NATIVE_ENVS, vec_env
from rlox.kernels import rng

def digest(*arrays):
    h = hashlib.sha256()
    for a in arrays:
        h.update(np.ascontiguousarray(a).tobytes())
    return h.hexdigest()

result = {"level": rlox.kernels.CPU_LEVEL,
          "files": [m.__file__ for m in (gae, vec_env, rng)]}
r = rng.Rng(7)
for env_id in NATIVE_ENVS:
    env = vec_env.VecEnv(67, 3, env_id)
    seen = [env.reset_all()]
    for _ in range(300 if env.max_episode_steps < 300 else env.max_episode_steps + 20):
        a = r.integers(env.n_actions, 67) if env.discrete else r.normal((67, 1)) * np.float32(3)
        step = env.step_all(a)
        seen += [step[k] for k in sorted(step)] + [env.get_state()["state"]]
    seen += [v for _, v in sorted(env.get_state().items())]
    result[env_id] = digest(*seen)
result["rng"] = digest(
    r.uniform(1001), r.uniform(1001, dtype=np.float64), r.normal(1001), r.gumbel(1001),
    r.normal(1001, dtype=np.float64), r.integers(10**12, 1001), r.permutation(1001))
x = r.normal((4, 50, 37), dtype=np.float64)
d = r.uniform((2, 50, 37)) < 0.1
rows, flat = [], []
for f in (gae.compute_gae_batched, gae.compute_gae_batched_f32):
    for out, m in ((rows, lambda a: a), (flat, lambda a: np.ascontiguousarray(a.T).ravel())):
        out += f(m(x[0]), m(x[1]), m(d[0]), x[2, 0], 50, 0.99, 0.95,
                 truncated=m(d[1]), next_values=m(x[3]))
result["gae"] = digest(*rows)
result["close"] = np.concatenate(flat).tolist()  # the scan along a trajectory rounds by level
print(json.dumps(result))
"""


def run(code, **env):
    """Run code outside the checkout, so that only the installed package is found."""
    env = {k: v for k, v in os.environ.items() if k != "RLOX_CPU_LEVEL"} | env
    return subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_all_levels_give_the_same_bits():
    results = []
    for level in (2, 3, 4):
        done = run(PROGRAM, RLOX_CPU_LEVEL=str(level))
        if done.returncode and "RLOX_CPU_LEVEL must be" in done.stderr:
            continue  # this machine or this build has no such level
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    best = json.loads(run(PROGRAM).stdout)
    assert best["level"] == max(result["level"] for result in results)
    for result in results:
        for file in result["files"]:
            assert (f"_v{result['level']}" in file) == (result["level"] > 2)
        np.testing.assert_allclose(result["close"], best["close"], rtol=1e-5, atol=1e-5)
        for key in best.keys() - {"level", "files", "close"}:
            assert result[key] == best[key], f"level {result['level']}: {key}"


@pytest.mark.parametrize("value", ["1", "5", "x86-64-v3", "-2"])
def test_an_unknown_level_is_an_error(value):
    done = run("import rlox.kernels", RLOX_CPU_LEVEL=value)
    assert f"ValueError: rlox.kernels: RLOX_CPU_LEVEL must be 2, 3 or 4 (for x86-64-vN), got '{value}'" in (done.stderr)


def test_an_unsupported_level_is_an_error_with_a_remedy():
    if rlox.kernels.CPU_LEVEL == 4:
        pytest.skip("this machine supports every level")
    done = run("import rlox.kernels", RLOX_CPU_LEVEL="4")
    assert "ValueError: rlox.kernels: RLOX_CPU_LEVEL must be" in done.stderr
    assert "unset it" in done.stderr


def test_importing_the_folder_kernels_does_nothing():
    # With the checkout on sys.path, `import kernels` must do nothing, since transformers tries that name.
    root = os.path.dirname(os.path.dirname(rlox.kernels.__file__))
    code = f"import sys; sys.path.insert(0, {root!r}); import kernels; print(dir(kernels))"
    done = run(code)
    assert done.returncode == 0, done.stderr
    assert "CPU_LEVEL" not in done.stdout


OLDER = """
import sys, types
cpu = types.ModuleType("rlox.kernels._cpu")
cpu.cpu_level = lambda: 2
sys.modules["rlox.kernels._cpu"] = cpu
import rlox.kernels
print(rlox.kernels.CPU_LEVEL)
"""


def test_a_build_for_a_newer_machine_is_an_error_on_an_older_one():
    kernels = Path(rlox.kernels.__file__).parent
    built = [level for level in ("", "_v3", "_v4") if any((kernels / level).glob("rng*.so"))]
    done = run(OLDER)
    if "" in built:
        assert done.stdout == "2\n"
    else:
        assert f"ImportError: rlox.kernels: these kernels were built for x86-64-{built[0][1:]}" in done.stderr
        assert "RLOX_CPU_LEVELS=all" in done.stderr
