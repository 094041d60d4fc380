"""Environments on workers: the same numbers as in this process, and runs whose workers fail."""

import os
import signal
import socket
import threading
import time
import warnings

import camera_world  # noqa: F401 -- registers an environment
import numpy as np
import pytest

import rlox
from rlox import __version__
from rlox.config import RemoteConfig
from rlox.envs import make_vec_env
from rlox.envs.remote import Message, RemoteEnvPool, WorkerLost, WorkerRefused, client, decode, encode
from rlox.envs.remote.client import WorkerFailed
from rlox.envs.remote.codec import VERSION
from rlox.envs.remote.server import METHOD
from rlox.envs.remote.session import EnvSessions
from rlox.envs.tensor import table
from rlox.envs.tensor.base import TensorEnv
from rlox.envs.tensor.cartpole import CartPole
from rlox.kernels.rng import Rng

QUICK = RemoteConfig(timeout_s=5.0, reconnect_s=20.0)


def actions_of(spec, n, rng):
    if spec.discrete:
        return rng.integers(spec.n_actions, size=n)
    return rng.uniform(-1, 1, (n, spec.act_dim)).astype(np.float32)


def equal(one, other):
    assert one.keys() == other.keys()
    for key, array in one.items():
        assert array.dtype == other[key].dtype
        assert np.array_equal(array, other[key]), key


@pytest.mark.parametrize(
    ("env", "kwargs"), [("CartPole-v1", {}), ("Pendulum-v1", {}), ("CartPole-v1", {"sutton_barto_reward": True})]
)
def test_the_same_seed_gives_the_same_steps_as_locally(serving, env, kwargs):
    addresses = [serving(env, kwargs=kwargs).address for _ in range(2)]
    with RemoteEnvPool(addresses, env, 5, 7, kwargs=kwargs) as pool:
        local, rng = make_vec_env(env, 5, 7, kwargs), np.random.default_rng(0)
        assert np.array_equal(pool.reset_all(), local.reset_all())
        for _ in range(210):
            actions = actions_of(pool.spec, 5, rng)
            equal(pool.step_all(actions), local.step_all(actions))
        assert np.array_equal(pool.reset_all(), local.reset_all())
        assert np.array_equal(pool.reset_all(3), local.reset_all(3))
        out = {"rewards": np.empty(5), "final_obs": np.empty((5, *pool.spec.obs_shape), np.float32)}
        assert pool.step_all(actions, out) is out
        equal(out, {key: array for key, array in local.step_all(actions).items() if key in out})
        state = pool.get_state()
        assert (state is None) == bool(kwargs) == (pool.unrestorable_reason is not None)
        if state is not None:
            expected = [pool.step_all(actions) for _ in range(3)]
            with RemoteEnvPool([addresses[0]], env, 5, 0) as other:
                assert other.fits(state)
                other.set_state(state)
                for step in expected:
                    equal(other.step_all(actions), step)


@pytest.mark.slow
def test_training_and_resuming_equal_those_with_local_environments(serving, tmp_path):
    remote = RemoteConfig([serving().address, serving().address])
    settings = {"n_envs": 4, "seed": 3, "n_steps": 16, "batch_size": 32}
    here, there = rlox.PPO("CartPole-v1", **settings), rlox.PPO("CartPole-v1", remote=remote, **settings)
    here.train(256)
    there.train(128)
    there.save(tmp_path / "a.safetensors")
    there.close()
    there = rlox.PPO.from_checkpoint(tmp_path / "a.safetensors", remote=remote)
    there.train(until=256)
    assert there.backend == "native"
    assert np.array_equal(there.native.net.parameters, here.native.net.parameters)
    assert np.array_equal(there.evaluate(2).returns, here.evaluate(2).returns)
    there.close()
    sac = rlox.SAC("Pendulum-v1", remote=RemoteConfig([serving("Pendulum-v1").address]), learning_starts=20, n_envs=2)
    sac.train(30)
    assert len(sac.buffer) == 30
    sac.close()


