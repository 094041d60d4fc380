"""The life cycle of an MmapReplayBuffer's file: who may remove it, what checkpoints rely on, full disks, kill -9."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from rlox.kernels.buffers.cold_file import PAGE, ColdFile, clean_cold_files
from rlox.kernels.buffers.mmap import MmapReplayBuffer

ROOT = Path(__file__).parent.parent  # where the children find this file
DIM = 3


def make(path, hot=8, total=40, **more):
    return MmapReplayBuffer(hot, total, DIM, 1, path, **more)


def fill(buffer, first, last):
    """Push transitions first ... last - 1; all values of a transition follow from its number."""
    for k in range(first, last):
        buffer.push(np.full(DIM, k), [k], k, False, False, np.full(DIM, k + 0.5))
    return buffer


def numbers(buffer):
    """The numbers of the transitions in the buffer, after checking that each is complete."""
    batch = buffer.sample(60 * len(buffer), 0)
    k = batch["rewards"]
    np.testing.assert_array_equal(batch["obs"], np.repeat(k[:, None], DIM, 1))
    np.testing.assert_array_equal(batch["next_obs"], np.repeat(k[:, None] + 0.5, DIM, 1))
    np.testing.assert_array_equal(np.ravel(batch["actions"]), k)
    return sorted(set(k.astype(int).tolist()))


def cold_files(folder):
    return sorted(p for p in os.listdir(folder) if p.endswith(".cold"))


def child(program, *arguments, check=True):
    """Run a Python program in a fresh process and return what it printed."""
    program = textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert not check or done.returncode == 0, done.stderr
    return done


# Creating a file.


def test_a_folder_gets_a_sparse_file_of_its_own(tmp_path):
    buffer = MmapReplayBuffer(10, 1_000_000, 10_000, 1, tmp_path)
    (name,) = cold_files(tmp_path)
    assert buffer.cold_path == str(tmp_path / name)
    assert name == f"replay-{buffer.cold_id}.cold"
    status = os.stat(tmp_path / name)
    assert status.st_size > 1_000_000 * 80_000
    assert status.st_blocks * 512 <= 16 * PAGE
    buffer.close()
    assert cold_files(tmp_path) == []


def test_preallocation_takes_the_disk_at_once(tmp_path):
    with make(tmp_path / "x", total=1000, preallocate=True) as buffer:
        taken = os.stat(buffer.cold_path).st_blocks
        assert taken * 512 >= 1000 * (2 * DIM * 4 + 4 + 4)
        fill(buffer, 0, 2000)
        assert os.stat(buffer.cold_path).st_blocks == taken


def test_a_foreign_file_is_never_overwritten(tmp_path):
    path = tmp_path / "x"
    for content in (b"", b"mine", b"RLOXCOLD" + bytes(5000)):
        path.write_bytes(content)
        with pytest.raises(FileExistsError, match="a file that rlox did not write"):
            make(path)
        assert path.read_bytes() == content


def test_paths_that_cannot_hold_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="cold_path must"):
        make(tmp_path / "nowhere" / "x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="cold_path must"):
        make(tmp_path / "file" / "x")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(FileExistsError, match="something else"):
        make(tmp_path / "fifo")
    os.symlink(tmp_path / "target", tmp_path / "link")
    with pytest.raises(FileExistsError, match="something else"):
        make(tmp_path / "link")
    with pytest.raises(FileExistsError):
        make("/dev/full")
    with pytest.raises(OSError, match="cold_path must"):
        make("/proc/x")  # not even root can create a file here
    with pytest.raises(ValueError, match="NUL"):
        make("a\0b")
    for path in (None, 3, 2.5, ["x"]):
        with pytest.raises(TypeError, match="cold_path must"):
            make(path)


def test_a_file_in_use_is_left_alone(tmp_path):
    with fill(make(tmp_path / "x"), 0, 30) as buffer:
        with pytest.raises(FileExistsError, match=f"process {os.getpid()}, which is in use"):
            make(tmp_path / "x")
        assert clean_cold_files(tmp_path, []) == []
        assert numbers(buffer) == list(range(30))


# Closing a buffer.


def test_close(tmp_path):
    buffer = fill(make(tmp_path), 0, 30)
    buffer.close()
    buffer.close()
    assert os.listdir(tmp_path) == []
    calls = (
        lambda: fill(buffer, 0, 1),
        lambda: buffer.sample(1, 0),
        lambda: len(buffer),
        lambda: buffer.get_state(),
        lambda: buffer.__enter__(),
    )
    for call in calls:
        with pytest.raises(ValueError, match="closed"):
            call()


def test_buffers_that_were_not_closed_leave_no_files(tmp_path):
    fill(make(tmp_path), 0, 30)
    assert os.listdir(tmp_path) == []
    program = """
        import sys
        from tests.test_cold_files import *
        kept = fill(make(sys.argv[1]), 0, 30)  # the interpreter ends with it open
        sys.modules["keep"] = kept
    """
    child(program, tmp_path)
    assert os.listdir(tmp_path) == []


def test_close_keeps_a_foreign_file_of_the_same_name(tmp_path):
    buffer = make(tmp_path / "x")
    os.unlink(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"mine")
    buffer.close()
    assert (tmp_path / "x").read_bytes() == b"mine"


def test_a_removed_folder_does_not_disturb(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    buffer = fill(make(folder), 0, 30)
    os.unlink(buffer.cold_path)
    folder.rmdir()
    assert numbers(buffer) == list(range(30))
    fill(buffer, 30, 90)
    assert numbers(buffer) == list(range(50, 90))
    buffer.close()


def test_closing_while_another_thread_samples(tmp_path):
    for _ in range(20):
        buffer = fill(make(tmp_path, total=200), 0, 200)
        started = threading.Event()
        wrong = []

        def sample(buffer=buffer, started=started, wrong=wrong):
            try:
                for seed in range(10_000):
                    batch = buffer.sample(2000, seed)
                    if not (batch["next_obs"][:, 0] == batch["rewards"] + 0.5).all():
                        wrong.append(seed)
                    started.set()
            except ValueError as e:
                if "closed" not in str(e):
                    wrong.append(e)

        thread = threading.Thread(target=sample)
        thread.start()
        started.wait(10)
        buffer.close()
        thread.join(10)
        assert not wrong
        assert os.listdir(tmp_path) == []


# kill -9.

PUSH_AND_STAY = """
    import sys
    from tests.test_cold_files import *
    buffer = fill(make(sys.argv[1]), 0, 30)
    if sys.argv[2] == "named":
        state = buffer.get_state(include_cold=False)
        np.savez(sys.argv[3], **state)
    fill(buffer, 30, int(sys.argv[4]))
    print(buffer.cold_path, flush=True)
    sys.stdin.read()
