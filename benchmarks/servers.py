"""Tokens per second of a vLLM server under engine vllm-http, against the engine vllm inside.

    python benchmarks/servers.py MODEL [--json FILE] [--passes 3] [--requests 96] [--slots 64]

One `vllm serve` of the build for CPUs and the engine inside, each of one thread, on the same model
and version: the same requests (prompts of 4 to 40 tokens, log-normal answers, median 24 tokens, at
most 256, without a stop token), logprobs included. They take turns, after a pass each that warms
up; CPU seconds are of all processes that take part. A turn in which others took more than
5 % of the machine's CPU does not count, and with fewer than `--passes` that do nothing is written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from long_tail import CONTEXT, Load, long_tailed, make_load
from report import OTHERS_MOST, CpuShare, Report, cpu_seconds, spread

from umbra.proto.records import Sampling
from umbra.services.config.loader import load_config
from umbra.services.generator.engines.engine import Engine, EngineRequest
from umbra.services.generator.vllm.http_engine import HttpEngine
from umbra.services.generator.vllm.options import set_environment
from umbra.services.modeling.models import load_model, outline_model

SERVED, INSIDE = "vllm-http", "vllm"
COLUMNS = ("tokens_per_s", "cpu_s_per_1000")
TRIES = 2  # turns for each that counts
GOAL = 0.97


@contextmanager
def opened(model: Path, slots: int) -> Iterator[tuple[dict[str, Engine], int]]:
    """Yield both engines, which serve the same version, and the server's process."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from fakes.versions import in_memory
    from fakes.vllm_serve import VllmServe, serving

    common = [f"model.path={model}", "generator.device=cpu", "generator.threads=1"]
    common += [f"generator.slots={slots}", f"generator.max_context={CONTEXT}"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = VllmServe(model, Path(folder, "server.log"), context=CONTEXT, slots=slots)
        stack.enter_context(serving(server))
        urls = ["generator.engine=vllm-http", f'generator.urls=["{server.url}"]']
        alike = ["generator.engine=vllm", "generator.engine_args.block_size=32"]
        config, own = (load_config(overrides=common + keys, environ={}) for keys in (urls, alike))
        outline = outline_model(str(model))
        served = HttpEngine(outline, config, stop_ids=())
        stack.callback(served.close)
        set_environment(own.generator)
        from umbra.services.generator.vllm.engine import VllmEngine  # brings vLLM

        inside = VllmEngine(model, outline, own, stop_ids=(), seed=1)
        stack.callback(inside.close)
        whole = load_model(str(model), torch.device("cpu"), torch.float32)
        weights = {name: one.detach() for name, one in whole.named_parameters()}
        manifest, data = in_memory(weights, 4 << 20)
        del whole, weights
        for engine in (served, inside):
            engine.load(manifest, data, 0, "keep")
        yield {SERVED: served, INSIDE: inside}, server.popen.pid


def answer(engine: Engine, load: Load) -> int:
    """Have `engine` answer `load` as a generator does; return the number of tokens."""
    engine.submit(
        EngineRequest(str(i), prompt, Sampling(max_tokens=new), new)
        for i, (prompt, new) in enumerate(load)
    )
    tokens = 0
    while engine.busy:
        tokens += sum(len(output.token_ids) for output in engine.poll(0.05))
    if tokens != sum(new for _, new in load):
        raise RuntimeError(f"{tokens} tokens came back")
    return tokens


def measure(name: str, engine: Engine, load: Load, server: int) -> dict[str, Any]:
    """Return the row of a pass."""
    share, own, apart, began = CpuShare(), cpu_seconds(), cpu_seconds(server), time.perf_counter()
    tokens = answer(engine, load)
    seconds = time.perf_counter() - began
    own, apart = cpu_seconds() - own, cpu_seconds(server) - apart
    return {
        "engine": name,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "cpu_s_per_1000": 1e3 * (own if name == SERVED else own - apart) / tokens,
        "others": share.others(),
    }


def summarise(report: Report) -> None:
    """State the table, and the server over the engine inside."""
    values = {
        (name, column): [row[column] for row in report.rows if row["engine"] == name]
        for name in (SERVED, INSIDE)
        for column in COLUMNS
    }
    cells = [[name, *(spread(values[name, one]) for one in COLUMNS)] for name in (SERVED, INSIDE)]
    report.table("servers", ["engine", "tokens/s", "CPU s per 1,000 tokens"], cells)
    for figure, column in zip(("rate", "cpu"), COLUMNS, strict=True):
        ratio = median(values[SERVED, column]) / median(values[INSIDE, column])
        report.figure(f"{figure}_over_inside", ratio)
    report.figure("others_most", max(row["others"] for row in report.rows))
    rate = report.figures["rate_over_inside"]
    report.goal("tokens/s of a server over the engine inside", rate, ">=", GOAL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of the model")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--slots", type=int, default=64)
    options = parser.parse_args()
    load, report = make_load(options.requests, long_tailed), Report("servers", timed=False)
    counted = 0
    with opened(options.model.resolve(), options.slots) as (engines, server):
        for turn in range(1 + TRIES * options.passes):
            rows = [measure(name, engine, load, server) for name, engine in engines.items()]
            print(turn, *rows, sep="\n", flush=True)
            if turn and max(row["others"] for row in rows) <= OTHERS_MOST:
                counted += 1
                for row in rows:
                    report.add(turn=turn, **row)
            if counted == options.passes:
                report.restate(summarise)
                return 0 if report.show(options.json) else 1
    print(f"others took more than {OTHERS_MOST:.0%} of the CPU in all turns but {counted}")
    return 2


if __name__ == "__main__":
    raise SystemExit(main())