@pytest.mark.slow
def test_episodes_of_a_lost_worker_are_truncated_and_another_takes_over(serving, process):
    child, port = process()
    pool = RemoteEnvPool([serving().address, f"127.0.0.1:{port}"], "CartPole-v1", 4, 0, QUICK)
    first = pool.reset_all()
    for _ in range(3):
        before = pool.step_all(np.ones(4, np.int64))
    os.kill(child.pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match=r"environments 2 to 3 continue at .* are truncated \(2 so far\)"):
        lost = pool.step_all(np.ones(4, np.int64))
    assert lost["truncated"].tolist() == [False, False, True, True]
    assert not lost["terminated"].any()
    assert lost["rewards"].tolist() == [1, 1, 0, 0]
    assert np.array_equal(lost["final_obs"][2:], before["obs"][2:])
    assert lost["episode_return"].tolist() == [4, 4, 3, 3]
    assert lost["episode_length"].tolist() == [4] * 4
    assert not np.isin(lost["obs"][2:], first[2:]).any()  # new episodes
    assert np.abs(lost["obs"][2:]).max() < 0.05  # which have just started
    after = pool.step_all(np.ones(4, np.int64))
    assert after["episode_length"].tolist() == [5, 5, 1, 1]
    assert pool.n_lost == 2
    pool.close()


@pytest.mark.slow
def test_a_worker_that_is_lost_in_the_first_step_after_a_restore_truncates_at_the_restored_observations(
    serving, process
):
    child, port = process()
    addresses = [serving().address, f"127.0.0.1:{port}"]
    pool = RemoteEnvPool(addresses, "CartPole-v1", 4, 0, QUICK)
    pool.reset_all()
    before = pool.step_all(np.ones(4, np.int64))["obs"].copy()
    state = pool.get_state()
    pool.close()
    pool = RemoteEnvPool(addresses, "CartPole-v1", 4, 0, QUICK)
    pool.set_state(state)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.warns(RuntimeWarning, match=r"environments 2 to 3 continue at"):
        lost = pool.step_all(np.ones(4, np.int64))
    assert np.array_equal(lost["final_obs"][2:], before[2:])
    assert np.abs(before[2:]).min() > 0
    pool.close()


@pytest.mark.slow
def test_a_worker_that_hangs_is_dropped_after_the_timeout_and_used_again_later(process):
    child, port = process()
    remote = RemoteConfig([f"127.0.0.1:{port}"], timeout_s=1.0, reconnect_s=30.0)
    pool = RemoteEnvPool(None, "CartPole-v1", 2, 0, remote)
    pool.reset_all()
    process.stop(child)
    threading.Timer(2.5, child.send_signal, (signal.SIGCONT,)).start()
    with pytest.warns(RuntimeWarning, match="did not answer within 1 s; environments 0 to 1 continue"):
        assert pool.step_all([0, 0])["truncated"].all()
    assert pool.step_all([0, 0])["episode_length"].tolist() == [1, 1]
    pool.close()


@pytest.mark.slow
def test_a_partition_ends_when_the_network_is_back(serving, proxied):
    proxy = proxied(serving().port)
    pool = RemoteEnvPool([f"127.0.0.1:{proxy.port}"], None, 2, 0, RemoteConfig(timeout_s=1.0, reconnect_s=30.0))
    pool.reset_all()
    proxy.flows.clear()
    threading.Timer(3.0, proxy.flows.set).start()
    with pytest.warns(RuntimeWarning, match="did not answer within 1 s"):
        assert pool.step_all([0, 0])["truncated"].all()
    assert not pool.step_all([0, 0])["truncated"].any()
    proxy.cut()
    with pytest.warns(RuntimeWarning, match="are truncated"):
        pool.step_all([0, 0])
    pool.close()


@pytest.mark.slow
def test_if_no_worker_takes_over_the_run_ends_with_an_error(serving):
    server = serving()
    pool = RemoteEnvPool([server.address], "CartPole-v1", 2, 0, RemoteConfig(reconnect_s=0.5))
    pool.reset_all()
    server.stop()
    with pytest.raises(WorkerLost, match=r"none of .* took over its environments within 0.5 s \(remote.reconnect_s\)"):
        pool.step_all([0, 0])
    pool.close()
    with pytest.raises(RuntimeError, match="is closed"):
        pool.step_all([0, 0])


def test_a_drained_worker_hands_over(serving):
    one, other = serving(), serving()
    pool = RemoteEnvPool([one.address, other.address], None, 2, 0, QUICK)
    pool.reset_all()
    one.drain()
    with pytest.warns(
        RuntimeWarning, match=f"{one.address} is shutting down; environments 0 to 0 continue at {other.address}"
    ):
        pool.step_all([0, 0])
    assert other.n_sessions == 2
    pool.close()


