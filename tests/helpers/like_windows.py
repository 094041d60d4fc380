"""A process that lacks what Windows lacks: it imports all of rlox, trains, and runs commands. Prints what failed.

Run as a program, in an empty folder. Other packages are imported before: they have code of their own for Windows, which
asks for the system's name. What the standard library itself needs on this system stays.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import select
import signal
import sys
import traceback

MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty", "syslog", "readline")
SIGNALS = {"SIGABRT", "SIGBREAK", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
OTHERS = {
    os: (
        "chown fchdir fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp "
        "getpriority getsid getuid killpg lchown lockf memfd_create mkfifo nice openpty pidfd_open pipe2 posix_fadvise "
        "posix_fallocate posix_spawn pread preadv pwrite pwritev readv register_at_fork sched_getaffinity "
        "sched_setaffinity sched_yield sendfile setgid setpgid setpgrp setpriority setsid setuid sync sysconf ttyname "
        "uname wait wait3 wait4 writev O_CLOEXEC O_DIRECTORY O_NOFOLLOW O_NONBLOCK O_SYNC O_DSYNC O_NOCTTY"
    ),
    signal: "alarm pause pthread_kill pthread_sigmask setitimer sigpending sigtimedwait sigwait sigwaitinfo",
    select: "epoll poll",
}


def become_like_windows() -> None:
    """Remove what Windows lacks."""
    for name in MODULES:
        sys.modules[name] = None
    for name in dir(signal):
        if name.startswith("SIG") and name not in SIGNALS:
            delattr(signal, name)
    for module, names in OTHERS.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)


def import_all() -> None:
    """Import every module."""
    import rlox
    import rlox_cli

    for package in (rlox, rlox_cli):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                attempt(module.name, importlib.import_module, module.name)


def run(*words: str) -> None:
    """Run a command in this process."""
    from rlox_cli import start

    sys.argv = ["rlox", *words]
    try:
        start.main()
    except SystemExit as e:
        if e.code:
            raise RuntimeError(f"exit code {e.code}") from None


def attempt(what: str, call, *args) -> None:
    try:
        call(*args)
    except BaseException as e:
        print(f"failed: {what}: {type(e).__name__}: {e}")
        traceback.print_exc()


if __name__ == "__main__":
    for name in (
        "gymnasium",
        "hydra",
        "matplotlib",
        "numpy",
        "omegaconf",
        "rich.console",
        "safetensors",
        "torch",
        "typer",
    ):
        importlib.import_module(name)
    os.environ["RLOX_TRACEBACK"] = "1"
    become_like_windows()
    import_all()
    small = [
        "env=CartPole-v1",
        "env.n_envs=2",
        "total_timesteps=128",
        "eval.n_points=1",
        "eval.n_episodes=1",
        "logger=none",
    ]
    for words in (
        ["train", "algo=ppo", "algo.n_steps=16", *small, "output_dir=run"],
        ["train", "algo=dqn", "algo.learning_starts=50", "checkpoint.memory=true", *small, "output_dir=off"],
        ["train", "resume=run", "total_timesteps=256"],
        ["eval", "run"],
        ["train", "--check", "algo=dqn", "algo.learning_starts=50", *small],
        ["env"],
    ):
        attempt(" ".join(words), run, *words)
    print("done")
