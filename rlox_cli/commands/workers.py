"""``rlox worker`` and ``rlox doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlox_cli.terminal.exits import reported
from rlox_cli.terminal.options import Imports


def worker(
    env: Annotated[str, typer.Option(metavar="ID", help="What env= of `rlox train` takes.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[env.KEY=VALUE]…", help="Keys of the environment.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: one that is free, which is printed.")] = 7711,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="The worker's certificate, PEM.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    tls_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Who must have signed learners' certificates, PEM.")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Holds the token that learners must have.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Serve other machines without TLS or token: anyone can read and change all."),
    ] = False,
    max_sessions: Annotated[int, typer.Option(min=1, max=256, help="Learners' shares at a time.")] = 8,
    max_envs: Annotated[int, typer.Option(min=1, max=2**20, help="Environments of one share.")] = 1024,
    max_message_mb: Annotated[int, typer.Option(min=1, max=1024, help="MiB of one message.")] = 64,
    idle_s: Annotated[float, typer.Option(min=1.0, help="Seconds of silence that end a session.")] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="End five seconds after the last session.")] = False,
    imports: Imports = None,
) -> None:
    """Play environments for learners on other machines.

    \b
    rlox worker --env CartPole-v1
    rlox worker --env Humanoid-v5 env.workers=8
    rlox worker --env Mine-v0 --import my_package 'env.kwargs={size: 9}'
    rlox worker --env ALE/Pong-v5 --host 0.0.0.0 --tls-cert worker.pem --tls-key worker.key --tls-ca ca.pem
      --token-file token

    The learner: rlox train env=CartPole-v1 'remote.addresses=\\[host:7711]', with remote.ca, remote.cert, remote.key
    and remote.token_file where the worker asks for them. Each learner has environments of its own, at most
    --max-sessions shares at a time. Without TLS only this machine is served, unless --insecure.

    Ctrl-C or SIGTERM drains: sessions end with their next step, and learners go on elsewhere. A second one stops at
    once. `rlox doctor host:7711` says how a worker is.
    """
    with reported("worker"):
        from rlox_cli.serve.worker import Options, main

        options = Options(host, port, token_file, tls_cert, tls_key, tls_ca, insecure, max_sessions, max_envs,
                          max_message_mb, idle_s, once)  # fmt: skip
        main(env, overrides or [], imports or [], options)


def doctor(
    addresses: Annotated[list[str], typer.Argument(metavar="HOST:PORT…", help="Workers.")],
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="Holds the workers' token.")] = None,
    ca: Annotated[str | None, typer.Option(metavar="FILE", help="Who signed the workers' certificates, PEM.")] = None,
    cert: Annotated[str | None, typer.Option(metavar="FILE", help="This machine's certificate, PEM.")] = None,
    key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="Seconds that a worker has for an answer.")] = 5.0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Ask workers elsewhere without TLS.")] = False,
) -> None:
    """Ask workers how they are: reachable, version, environment, spaces, sessions, latency, clock.

    \b
    rlox doctor 10.0.0.5:7711 10.0.0.6:7711 --ca ca.pem --cert me.pem --key me.key --token-file token

    Exit code 1 where a session could not begin at all of them.
    """
    with reported("doctor"):
        from rlox.config import RemoteConfig
        from rlox_cli.serve.doctor import main

        well = main(
            RemoteConfig(addresses, token_file, ca, cert, key, timeout_s=timeout_s, reconnect_s=0, insecure=insecure)
        )
    if not well:
        raise typer.Exit(1)
