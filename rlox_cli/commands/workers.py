"""``rlox worker`` and ``rlox doctor``."""

from __future__ import annotations

from typing import Annotated

import typer

from rlox_cli.terminal.options import Imports
from rlox_cli.terminal.process import report_exceptions


def worker(
    env: Annotated[str, typer.Option(metavar="ID", help="The environment, as for env= of `rlox train`.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[env.KEY=VALUE]…", help="Settings of the environment.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0: all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free one.")] = 7711,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="The worker's certificate (PEM).")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key (PEM).")] = None,
    tls_ca: Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificate authority of the learners (PEM).")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the token that learners must have.")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Serve other machines without TLS or token: anyone can read and change all."),
    ] = False,
    max_sessions: Annotated[int, typer.Option(min=1, max=256, help="Maximum number of sessions at once.")] = 8,
    max_envs: Annotated[int, typer.Option(min=1, max=2**20, help="Maximum number of environments per session.")] = 1024,
    max_message_mb: Annotated[int, typer.Option(min=1, max=64, help="Maximum size of a message, in MiB.")] = 64,
    idle_s: Annotated[
        float, typer.Option(min=1.0, max=2**31 - 1, help="End a session after this many seconds of silence.")
    ] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="Exit five seconds after the last session.")] = False,
    imports: Imports = None,
) -> None:
    """Run environments for learners on other machines.

    \b
    rlox worker --env CartPole-v1
    rlox worker --env Humanoid-v5 env.workers=8
    rlox worker --env Mine-v0 --import my_package 'env.kwargs={size: 9}'
    rlox worker --env ALE/Pong-v5 --host 0.0.0.0 --tls-cert worker.pem
      --tls-key worker.key --tls-ca ca.pem --token-file token

    On the learner: rlox train env=CartPole-v1 'remote.addresses=\\[host:7711]',
    with remote.ca, remote.cert, remote.key and remote.token_file if the worker
    requires them. Each learner has environments of its own. Its share of them on
    this worker is a session, and there are at most --max-sessions at a time.
    Without TLS, only this machine is served, unless you add --insecure.

    Ctrl-C or SIGTERM drains the worker: sessions end with their next step, and
    learners continue elsewhere. A second one stops it at once. `rlox doctor
    host:7711` reports the state of a worker.
    """
    with report_exceptions("worker"):
        from rlox_cli.serve.worker import Options, main

        options = Options(host, port, token_file, tls_cert, tls_key, tls_ca, insecure, max_sessions, max_envs,
                          max_message_mb, idle_s, once)  # fmt: skip
        main(env, overrides or [], imports or [], options)


def doctor(
    addresses: Annotated[list[str], typer.Argument(metavar="HOST:PORT…", help="Addresses of the workers.")],
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="File with the workers' token.")] = None,
    ca: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate authority of the workers (PEM).")] = None,
    cert: Annotated[str | None, typer.Option(metavar="FILE", help="This machine's certificate (PEM).")] = None,
    key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key (PEM).")] = None,
    timeout_s: Annotated[
        float, typer.Option(min=0.1, max=2**31 - 1, help="Seconds to wait for a worker's answer.")
    ] = 5.0,
    insecure: Annotated[bool, typer.Option("--insecure", help="Connect to other machines without TLS.")] = False,
) -> None:
    """Check the state of workers: reachable, version, environment, spaces, sessions, latency, clock.

    \b
    rlox doctor 10.0.0.5:7711 10.0.0.6:7711
    rlox doctor 10.0.0.5:7711 --ca ca.pem --cert me.pem --key me.key
      --token-file token

    The exit code is 1 unless a session could begin at every worker.
    """
    with report_exceptions("doctor"):
        from rlox.config import RemoteConfig
        from rlox_cli.serve.doctor import main

        well = main(
            RemoteConfig(addresses, token_file, ca, cert, key, timeout_s=timeout_s, reconnect_s=0, insecure=insecure)
        )
    if not well:
        raise typer.Exit(1)
