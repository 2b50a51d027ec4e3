"""Failures: the expected time of a run on machines that fail, such as spot machines, and the best interval of checkpoints.

Model: each of n machines that are there fails after an exponential time, and is replaced after ``replacement_s`` on average,
whatever the others do. A failure and a return stop all machines for a moment; after it the run goes on with those that are
there. A failure loses what was done since the last state in memory. If no machine is left, or without such states, it loses
what was done since the last checkpoint. With k of n machines left, L failures of one per second and replacement after D::

    a         = k L + (n - k) / D                              failures and returns
    S         = t + cost of a save                             t: training between two states or checkpoints
    counted_k = t (e^-aS + (n - k) / (D a) x ((1 - e^-aS) / a - S e^-aS) / S)      training that counts until the next event
    passed_k  = (1 - e^-aS) / a x e^(a x pause)                time that passes; pause: mean of restart and return
    there(T)  = A + (1 - A) x B / T x (1 - e^(-T / B))         A = 1 / (1 + L D), B = A D: mean share of the machines
    work      = T x sum over k of Binomial(k; n, there(T)) x speed_k x counted_k / passed_k        solved for T

Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (2006,
doi 10.1016/j.future.2004.11.016), whose complete model ``efficiency`` extends.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from yolofleet.errors import ConfigError
from yolofleet.plan.forecast import Forecast
from yolofleet.plan.formula import predict
from yolofleet.terminal import duration

COLUMNS = ("fleet", "nothing fails", "expected", "failures", "mean machines", "$", "--save-minutes")
MOST_TIMES = 1000  # times as long as without failures: a longer run counts as one that does not end
MEMORY_S, MEMORY_SHARE = 5.0, 0.01  # interval and cost of a state in memory: docs/failures.md
RESTART_S = 20.5  # after a host is switched off: benchmarks/README.md, "Going on after a fault"
RETURN_S = 1.5  # when a host returns
# longest interval between checkpoints: the model does not know failures of all machines at once
LONGEST_S = 3600.0
NEGLIGIBLE = 6  # standard deviations from the mean; probabilities beyond are left out
MOST_EXPONENT = 700.0  # exp overflows double precision above 709


@dataclass(frozen=True)
class FailureModel:
    """How machines fail, and how the run reacts. All times are in seconds, except ``failures_per_hour``.

    Attributes:
        failures_per_hour: failures of one machine.
        replacement_s: mean time until a lost machine is replaced.
        interval_s: training between two checkpoints.
        save_s: pause of the training for a checkpoint.
        restart_s: from a failure to the next step of the machines that are left.
        return_s: pause of the training when a machine comes back, besides a save.
        start_s: the same as ``restart_s`` if no machine was left.
        memory_s: training between two states in memory; 0 = none: every failure goes back to the last checkpoint.
    """

    failures_per_hour: float
    replacement_s: float
    interval_s: float
    save_s: float
    restart_s: float = RESTART_S
    return_s: float = RETURN_S
    start_s: float = 60.0
    memory_s: float = MEMORY_S

    @property
    def rate_s(self) -> float:
        """Failures of one machine in a second."""
        return self.failures_per_hour / 3600

    @property
    def memory_save_s(self) -> float:
        """Pause of the training for a state in memory."""
        return MEMORY_SHARE * self.memory_s

    @property
    def return_save_s(self) -> float:
        """Seconds of the save before a machine that came back takes part."""
        return self.memory_save_s if self.memory_s else self.save_s

    @property
    def saves(self) -> tuple[float, float]:
        """Seconds for each second of training: with the checkpoints, and with the states in memory."""
        return 1 + self.save_s / self.interval_s, 1 + MEMORY_SHARE * (self.memory_s > 0)


@dataclass(frozen=True)
class Outlook:
    """What failures do to a run.

    Attributes:
        expected_s: of the run with failures. without_s: the same run if nothing fails, with its checkpoints.
        machines: mean number of machines that are there.
        failures: expected number.
    """

    expected_s: float
    without_s: float
    machines: float
    failures: float


Speed = Callable[[int], float]  # machines -> speed, relative to that of all of them


def efficiency(machines: int, failing: FailureModel, *, returning_per_s: float) -> float:
    """Return the seconds of training that count in each second in which ``machines`` machines are there.

    From one saved state to the next: training ends after an interval, at a failure (all is lost), or when a machine comes back
    (all is saved). Failures and returns may hit a restart, too. Without returns this is the complete model of Daly 2006:
    interval x rate / (exp(rate x restart) (exp(rate x (interval + cost)) - 1)).

    Args:
        returning_per_s: rate at which machines come back.
    """
    in_memory = failing.memory_s > 0 and machines > 1
    trained_s = failing.memory_s if in_memory else failing.interval_s
    save_s = failing.memory_save_s if in_memory else failing.save_s
    failing_per_s = machines * failing.rate_s
    any_per_s = failing_per_s + returning_per_s
    # saves of the other kind take their share of the time
    segment_s = trained_s * failing.saves[0 if in_memory else 1] + save_s
    if not any_per_s:
        return trained_s / segment_s
    after_failure_s = failing.restart_s if machines > 1 else failing.start_s
    after_return_s = failing.return_s + failing.return_save_s
    pause_s = (failing_per_s * after_failure_s + returning_per_s * after_return_s) / any_per_s
    ends_early = -math.expm1(-any_per_s * segment_s)
    until_early_s = ends_early / any_per_s - segment_s * (1 - ends_early)  # mean over all segments
    counted_s = trained_s * (1 - ends_early + returning_per_s / any_per_s * until_early_s / segment_s)
    passed_s = ends_early / any_per_s * math.exp(min(any_per_s * pause_s, MOST_EXPONENT))
    return counted_s / passed_s


def with_failures(work_s: float, machines: int, speed: Speed, failing: FailureModel) -> Outlook:
    """Return the expected time of a run that all machines do in ``work_s`` seconds, without failures and checkpoints.

    The machines are independent, so the number of those that are there has a binomial distribution. Its mean, a share
    ``1 / (1 + rate x replacement)`` of all in the long run, falls from all of them at the start.

    Args:
        speed: of a number of machines, relative to all; speed(machines) = 1.
    Raises:
        ConfigError: the run would not end.
    """
    without_s = work_s * math.prod(failing.saves)
    if not failing.failures_per_hour:
        return Outlook(without_s, without_s, machines, 0.0)
    long_run = 1 / (1 + failing.rate_s * failing.replacement_s)
    settles_s = long_run * failing.replacement_s

    @cache
    def counted(available: int) -> float:
        returning = (machines - available) / failing.replacement_s if failing.replacement_s else 0.0
        return speed(available) * efficiency(available, failing, returning_per_s=returning)

    def share_available(seconds: float) -> float:
        """Return the mean share of the machines that are there in the first ``seconds``."""
        if not settles_s:
            return 1.0
        return long_run + (1 - long_run) * settles_s / seconds * -math.expm1(-seconds / settles_s)

    def done(seconds: float) -> float:
        likely = _binomial(machines, share_available(seconds))
        return seconds * sum(share * counted(k) for k, share in likely.items() if k)

    low, high = without_s, MOST_TIMES * without_s
    if done(high) < work_s:
        raise ConfigError(
            f"with {failing.failures_per_hour:g} failures an hour of each of {machines} machines, the run takes more than "
            f"{MOST_TIMES} times as long",
            hint="save more often, or take fewer machines, or machines that fail less often",
        )
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if done(middle) < work_s else (low, middle)
    mean = machines * share_available(high)
    return Outlook(high, without_s, mean, mean * failing.rate_s * high)


def _binomial(count: int, share: float) -> dict[int, float]:
    """Return the probabilities of numbers out of ``count``, without those that are negligible."""
    if share >= 1:
        return {count: 1.0}
    spread = 1 + NEGLIGIBLE * math.sqrt(count * share * (1 - share))
    low, high = max(math.floor(count * share - spread), 0), math.ceil(count * share + spread)
    there, away = math.log(share), math.log1p(-share)  # the probabilities themselves underflow
    return {
        k: math.exp(math.log(math.comb(count, k)) + k * there + (count - k) * away)
        for k in range(low, min(high, count) + 1)
    }


def best_interval_s(work_s: float, machines: int, speed: Speed, failing: FailureModel) -> float:
    """Return the interval between checkpoints with which the run is expected to end first, at most ``LONGEST_S``.

    For one machine it is the optimum of Daly's complete model: 1 - interval / M = exp(-(interval + cost) / M), with the mean
    time M between failures. With states in memory and several machines, only the loss of all of them needs a checkpoint.

    Raises:
        ConfigError: the run would not end with any interval.
    """
    if not failing.failures_per_hour:
        return LONGEST_S

    def expected(logarithm: float) -> float:
        changed = replace(failing, interval_s=math.exp(logarithm))
        try:
            return with_failures(work_s, machines, speed, changed).expected_s
        except ConfigError:
            return math.inf

    # intervals far above the best one do not end, and all are infinite: begin with the shortest
    low, high = math.log(max(0.1 * failing.save_s, 0.1)), math.log(LONGEST_S)
    while high - low > 1e-3:
        third = (high - low) / 3
        if expected(low + third) <= expected(high - third):
            high -= third
        else:
            low += third
    return math.exp((low + high) / 2)


def failure_forecast(
    forecast: Forecast, failures_per_hour: float, replacement_s: float
) -> tuple[list[str], dict[str, Any]]:
    """Return what failures do to a forecast, with the best interval between checkpoints.

    Returns:
        the cells under ``COLUMNS``, and values for JSON. The expected ``run_s`` has the start, ``expected_s`` does not.
    Raises:
        ConfigError: see :func:`with_failures`.
    """
    likely, fleet = forecast.likely, forecast.fleet
    work, start_s = replace(forecast.work, shares=()), likely.parts["start"]  # --shares names all ranks

    @cache
    def speed(machines: int) -> float:
        part = likely if machines == len(fleet) else predict(work, fleet[:machines])
        return part.rate_img_s / likely.rate_img_s

    save_s = max(machine.save_s for machine in fleet)
    work_s = likely.run - start_s - likely.parts["checkpoint"]
    failing = FailureModel(failures_per_hour, replacement_s, LONGEST_S, save_s, start_s=start_s)
    best_s = best_interval_s(work_s, len(fleet), speed, failing)
    found = with_failures(work_s, len(fleet), speed, replace(failing, interval_s=best_s))
    run_s = start_s + found.expected_s
    cost = likely.price_hour * found.machines / len(fleet) * run_s / 3600
    cells = [
        forecast.name,
        duration(start_s + found.without_s),
        duration(run_s),
        f"{found.failures:,.1f}",
        f"{found.machines:,.2f}",
        "-" if math.isnan(cost) else f"{cost:,.0f}",
        f"{best_s / 60:,.1f}",
    ]
    figures = {"fleet": forecast.name, **asdict(found), "run_s": run_s, "interval_s": best_s}
    return cells, figures | {"cost": None if math.isnan(cost) else cost}
