"""Commands of `rlox` in processes forked from one that has already imported everything.

Starting Python with PyTorch and Hydra takes another second of CPU. Tests of the start itself (encodings, closed
streams, imports) must use a real one: ``python -m rlox_cli.main``.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import gc
import importlib.util
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

_TESTS = str(Path(__file__).parent)
# The seconds for which `--check` measures, in tests that look at other things than its estimates.
BRIEF = {"_SHORT_S": 0.01, "_UPDATES_S": 0.01, "_EVALUATION_S": 0.01}


@functools.cache
def _parent() -> socket.socket:
    """A socket to the process that forks. That process ends when this one ends or closes the socket."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())],
        cwd=_TESTS,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
    )
    theirs.close()
    return ours


class Rlox:
    """`rlox *words` in its own process and session, with the methods of `subprocess.Popen` that tests use.

    Parameters
    ----------
    words : str
        The arguments of ``rlox``.
    cwd : Path
        Working directory, which is also the first entry of the import path.
    env : mapping, optional
        The complete environment, as in `subprocess.Popen`.
    stdin, stdout, stderr : file or int, optional
        Files, `subprocess.DEVNULL`, or `subprocess.PIPE` for a text pipe in the attribute `stdout`. Standard error
        goes where standard output goes unless it is given.
    """

    def __init__(
        self, *words, cwd=".", env=None, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    ):
        self.args, self.cwd, self.stdout, self.returncode = [*map(str, words)], Path(cwd), None, None
        with contextlib.ExitStack() as open_here:

            def descriptor(stream):
                if stream == subprocess.DEVNULL:
                    stream = open_here.enter_context(open(os.devnull, "r+b"))
                return stream if isinstance(stream, int) else stream.fileno()

            if stdout == subprocess.PIPE:
                reading, stdout = os.pipe()
                self.stdout = open(reading)  # noqa: SIM115 (the test closes it, as with Popen)
                open_here.callback(os.close, stdout)
            out = descriptor(stdout)
            err = out if stderr == subprocess.STDOUT else descriptor(stderr)
            results, reporting = os.pipe()
            open_here.callback(os.close, reporting)
            request = {
                "words": self.args,
                "cwd": str(self.cwd.absolute()),
                "env": dict(os.environ if env is None else env),
            }
            rights = array.array("i", [descriptor(stdin), out, err, reporting])
            _parent().sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        self._results = open(results, "rb", buffering=0)  # noqa: SIM115 (open until the command ends)
        self.pid = int(self._results.readline())

    def _ended(self, timeout):
        if self.returncode is None and select.select([self._results], [], [], timeout)[0]:
            self.returncode = int(self._results.readline())
            self._results.close()
        return self.returncode

    def poll(self):
        """The exit code, negative for a signal; None while it runs."""
        return self._ended(0)

    def wait(self, timeout=600):
        if self._ended(timeout) is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def communicate(self, timeout=600):
        """Return the remaining output, and None."""
        printed = self.stdout.read() if self.stdout else None
        self.wait(timeout)
        return printed, None

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def run(*words, cwd=".", env=None, timeout=300) -> subprocess.CompletedProcess[str]:
    """Run `rlox *words` to its end, as `subprocess.run` with captured text."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = Rlox(*words, cwd=cwd, env=env, stdout=out, stderr=err)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read())
    return subprocess.CompletedProcess(words, process.returncode, *texts)


def _serve(server: socket.socket) -> list[str]:
    """Fork a process for each request; return in the forked processes with the words of the command."""
    while True:
        with contextlib.suppress(ChildProcessError):  # collect keepers (below) that have ended, if any
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        data, ancillary, _, _ = server.recvmsg(1 << 20, socket.CMSG_SPACE(4 * array.array("i").itemsize))
        if not data:
            sys.exit()
        files = array.array("i", ancillary[0][2]).tolist()
        if {"plot", "compare", "bench", "sweep", "-m"} & {*json.loads(data)["words"]}:
            _import_reports()
        if not os.fork():
            break
        for file in files:
            os.close(file)
    # The keeper: it reports the process id and the exit code of the command.
    server.close()
    if pid := os.fork():
        for file in files[:3]:
            os.close(file)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.write(files[3], f"{code}\n".encode())
        os._exit(0)
    os.setsid()
    os.write(files[3], f"{os.getpid()}\n".encode())
    request = json.loads(data)
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    for file in files:
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]
    sys.path[1:1] = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    from rlox.envs import registry

    registry.offers.cache_clear()  # packages in that folder may provide more
    if request["env"].get("PYTHONUNBUFFERED"):
        sys.stdout.reconfigure(write_through=True, line_buffering=True)
    return request["words"]


def _import() -> None:
    """Import everything that commands import, except trackers, whose modules start threads."""
    import torch

    import rlox_cli.run.resume  # noqa: F401
    from rlox.algorithms import ALGORITHMS, resolve
    from rlox_cli.families import estimate
    from rlox_cli.main import commands

    vars(estimate).update(BRIEF)
    torch.set_num_threads(1)
    for entry in ALGORITHMS.values():
        resolve(entry.cls)
    with contextlib.redirect_stdout(io.StringIO()):
        # Warm up the caches of Typer, Hydra and its parser, environments, networks and one update.
        for words in (["ls", "algos"], ["train", "--check", "env=CartPole-v1", "total_timesteps=512", "backend=torch"]):
            commands()(words, prog_name="rlox", standalone_mode=False)
    gc.collect()
    gc.freeze()  # otherwise a collection in a child would copy every page


@functools.cache
def _import_reports() -> None:
    """Import the modules that plot and compare runs, with SciPy and Matplotlib, which take four seconds of CPU."""
    from matplotlib.backends import backend_agg  # noqa: F401

    from rlox_cli.bench import learn  # noqa: F401
    from rlox_cli.report import compare, plot  # noqa: F401

    gc.collect()
    gc.freeze()


_code: int | None = None  # exit code of a command that has ended


def _leave() -> None:
    """Exit without tearing down the interpreter, which would copy all of its pages. Runs as the last exit handler."""
    if _code is not None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_code)


if __name__ == "__main__":
    _server = socket.socket(fileno=int(sys.argv[1]))
    os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(_leave)  # registered before all imports, so that it is called last
    _import()
    sys.argv[:] = ["rlox", *_serve(_server)]
    # For spawned processes, this process is ``python -m rlox_cli.start``.
    __spec__ = importlib.util.find_spec("rlox_cli.start")
    from rlox_cli.start import main

    try:
        main()
    except SystemExit as e:
        _code = e.code if isinstance(e.code, int) else 0 if e.code is None else None
        raise
    _code = 0