@pytest.mark.parametrize(
    ("spare", "message"), [(False, "must serve CartPole-v1"), (True, "environments 0 to 0 continue")]
)
def test_a_worker_that_comes_back_with_another_environment_is_an_error(serving, spare, message):
    server = serving()
    addresses = [server.address, *([serving().address] if spare else [])]
    pool = RemoteEnvPool(addresses, None, 2, 0, QUICK)
    pool.reset_all()
    server.stop()
    serving("Pendulum-v1", port=server.port)
    if spare:
        with pytest.warns(RuntimeWarning, match=message):
            pool.step_all([0, 0])
    else:
        with pytest.raises(WorkerRefused, match=message):
            pool.step_all([0, 0])
    pool.close()


@pytest.fixture
def speaking():
    """A gRPC server that answers each message of a stream with the next of `answers`."""
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    made = []

    def start(*answers):
        def serve(requests, context):
            for _, answer in zip(requests, answers, strict=False):
                yield answer

        server = grpc.server(ThreadPoolExecutor(2))
        service, name = METHOD[1:].split("/")
        handler = grpc.stream_stream_rpc_method_handler(serve)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        made.append(server)
        server.start()
        return f"127.0.0.1:{port}"

    yield start
    for server in made:
        server.stop(None).wait()


def welcome(serving, **changes):
    from rlox.envs.remote import Connection

    line = Connection(serving().address, QUICK, "env", {"n_envs": 2})
    line.close()
    return encode("welcome", {**line.welcome.fields, **changes}, line.welcome.arrays)


SPEC = {"obs_shape": [2**20, 2**20], "obs_dtype": "float32", "n_stacked": 1, "n_actions": 2, "parts": []}
NO_ACTION = encode(
    "reset", None, {"obs": np.zeros((2, 4), np.float32), "action_mask": np.array([[True, False], [False, False]])}
)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"rlox": "0.0.1"}, WorkerRefused, f"it runs rlox 0.0.1, but this learner runs {rlox.__version__}"),
        ({"protocol": 9}, WorkerRefused, "it runs rlox"),
        ({"spec": SPEC}, WorkerRefused, "obs_shape must be at most 4 sizes"),
        ({"spec": {**SPEC, "obs_shape": [4], "act_dim": 1}}, WorkerRefused, "actions must be of one kind"),
        ({"spec": None}, WorkerRefused, "spec must be an object"),
        ({"spec": {**SPEC, "obs_shape": [4], "masked": "yes"}}, WorkerRefused, "masked must be a flag"),
        ({"spec": {**SPEC, "obs_shape": [4], "mask_source": 1}}, WorkerRefused, "mask_source must be a text"),
        ({"spec": {**SPEC, "obs_shape": [9], "images": [[0, 1, 2, 2], [3, 1, 2, 2]]}}, WorkerRefused, "one after the"),
        ({"spec": {**SPEC, "obs_shape": [9], "images": [[0, 1, 4, 4]]}}, WorkerRefused, "images must be within the"),
        ({"spec": {**SPEC, "obs_shape": [9], "images": [[0, 1, 0, 4]]}}, WorkerRefused, "images must be parts of the"),
        ({"spec": {**SPEC, "obs_shape": [9], "images": "all"}}, WorkerRefused, "images must be a list"),
    ],
)
def test_a_worker_of_another_version_or_with_an_invalid_welcome_is_an_error(serving, speaking, changes, error, message):
    with pytest.raises(error, match=message):
        RemoteEnvPool([speaking(welcome(serving, **changes))], None, 2, 0, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"garbage", "sent an invalid message: a message must begin with b'rlox'"),
        (encode("reset", None, {"obs": np.zeros((3, 4), np.float32)}), r"sent an invalid answer: reset: obs must be"),
        (encode("reset", None, {"obs": np.zeros((2, 4))}), "sent an invalid answer: reset: obs must be float32"),
        (NO_ACTION, "sent an invalid answer: reset: action_mask must allow at least one action, got none in row 1"),
    ],
)
def test_a_worker_that_sends_garbage_counts_as_lost(serving, speaking, answer, expected):
    masked = {"spec": {**SPEC, "obs_shape": [4], "masked": True}} if answer is NO_ACTION else {}
    address = speaking(welcome(serving, **masked), answer)
    pool = RemoteEnvPool([address], None, 2, 0, RemoteConfig(reconnect_s=1.0))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(WorkerLost, match=expected):
            pool.reset_all()
    assert len(caught) == 1
    assert pool.n_lost == 2
    pool.close()


