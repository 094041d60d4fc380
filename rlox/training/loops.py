"""The loop over a dataset, of offline algorithms and language models.

The other loops are `rlox.training.on_policy.on_policy` and `rlox.training.replay.off_policy`. They know no algorithm by
name, and only they advance the step counters.
"""

from __future__ import annotations

import time
from typing import Any

from rlox.processes.failures import Diverged
from rlox.training.algorithm import average_metrics, choose_update, require_finite, to_floats


def offline(algorithm) -> dict[str, float]:
    """Update from samples of a dataset until the horizon is reached or a callback stops the training.

    The horizon, schedules and callbacks count updates. Metrics are reported as in `off_policy`: means over the updates
    since the last report, a hundred times in a training and every 1,000 updates in a long one. ``time/collect_s`` is
    the time spent drawing samples.

    Raises
    ------
    FloatingPointError
        When a metric of a report is not finite.
    """
    c, callbacks, ranks, clock = algorithm.counters, algorithm.callbacks, algorithm.ranks, time.perf_counter
    hooks = ranks if ranks.joined else callbacks  # ranks call hooks, and learn their answers, together
    captured = algorithm._make_updates() if algorithm.backend.captures else None
    update = choose_update(algorithm) if captured is None else captured
    report_every = min(1000, max(1, c.horizon_steps // 100))
    metrics: dict[str, float] = {}
    go_on = hooks.call_hook("on_training_start", algorithm=algorithm)
    algorithm.backend.require_unchanged("train")
    since, since_updates, cpu = clock(), c.updates, time.process_time()
    while go_on and c.updates < c.end:
        history: list[dict[str, Any]] = []
        started, drawing_s, c.in_round = clock(), 0.0, 0
        n = min(report_every - (c.updates - c.horizon_start) % report_every, c.end - c.updates)
        for _ in range(n):
            if captured is not None:  # a sample and an update at once
                captured()
                c.updates += 1
                continue
            drawing = clock()
            try:
                batch = algorithm.sample()
            except Diverged:
                raise
            except Exception as e:
                # A file or a reward function failed, not the learner, so the last update's weights are worth keeping.
                if not ranks.joined:
                    callbacks.on_collection_error(algorithm=algorithm, error=e)
                raise
            drawing_s += clock() - drawing
            history.append(update(batch))
            c.updates += 1
        c.in_round = 1  # the last update
        losses = average_metrics(history) if captured is None else captured.average()
        if ranks.joined:
            losses = ranks.metrics(losses)
        update_s = clock() - started - drawing_s
        require_finite(losses, algorithm)
        metrics = {
            **losses,
            **algorithm.schedule_values(c.progress),
            **to_floats(algorithm._compare_with_data()),
            "time/updates_per_second": (c.updates - since_updates) / (clock() - since),
            "time/collect_s": drawing_s,
            "time/update_s": update_s,
            "time/cpu_s": time.process_time() - cpu,
        }
        now = clock()
        go_on = hooks.call_hook("on_step", algorithm=algorithm, step=c.updates, reward=c.mean_reward, metrics=metrics)
        # Evaluation and saving do not count towards the training's speed.
        since += clock() - now
        cpu = time.process_time()
    algorithm.backend.require_unchanged("train")
    hooks.call_hook("on_training_end", algorithm=algorithm)
    return metrics