"""


class Killed:
    """A process that has pushed transitions and waits; `kill` ends it with SIGKILL."""

    def __init__(self, folder, kind, state, last=30):
        self.process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PUSH_AND_STAY), str(folder), kind, str(state), str(last)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.cold_path = self.process.stdout.readline().strip()
        assert self.cold_path

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()


def load_state(path):
    with np.load(path) as arrays:
        return {k: v.item() if v.ndim == 0 else v for k, v in arrays.items()}


@pytest.mark.slow
def test_the_next_start_removes_only_files_that_no_checkpoint_names(tmp_path):
    dead = Killed(tmp_path, "plain", tmp_path / "a")
    named = Killed(tmp_path, "named", tmp_path / "named.npz")
    alive = Killed(tmp_path, "plain", tmp_path / "b")
    dead.kill()
    named.kill()
    foreign = {
        "replay-0123456789abcdef.cold": b"not ours",
        "replay.cold": b"",
        "cut.cold": Path(dead.cold_path).read_bytes()[:100],
        "notes.txt": b"RLOXCOLD",
    }
    damaged = bytearray(Path(dead.cold_path).read_bytes())
    damaged[40] ^= 1
    foreign["damaged.cold"] = bytes(damaged)
    for name, content in foreign.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.cold").mkdir()
    os.symlink(dead.cold_path, tmp_path / "link.cold")
    before = set(os.listdir(tmp_path))

    with fill(make(tmp_path), 0, 30) as buffer:
        gone = before - set(os.listdir(tmp_path))
        assert gone == {os.path.basename(dead.cold_path)}
        assert clean_cold_files(tmp_path) == []
        for name, content in foreign.items():
            assert (tmp_path / name).read_bytes() == content
        assert numbers(buffer) == list(range(30))
        # With the names given: only the file of the killed process that no checkpoint names.
        state = load_state(tmp_path / "named.npz")
        assert clean_cold_files(tmp_path, [state["cold_id"]]) == []
        alive.kill()
        assert clean_cold_files(tmp_path, [state["cold_id"]]) == [alive.cold_path]
        buffer.set_state(state)
        assert numbers(buffer) == list(range(30))
    # Closing keeps the file, since a checkpoint still names it.
    assert os.path.exists(named.cold_path)
    assert clean_cold_files(tmp_path) == []
    assert clean_cold_files(tmp_path, ["another"]) == [named.cold_path]


@pytest.mark.slow
def test_a_fixed_path_is_reused_after_a_kill(tmp_path):
    dead = Killed(tmp_path / "x", "plain", tmp_path / "a")
    with pytest.raises(FileExistsError, match="in use"):
        make(tmp_path / "x")
    dead.kill()
    with fill(make(tmp_path / "x"), 100, 130) as buffer:
        assert numbers(buffer) == list(range(100, 130))
    named = Killed(tmp_path / "x", "named", tmp_path / "named.npz", 31)
    named.kill()
    with pytest.raises(FileExistsError, match="from_state"):
        make(tmp_path / "x")
    with MmapReplayBuffer.from_state(load_state(tmp_path / "named.npz")) as buffer:
        assert numbers(buffer) == list(range(30))
        assert buffer.cold_path == str(tmp_path / "x")
        buffer.close(keep=False)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("last", [30, 31, 45, 200, 1000])
def test_a_killed_process_continues_exactly_from_its_checkpoint(tmp_path, last):
    """The rows of the checkpoint are still there, however many were pushed after it."""
    named = Killed(tmp_path, "named", tmp_path / "named.npz", last)
    named.kill()
    state = load_state(tmp_path / "named.npz")
    assert "obs" not in state or len(state["obs"]) <= 8  # cold rows stay in the file
    with make(tmp_path) as buffer, fill(make(tmp_path / "model"), 0, 30) as model:
        buffer.set_state(state)
        assert cold_files(tmp_path) == [os.path.basename(named.cold_path)]
        for step in range(30, 130, 7):
            np.testing.assert_equal(dict(buffer.sample(50, step)), dict(model.sample(50, step)))
            fill(buffer, step, step + 7)
            fill(model, step, step + 7)


# States that name the file.


def test_the_two_newest_states_stay_intact(tmp_path):
    buffer = fill(make(tmp_path), 0, 30)
    states = {}
    for head in (30, 55, 90, 300):
        fill(buffer, max(states, default=30), head)
        states[head] = buffer.get_state(include_cold=False)
    fill(buffer, 300, 1000)
    path = buffer.cold_path
    buffer.close()
    assert os.path.exists(path)
    with make(tmp_path) as buffer:
        fill(buffer, 0, 20)
        for head in (30, 55):
            with pytest.raises(ValueError, match="two newest"):
                buffer.set_state(states[head])
        assert numbers(buffer) == list(range(20))  # an error changes nothing
        buffer.set_state(states[90])
        assert numbers(buffer) == list(range(50, 90))
        fill(buffer, 90, 95)
        assert numbers(buffer) == list(range(55, 95))
        newer = buffer.get_state(include_cold=False)
        fill(buffer, 95, 300)
    with make(tmp_path) as buffer:
        # After continuing from 90, state 300 is of another history; 90 stays valid until there are two newer states.
        with pytest.raises(ValueError, match="two newest"):
            buffer.set_state(states[300])
        buffer.set_state(newer)
        assert numbers(buffer) == list(range(55, 95))


def test_the_file_stays_within_three_times_its_ring(tmp_path):
    with make(tmp_path, hot=100, total=1000) as buffer:
        size = os.stat(buffer.cold_path).st_size
        for k in range(0, 20_000, 500):
            fill(buffer, k, k + 500)
            buffer.get_state(include_cold=False)
        assert os.stat(buffer.cold_path).st_size == size
        assert numbers(buffer) == list(range(19_000, 20_000))


def test_a_moved_folder_is_found(tmp_path):
    (tmp_path / "old").mkdir()
    buffer = fill(make(tmp_path / "old"), 0, 30)
    state = buffer.get_state(include_cold=False)
    buffer.close()
    os.rename(tmp_path / "old", tmp_path / "new")
    with make(tmp_path / "new") as buffer:
        buffer.set_state(state)
        assert numbers(buffer) == list(range(30))


def test_damaged_and_missing_files_are_refused(tmp_path):
    buffer = fill(make(tmp_path / "x"), 0, 30)
    state = buffer.get_state(include_cold=False)
    other = fill(make(tmp_path / "y"), 0, 5)
    with pytest.raises(ValueError, match="in use"):
        other.set_state(state)
    buffer.close()
    whole = (tmp_path / "x").read_bytes()

    def refused(content, match):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(ValueError, match=match):
            other.set_state(state)
        assert numbers(other) == list(range(5))

    for at in (0, 3, 8, 12, 16, 25, 60):
        refused(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :], "cold_path must")
    for length in (0, 7, 100, PAGE - 1, PAGE, len(whole) - 1):
        refused(whole[:length], "cold_path must")
    os.unlink(tmp_path / "x")
    with pytest.raises(ValueError, match="nothing there"):
        other.set_state(state)
    (tmp_path / "x").write_bytes(whole)
    other.set_state(state)
    assert numbers(other) == list(range(30))
    other.close(keep=False)


# Full disks, cut files, forks.


def test_a_write_that_does_not_fit_leaves_the_buffer_as_it_was(tmp_path):
    program = """
        import resource, sys
        from tests.test_cold_files import *
        buffer = fill(make(sys.argv[1], total=2000), 0, 300)
        size = 512 * -(-os.stat(buffer.cold_path).st_blocks * 512 // 512)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        pushed = 300
        try:
            while True:
                fill(buffer, pushed, pushed + 1)
                pushed += 1
                assert pushed < 2000
        except OSError as e:
            print(e.errno, e.filename, e.strerror)
        for _ in range(3):  # it stays so, and the buffer stays whole
            assert len(buffer) == pushed and numbers(buffer) == list(range(pushed))
            try:
                fill(buffer, pushed, pushed + 1)
            except OSError:
                pass
            else:
                raise SystemExit("the push must fail again")
        more = np.arange(pushed, pushed + 50)
        try:
            buffer.push_batch(
                np.repeat(more[:, None], DIM, 1), np.repeat(more[:, None] + 0.5, DIM, 1), more[:, None], more,
                np.zeros(50, bool), np.zeros(50, bool),
            )
        except OSError:
            pass
        else:
            raise SystemExit("the batch must fail")
        pushed = len(buffer)
        assert numbers(buffer) == list(range(pushed))
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        fill(buffer, pushed, 3000)
        assert numbers(buffer) == list(range(1000, 3000))
        buffer.close()
    """
    done = child(program, tmp_path)
    number, path, text = done.stdout.split(" ", 2)
    assert int(number) == errno.EFBIG
    assert path.startswith(str(tmp_path))
    assert "room" in text


@pytest.mark.parametrize(("hot", "n_envs"), [(100, 6), (10, 12), (8, 5), (130, 40)])
def test_a_full_disk_keeps_whole_rows_of_several_environments(hot, n_envs, tmp_path):
    """After a failed batch, the memory and its state equal those of a memory without the failure."""
    program = """
        import resource, sys
        from tests.test_cold_files import *
        folder, hot, n_envs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
        full, other = (MmapReplayBuffer(hot, 600, DIM, 1, folder, n_envs=n_envs) for _ in range(2))
        rows = lambda k: np.arange(k * n_envs, (k + 1) * n_envs, dtype=np.float32)
        flags = np.zeros(n_envs, bool)
        def push(buffer, k):
            x = rows(k)
            obs = np.repeat(x[:, None], DIM, 1)
            buffer.push_batch(obs, obs + 0.5, x[:, None], x, flags, flags)
        failed = 0
        for k in range(4000 // n_envs):
            if k % 7 == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
                try:
                    push(full, k)
                    done = True
                except OSError:
                    done = False
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                if not done:
                    failed += full.n_pushed == k * n_envs
                    kept = len(full)
                    assert numbers(full) == list(range(k * n_envs - kept, k * n_envs))
                    copy = MmapReplayBuffer(hot, 600, DIM, 1, folder, n_envs=n_envs)
                    copy.set_state(full.get_state(include_cold=True))
                    assert len(copy) == kept
                    assert numbers(copy) == numbers(full)
                    copy.close()
                    push(full, k)
            else:
                push(full, k)
            push(other, k)
        a, b = full.sample(600, 0), other.sample(600, 0)
        assert all(np.array_equal(a[key], b[key]) for key in a)
        print(failed)
    """
    assert int(child(program, tmp_path, hot, n_envs).stdout) > 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_file_system(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with pytest.raises(OSError, match="must have room") as caught:
            make(tmp_path, total=100_000, preallocate=True)
        assert caught.value.errno == errno.ENOSPC
        assert os.listdir(tmp_path) == []
        buffer = make(tmp_path, hot=500, total=100_000)
        with pytest.raises(OSError, match="must have room") as caught:
            fill(buffer, 0, 100_000)
        assert caught.value.errno == errno.ENOSPC
        n = len(buffer)
        assert 500 < n < 100_000
        assert numbers(buffer) == list(range(n))
        with pytest.raises(OSError, match="must have room"):
            fill(buffer, n, n + 1)
        assert len(buffer) == n
        buffer.close()
        assert os.listdir(tmp_path) == []
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_file_truncated_by_others_is_an_error_not_a_crash(tmp_path):
    program = """
        import sys, time
        from tests.test_cold_files import *
        buffer = fill(make(sys.argv[1]), 0, 30)
        buffer.sample(1000, 0)
        os.truncate(buffer.cold_path, 5000)
        time.sleep(0.01)
        try:
            buffer.sample(1000, 0)
        except OSError as e:
            print(e.strerror)
    """
    assert "cut short" in child(program, tmp_path).stdout


def test_a_forked_child_cannot_touch_the_file(tmp_path):
    buffer = fill(make(tmp_path), 0, 30)
    before = Path(buffer.cold_path).read_bytes()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            output = []
            for call in (
                lambda: fill(buffer, 30, 60),
                lambda: buffer.sample(4, 0),
                lambda: buffer.get_state(include_cold=False),
            ):
                try:
                    call()
                    output.append("no error")
                except ValueError as e:
                    output.append("fork" if "fork" in str(e) else str(e))
            buffer.close()
            with fill(make(tmp_path), 0, 30) as own:
                output.append(str(numbers(own) == list(range(30))))
            os.write(write, " ".join(output).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    os.close(write)
    assert os.read(read, 1000) == b"fork fork fork True"
    os.close(read)
    assert Path(buffer.cold_path).read_bytes() == before
    fill(buffer, 30, 60)
    assert numbers(buffer) == list(range(20, 60))
    buffer.close()
    assert os.listdir(tmp_path) == []


def test_a_surviving_child_does_not_lock_the_file_of_a_killed_parent(tmp_path):
    program = """
        import sys, time
        from tests.test_cold_files import *
        buffer = fill(make(sys.argv[1]), 0, 30)
        if os.fork() == 0:
            print("up", os.getpid(), flush=True)
            time.sleep(60)
            os._exit(0)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), tmp_path], stdout=subprocess.PIPE, cwd=ROOT
    )
    _word, pid = parent.stdout.readline().split()
    try:
        assert clean_cold_files(tmp_path, []) == []
        parent.kill()
        parent.wait(10)
        assert len(clean_cold_files(tmp_path, [])) == 1
    finally:
        os.kill(int(pid), signal.SIGKILL)
        parent.stdout.close()


def test_cleaning_rejects_anything_but_a_list_of_ids(tmp_path):
    with pytest.raises(TypeError, match="collection of ids"):
        clean_cold_files(tmp_path, "0123456789abcdef")
    with pytest.raises(TypeError, match="strings"):
        clean_cold_files(tmp_path, [3])
    with pytest.raises(FileNotFoundError):
        clean_cold_files(tmp_path / "nowhere")
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        clean_cold_files(tmp_path / "x")


def test_a_block_is_written_where_it_is_read(tmp_path):
    file = ColdFile.create(tmp_path, "test", 16, 4, 3, 0)
    data = np.arange(64, dtype=np.uint8)
    file.write(1, [data[:40], data[40:]])
    assert not file.rows[:64].any()
    assert not file.rows[128:].any()
    np.testing.assert_array_equal(file.rows[64:128], data)
    assert not file.rows.flags.writeable
    file.close()