def test_an_exception_of_an_environment_names_its_location(serving):
    server = serving("CartPole-v1", {"env": Breaks})
    pool = RemoteEnvPool([server.address], None, 2, 0, QUICK)
    with pytest.raises(WorkerFailed, match="ZeroDivisionError"):
        pool.reset_all()
    assert any("failed with ZeroDivisionError" in line for line in server.lines)
    pool.close()


def test_a_learner_that_closes_is_logged_differently_from_a_lost_one(serving, eventually, monkeypatch):
    import grpc

    monkeypatch.setattr(client, "_CLOSE_S", 20.0)
    server = serving()
    for _ in range(20):
        pool = RemoteEnvPool([server.address], None, 2, 0, QUICK)
        pool.reset_all()
        pool.close()
    eventually(lambda: sum("session ended" in line for line in server.lines) == 20)
    assert not [line for line in server.lines if "session ended (" in line]
    hello = {"protocol": VERSION, "rlox": __version__, "session": "env", "n_envs": 2}
    with grpc.insecure_channel(server.address) as channel:
        # The learner ends without `close`, as gRPC may report a lost learner or a message that is too large.
        assert decode(next(channel.stream_stream(METHOD)(iter([encode("hello", hello)])))).kind == "welcome"
        eventually(lambda: "the stream broke off: the other side is gone, or sent more" in server.lines[-1])


