"""Predictions for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from umbra.deploy.simulator.prediction import Prediction
from umbra.services.reporting.numbers import counts, number
from umbra.services.reporting.tables import aligned, facts


def report(run: Prediction, undisturbed: Prediction | None) -> str:
    """One run; `undisturbed` is the same without failures, if there were any."""
    ledger, staleness = run.ledger, run.staleness
    split = (
        f"{staleness['in_flight_mean']:.2f} in flight, {staleness['in_queue_mean']:.2f} in queue"
    )
    rows = [
        ("steps", f"{run.steps} in {run.seconds:,.0f} simulated seconds"),
        ("rates", f"{number(run.samples_per_s)} samples/s, "
                  f"{number(run.tokens_per_s)} tokens/s trained, "
                  f"{number(run.decoded_per_s)} tokens/s decoded"),
        ("a step", f"{number(run.step_s)} s"),
        ("generators", f"{run.generators}: {_shares(run.generator)}; "
                       f"{run.slots:.0%} of their slots in use"),
        ("trainer", f"on {run.trainer_gpus} GPUs: {_shares(run.trainer)}"),
        ("scorers", _shares(run.scorer)),
        ("staleness", f"mean {staleness['mean']:.2f} ({split}), at most {staleness['max']:.0f}; "
                      + _histogram(run.staleness_counts)),
        ("new weights", f"are served {number(run.lag_s)} s after their publication"),
        ("samples", f"{ledger.issued:,} issued = {ledger.trained:,} trained + "
                    f"{sum(ledger.ended.values()):,} ended ({counts(ledger.ended)})"),
        ("told by the broker", counts(run.counters)),
        ("broker", f"{run.broker_busy:.1%} busy, {number(run.broker_per_s)} requests/s, "
                   f"each waits {1e3 * run.broker_wait_s:.2f} ms"),
        ("failures", _failures(run, undisturbed)),
    ]  # fmt: skip
    return "\n".join(facts(rows)) + "\n"


def compared(predictions: Mapping[str, Prediction], base: str, heading: str) -> str:
    """One line for each; speed-ups are over the one called `base`."""
    rows: list[Sequence[str]] = [
        (heading, "trainer GPUs", "generators", "samples/s", "speed-up", "step s", "trainer trains",
         "generators decode", "slots in use", "staleness", "dropped", "broker busy")
    ]  # fmt: skip
    for name, one in predictions.items():
        speed_up = one.samples_per_s / predictions[base].samples_per_s
        rows.append(
            (name, str(one.trainer_gpus), str(one.generators), number(one.samples_per_s),
             f"{speed_up:.2f}", number(one.step_s), f"{one.trainer.get('train', 0):.0%}",
             f"{one.generator.get('decoding', 0):.0%}", f"{one.slots:.0%}",
             f"{one.staleness['mean']:.2f}", f"{one.dropped:,}", f"{one.broker_busy:.1%}")
        )  # fmt: skip
    return "\n".join(aligned(rows, right=range(1, len(rows[0])))) + "\n"


def _failures(run: Prediction, undisturbed: Prediction | None) -> str:
    if undisturbed is None:
        return ""
    cost = 1 - run.samples_per_s / undisturbed.samples_per_s
    return (
        f"{counts(run.failures) or 'none'}; they cost {cost:.1%} of the samples/s; "
        f"{run.lost_tokens:,} tokens decoded for nothing"
    )


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.1%} {state}" for state, share in shares.items() if share >= 0.0005)


def _histogram(samples: Sequence[int]) -> str:
    total = max(sum(samples), 1)
    return ", ".join(f"{age}: {count / total:.0%}" for age, count in enumerate(samples) if count)
