"""``rlox bench data``, ``rlox bench train`` and ``rlox bench learn``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlox_cli.config.completion import complete
from rlox_cli.terminal.options import PASS_ON, Imports, Json
from rlox_cli.terminal.process import report_exceptions

bench = typer.Typer(help="Measure rlox against its peers on this machine.", no_args_is_help=True)


@bench.command()
def data(
    peer_python: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Python interpreter with peers that this one lacks: the original rlox, Stable-Baselines3, TorchRL, "
            "gymnasium. Can be repeated.",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Only measure these operations or groups: gae, buffers, …")
    ] = None,
    samples: Annotated[
        int, typer.Option(min=3, max=1_000_000, help="Number of timings per system, operation and size.")
    ] = 210,
    rounds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Number of rounds in which the systems take turns.")
    ] = 3,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write data.json and data.png to this folder.")
    ] = None,
) -> None:
    """Time every operation of the data plane: environments, buffers, advantages, tokens.

    Each system runs in its own process with one thread, and the systems take
    turns; only ratios within one run are meaningful. A ratio is the peer's median
    time divided by that of rlox: above 1, rlox is faster.

    \b
    rlox bench data                       compare with NumPy and installed peers
    rlox bench data --only 'gae|kl' --rounds 5
    rlox bench data --peer-python ~/original/bin/python --out benchmarks
    """
    with report_exceptions("bench"):
        from rlox_cli.bench.data import main

        main(peer_python or [], only, samples, rounds, out)


@bench.command(name="train")
def bench_train(
    cases: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CASE",
            help="By default ppo, a2c, dqn, sac, custom, solve, process, busy; also grpo, grpo-sum, grpo-large, dpo.",
        ),
    ] = None,
    steps: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            max=2**31 - 1,
            help="Environment steps of ppo, a2c and custom (100,000 by default), or updates of grpo… and dpo. Can be "
            "repeated.",
        ),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, max=10_000, help="Number of rounds in which the systems take turns; round k uses seed k."),
    ] = 3,
    peer_python: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Python interpreter with Stable-Baselines3, the original rlox, or TRL."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write train.json and train.png to this folder.")
    ] = None,
) -> None:
    """Time whole trainings from end to end, and report what each system learned.

    Each training runs in its own process with one thread and equal settings, and
    the systems take turns; only ratios within one run are meaningful. CPU seconds
    are those of the training call alone. Wall seconds of ppo are those with each
    system's better number of threads.

    \b
    rlox bench train ppo            native and PyTorch path, and installed peers
    rlox bench train ppo --steps 50000 --rounds 5
    rlox bench train --peer-python ~/sb3/bin/python --out benchmarks
    rlox bench train grpo dpo --peer-python ~/trl/bin/python

    \b
    ppo, a2c   the training call alone
    dqn, sac   the same, for 10,000 steps
    custom     PPO with a custom policy in PyTorch
    solve      tuned PPO until the last 100 episodes average 475
    process    rlox train as a command, compared with scripts that do the same
    busy       the same while all other cores are busy
    grpo       a small language model learns to copy a digit, compared with TRL
    grpo-sum   the same, adding two digits
    grpo-large the same, 2.4 million parameters, 64 completions of 64 tokens
    dpo        DPO on pairs of a right and a wrong sum, compared with TRL
    """
    with report_exceptions("bench"):
        from rlox_cli.bench.train import main

        main(cases or [], steps or [], rounds, peer_python or [], out)


@bench.command(context_settings={**PASS_ON, "allow_interspersed_args": True})
def learn(
    context: typer.Context,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings, as for `rlox train`.", autocompletion=complete),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=100_000, help="Number of seeds for each combination of settings.")
    ] = 5,
    first_seed: Annotated[int, typer.Option(min=0, max=2**62, help="The first seed.")] = 100,
    against: Annotated[
        str | None,
        typer.Option(metavar="sb3|FILE", help="What to compare with: Stable-Baselines3, or an earlier learn.json."),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder with recorded curves of sb3, CELL-sSEED.json.")
    ] = None,
    peer_python: Annotated[
        list[Path] | None,
        typer.Option(metavar="PATH", help="Python interpreter with sb3, to train it instead. Can be repeated."),
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Folder of the runs: finished runs in it are reused, interrupted ones are resumed."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=4096, help="Number of parallel processes, each for several seeds.")
    ] = 1,
    threshold: Annotated[
        float | None, typer.Option(help="Report when this return is reached; by default the reference.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(min=0.0, help="How much better the others may be; by default a tenth of their score."),
    ] = None,
    score_only: Annotated[bool, typer.Option("--score-only", help="Skip the fingerprint.")] = False,
    json: Json = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write learn.json and learn.png to this folder.")
    ] = None,
    imports: Imports = None,
) -> None:
    """Train several seeds and judge the result: PASS (exit code 0), FAIL (1) or NEED MORE SEEDS (3).

    The score is the interquartile mean (IQM) of the last evaluations, with a
    stratified 95 % bootstrap interval. It is compared with the `reference:` of
    the tuned settings and with other runs (--against). If rlox ships nominal runs
    for the settings, the losses, gradients, values and counts are compared with
    theirs too, which finds bugs that hardly change the score (the fingerprint).
    The report also has the area under the evaluation curve, the steps and seconds
    to the threshold, and the probability of improvement.

    \b
    rlox bench learn algo=ppo env=CartPole-v1
    rlox bench learn algo=ppo --seeds 40 --jobs 4 --runs outputs/forty
    rlox bench learn algo=ppo,a2c env=CartPole-v1,Acrobot-v1 --out benchmarks
    rlox bench learn algo=ppo --against sb3 --reference curves
    rlox bench learn algo=ppo --against sb3 --peer-python ~/sb3/bin/python

    \b
    compare a change of your own with the version before it:
    rlox bench learn algo=ppo env=Hopper-v5 --seeds 10 --out before
    rlox bench learn algo=ppo env=Hopper-v5 --seeds 10 --against before/learn.json
    """
    with report_exceptions("bench"):
        from rlox_cli.bench.learn import main

        code = main(
            [*(overrides or []), *context.args],
            seeds,
            first_seed,
            against,
            reference,
            peer_python or [],
            runs,
            jobs,
            threshold,
            margin,
            score_only,
            json,
            out,
            imports or [],
        )
    raise typer.Exit(code)