class Breaks:
    def __init__(self, hello):
        from rlox.envs.remote.session import EnvSessions

        self.welcome = EnvSessions("CartPole-v1").about

    def handle(self, message):
        return Message("never", {"x": 1 // 0})

    def close(self):
        pass


class Broken:
    def __init__(self, hello):
        raise OSError("no display")


def test_an_exception_in_the_start_of_a_session_is_raised_and_logged(serving, eventually):
    server = serving("CartPole-v1", {"env": Broken})
    with pytest.raises(WorkerFailed, match="OSError: no display"):
        RemoteEnvPool([server.address], None, 2, 0, QUICK)
    eventually(lambda: any("failed with OSError: no display" in line for line in server.lines))


def test_ranks_have_different_episodes_after_the_loss_of_a_worker(serving):
    kwargs = {"sutton_barto_reward": True}
    server = serving(kwargs=kwargs)
    ranks = [RemoteEnvPool([server.address], "CartPole-v1", 2, 0, QUICK, kwargs) for _ in range(2)]
    for rank, pool in enumerate(ranks):
        pool.first, pool.n_joint = 2 * rank, 4
        pool.reset_all()
    server.stop()
    serving(kwargs=kwargs, port=server.port)
    with pytest.warns(RuntimeWarning, match="continue at"):
        obs = np.concatenate([pool.step_all([0, 0])["obs"] for pool in ranks])
    assert len(np.unique(obs, axis=0)) == 4
    for pool in ranks:
        pool.close()


class OwnTensorEnv(TensorEnv):
    env_id = "Own-v0"

    def __init__(self):
        self.inner = CartPole()
        for name in ("spec", "state_size", "max_episode_steps"):
            setattr(self, name, getattr(self.inner, name))

    def start(self, words):
        return self.inner.start(words)

    def step(self, state, actions):
        return self.inner.step(state, actions)

    def observe(self, state):
        return self.inner.observe(state)


def test_a_users_tensor_environment_gives_the_same_steps_as_locally(serving, monkeypatch):
    monkeypatch.setattr(table, "REGISTERED", dict(table.REGISTERED))
    env = rlox.register_env(OwnTensorEnv)
    local = make_vec_env(env, 5, 7)
    with RemoteEnvPool([serving(env).address for _ in range(2)], env, 5, 7) as pool:
        assert np.array_equal(pool.reset_all(), local.reset_all())
        for _ in range(60):
            equal(pool.step_all(np.ones(5, np.int64)), local.step_all(np.ones(5, np.int64)))
        state = pool.get_state()
        expected = pool.step_all(np.zeros(5, np.int64))
        pool.set_state(state)
        equal(pool.step_all(np.zeros(5, np.int64)), expected)
    with pytest.raises(ValueError, match="backend must be auto, gymnasium or envpool, got tensor for CartPole-v1"):
        EnvSessions("CartPole-v1", backend="tensor")


def test_a_worker_creates_its_own_environments_alone(monkeypatch):
    made = []
    make = EnvSessions.make
    monkeypatch.setattr(EnvSessions, "make", lambda self, n, seed: made.append(n) or make(self, n, seed))
    session = EnvSessions("CartPole-v1")(Message("hello", {"n_envs": 3}))
    first = 2**20 - 3  # of the largest number of environments that a learner has on all its workers
    answer = session.handle(Message("reset", {"seed": 7, "first": first}, {"seeds": np.arange(3)}))
    assert np.array_equal(answer.arrays["obs"], make_vec_env("CartPole-v1", 2**20, 7).reset_all()[first:])
    assert max(made) == 3


def test_mixed_observations_from_a_worker(serving):
    server = serving("CameraWorld-v0")
    pool = RemoteEnvPool([server.address], None, 2, 0, QUICK)
    here = make_vec_env("CameraWorld-v0", 2, 0)
    assert pool.spec == here.spec
    assert pool.spec.images == ((0, 1, 8, 8),)
    np.testing.assert_array_equal(pool.reset_all()[:, 64:], here.reset_all()[:, 64:])
    pool.close()


def test_errors(serving):
    server = serving(most_envs=3)
    with pytest.raises(ValueError, match="addresses must be between 1 and n_envs"):
        RemoteEnvPool([server.address] * 3, None, 2)
    with pytest.raises(WorkerRefused, match="n_envs must be at most 3, got 4"):
        RemoteEnvPool([server.address], None, 4)
    with pytest.raises(WorkerRefused, match="environment is CartPole-v1, but the learner expects Pendulum-v1"):
        RemoteEnvPool([server.address], "Pendulum-v1", 1)
    with pytest.raises(WorkerRefused, match=r'but the learner expects CartPole-v1 with kwargs=\{"a": 1\}'):
        RemoteEnvPool([server.address], "CartPole-v1", 1, kwargs={"a": 1})
    with pytest.raises(ValueError, match="env must be an id, workers 0"):
        make_vec_env("CartPole-v1", 2, 0, workers=1, remote=RemoteConfig([server.address]))
    with pytest.raises(WorkerLost, match="cannot be reached: connection refused"):
        RemoteEnvPool(["127.0.0.1:1"], None, 1)
    with pytest.raises(ValueError, match="ca must be set for a worker on another machine"):
        RemoteEnvPool(["192.0.2.1:7711"], None, 1)
    for values, output in (
        ({"addresses": ["host"]}, "host:port"),
        ({"cert": "a"}, "together with key"),
        ({"timeout_s": 0}, "> 0"),
    ):
        with pytest.raises(ValueError, match=output):
            RemoteConfig(**values)


@pytest.mark.slow
def test_many_starts_and_stops_leave_nothing(serving, eventually):
    def held():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def once():
        server = serving()
        pool = RemoteEnvPool([server.address], None, 2, 0, QUICK)
        pool.step_all([0, 1])
        pool.close()
        server.stop()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port), 1.0)

    for _ in range(3):
        once()
    time.sleep(0.5)
    files, threads = held()
    for _ in range(10):
        once()
    eventually(lambda: held()[0] <= files + 3 and held()[1] <= threads + 3)


def test_masks_of_legal_actions_equal_those_of_local_environments(serving):
    env = "rlox/MaskedTMaze-v0"
    server = serving(env)
    local = make_vec_env(env, 5, 7)
    with RemoteEnvPool([server.address, serving(env).address], env, 5, 7) as pool:
        assert pool.spec == local.spec
        assert pool.spec.masked
        assert pool.spec.mask_source == local.spec.mask_source == 'info["action_mask"]'
        assert np.array_equal(pool.reset_all(), local.reset_all())
        rng = Rng(0)
        for _ in range(30):
            assert np.array_equal(pool.action_masks(), local.action_masks())
            actions = pool.spec.random_actions(rng, 5, pool.action_masks())
            equal(pool.step_all(actions), local.step_all(actions))
        masks = pool.action_masks()
        server.stop(0.0)
        with pytest.warns(RuntimeWarning, match="continue at"):
            out = pool.step_all(actions)
        assert np.array_equal(out["final_action_mask"][:2], masks[:2])
        assert out["action_mask"][:2].all()  # of the first step of an episode
