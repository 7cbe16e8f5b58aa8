"""Predictions for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from umbra.deploy.simulator.prediction import Prediction


def report(run: Prediction, undisturbed: Prediction | None) -> str:
    """One run; `undisturbed` is the same without failures, if there were any."""
    ledger, staleness = run.ledger, run.staleness
    split = (
        f"{staleness['in_flight_mean']:.2f} in flight, {staleness['in_queue_mean']:.2f} in queue"
    )
    lines = [
        ("steps", f"{run.steps} in {run.seconds:,.0f} simulated seconds"),
        ("rates", f"{_number(run.samples_per_s)} samples/s, "
                  f"{_number(run.tokens_per_s)} tokens/s trained, "
                  f"{_number(run.decoded_per_s)} tokens/s decoded"),
        ("a step", f"{_number(run.step_s)} s"),
        ("generators", f"{run.generators}: {_shares(run.generator)}; "
                       f"{run.slots:.0%} of their slots in use"),
        ("trainer", f"on {run.trainer_gpus} GPUs: {_shares(run.trainer)}"),
        ("scorers", _shares(run.scorer)),
        ("staleness", f"mean {staleness['mean']:.2f} ({split}), at most {staleness['max']:.0f}; "
                      + _histogram(run.staleness_counts)),
        ("new weights", f"are served {_number(run.lag_s)} s after their publication"),
        ("samples", f"{ledger.issued:,} issued = {ledger.trained:,} trained + "
                    f"{sum(ledger.ended.values()):,} ended ({_counts(ledger.ended)})"),
        ("told by the broker", _counts(run.counters)),
        ("broker", f"{run.broker_busy:.1%} busy, {_number(run.broker_per_s)} requests/s, "
                   f"each waits {1e3 * run.broker_wait_s:.2f} ms"),
        ("failures", _failures(run, undisturbed)),
    ]  # fmt: skip
    width = max(len(name) for name, _ in lines)
    return "".join(f"{name:{width}}  {text}\n" for name, text in lines if text)


def compared(predictions: Mapping[str, Prediction], base: str, heading: str) -> str:
    """One line for each; speed-ups are over the one called `base`."""
    rows: list[Sequence[str]] = [
        (heading, "trainer GPUs", "generators", "samples/s", "speed-up", "step s", "trainer trains",
         "generators decode", "slots in use", "staleness", "dropped", "broker busy")
    ]  # fmt: skip
    for name, one in predictions.items():
        speed_up = one.samples_per_s / predictions[base].samples_per_s
        rows.append(
            (name, str(one.trainer_gpus), str(one.generators), _number(one.samples_per_s),
             f"{speed_up:.2f}", _number(one.step_s), f"{one.trainer.get('train', 0):.0%}",
             f"{one.generator.get('decoding', 0):.0%}", f"{one.slots:.0%}",
             f"{one.staleness['mean']:.2f}", f"{one.dropped:,}", f"{one.broker_busy:.1%}")
        )  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "".join(
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() + "\n"
        for row in rows
    )


def _failures(run: Prediction, undisturbed: Prediction | None) -> str:
    if undisturbed is None:
        return ""
    cost = 1 - run.samples_per_s / undisturbed.samples_per_s
    return (
        f"{_counts(run.failures) or 'none'}; they cost {cost:.1%} of the samples/s; "
        f"{run.lost_tokens:,} tokens decoded for nothing"
    )


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{share:.1%} {state}" for state, share in shares.items() if share >= 0.0005)


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count)


def _histogram(counts: Iterable[int]) -> str:
    counts = list(counts)
    total = max(sum(counts), 1)
    return ", ".join(f"{index}: {count / total:.0%}" for index, count in enumerate(counts) if count)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
