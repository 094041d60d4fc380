"""Tab completion in real shells on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
EXHAUSTIVE = pytest.mark.exhaustive

RLOX = Path(sys.executable).with_name("rlox")
SHELLS = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
DEADLINE_S = 60.0
# What is typed before Tab, and the line afterwards.
LINES = {
    "rlox tra": "rlox train ",
    "rlox train algo=pp": "rlox train algo=ppo ",
    "rlox train algo.clip_eps_": "rlox train algo.clip_eps_schedule=",
    "rlox train algo=dqn buffer=prio": "rlox train algo=dqn buffer=prioritized ",
    "rlox train -m algo=sac,td3 algo.critic_hea": "rlox train -m algo=sac,td3 algo.critic_head=",
    "rlox train algo=dqn buffer=prioritized buffer.al": "rlox train algo=dqn buffer=prioritized buffer.alpha=",
    "rlox train algo=absent env.n_e": "rlox train algo=absent env.n_envs=",
    "rlox train algo.hidden_si": "rlox train algo.hidden_sizes=",
    "rlox train logger=tens": "rlox train logger=tensorboard ",
    "rlox train num_generati": "rlox train algo.group_size=",
    "rlox train resume=out": "rlox train resume=outputs/one ",
    "rlox train init_from=outputs/one/conf": "rlox train init_from=outputs/one/config.yaml ",
    "rlox train 'seed=0' algo=pp": "rlox train 'seed=0' algo=ppo ",
}
DEFAULT = {
    "bash": ["rlox train algo=pp", "rlox train -m algo=sac,td3 algo.critic_hea", "rlox train resume=out"],
    "zsh": ["rlox train algo.clip_eps_"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run, and the scripts of both shells as `--show-completion` prints them."""
    cwd = tmp_path_factory.mktemp("completion")
    (cwd / "outputs/one").mkdir(parents=True)
    for name in ("metrics.jsonl", "config.yaml"):
        (cwd / "outputs/one" / name).touch()
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    for shell in SHELLS:
        words = [str(RLOX), "--show-completion", shell]
        script = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=DEADLINE_S).stdout
        (cwd / shell).write_text(f"autoload -Uz compinit; compinit -u\n{script}" if shell == "zsh" else script)
    return cwd


def line_after_tab(shell: str, cwd: Path, typed: str) -> str:
    """Return the line as it stands after `typed` and Tab: the shell prints it as a text.

    An x is typed after Tab, since zsh keeps the space after a word only then.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 200, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "PS1": "$ ", "HOME": str(cwd), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{RLOX.parent}{os.pathsep}{os.environ['PATH']}"
    process = subprocess.Popen(
        SHELLS[shell], cwd=cwd, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown, deadline = "", time.monotonic() + DEADLINE_S

    def wait_for(pattern: str) -> re.Match[str]:
        nonlocal shown
        while not (found := re.search(pattern, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))):
            assert time.monotonic() < deadline, shown
            if select.select([ours], [], [], 1.0)[0]:
                shown += os.read(ours, 1 << 16).decode(errors="replace")
        return found

    try:
        os.write(ours, f"source ./{shell}; echo rea''dy\n".encode())
        wait_for(r"[\r\n]ready\r")
        # Ctrl-A and Ctrl-E: the beginning and the end of the line.
        os.write(ours, f'{typed}\tx\x01print_line() {{ echo "<$*>"; }}; print_line "\x05|"\n'.encode())
        return wait_for(r"[\r\n]<(.*)x\|>\r")[1]
    finally:
        process.kill()
        process.wait()
        os.close(ours)


@pytest.mark.parametrize(
    ("shell", "typed"),
    [
        pytest.param(shell, typed, marks=() if typed in DEFAULT[shell] else EXHAUSTIVE)
        for shell in SHELLS
        for typed in LINES
    ],
)
def test_tab_completes_the_line(folder, shell, typed):
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert line_after_tab(shell, folder, typed) == LINES[typed]
