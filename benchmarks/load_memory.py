"""Host memory of each rank while a sharded trainer loads its model: rows of the files, or all.

    python benchmarks/load_memory.py [--json FILE] [--layers 12] [--ranks 1,2,4]

A bf16 model in several files, dense or of 32 experts, is loaded in float32 by gloo ranks at once:
as the trainer does, each rank reading the rows that it holds, and whole by every rank before it is
sharded, as the trainer did before. The kernel's own peak of the resident set is taken (`VmHWM`),
pages of the files included, beyond what was there before. A rank has to hold its share in any case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import Report
from snapshot_memory import memory, reset_peak
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from umbra.services.config import TrainerConfig
from umbra.services.modeling.models import outline_weights, read_weights
from umbra.services.trainer.filling import place, read
from umbra.services.trainer.ranks import Ranks
from umbra.services.trainer.sharding import decoder_layers, shard

MIB = 1 << 20
CPU = torch.device("cpu")
WIDTH, VOCABULARY = 1024, 16384
METHODS = ("rows", "whole")
KINDS = ("dense", "experts")
SLACK_MIB = 16.0  # the interpreter's own, and the table of names


def write_model(kind: str, layers: int, out: Path) -> None:
    """A random model in bf16, in files of at most 200 MB."""
    fields: dict[str, Any] = {
        "hidden_size": WIDTH, "vocab_size": VOCABULARY, "num_hidden_layers": layers,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "tie_word_embeddings": False,
    }  # fmt: skip
    if kind == "dense":
        config: Any = Qwen3Config(**fields, intermediate_size=4 * WIDTH)
    else:
        config = Qwen3MoeConfig(
            **fields, num_experts=32, moe_intermediate_size=WIDTH // 8, num_experts_per_tok=2
        )
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(out, max_shard_size="200MB")


def run_rank(rank: int, world: int, folder: str, method: str) -> None:
    """Load; print what that took as a JSON line."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}.{method}.group", rank=rank, world_size=world
        )
        dist.barrier()
    ranks, config, directory = Ranks(rank, world), TrainerConfig(), Path(folder)
    before, began = reset_peak(), time.perf_counter()
    files = None
    if method == "rows":
        model, files = outline_weights(AutoModelForCausalLM, directory, "model.path")
    else:
        model = read_weights(AutoModelForCausalLM, directory, torch.float32, "model.path")
    if world > 1:
        shard(model, CPU, ranks, config)
    place(model, CPU, parameters_at=CPU)
    if files is not None:
        read(model, files)
    seconds, peak = time.perf_counter() - began, memory("VmHWM") - before
    layer = max(sum(p.numel() for p in one.parameters()) for one in decoder_layers(model))
    found = {
        "peak": peak,
        "share": sum(_local(p).nbytes for p in model.parameters()),
        "whole": sum(p.numel() for p in model.parameters()) * 4,
        "layer": 4 * max(layer, WIDTH * VOCABULARY),
        "seconds": seconds,
    }
    print(json.dumps(found), flush=True)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def measure(kind: str, method: str, world: int, folder: Path) -> dict[str, Any]:
    """The rank that needs most."""
    argv = [sys.executable, __file__, "--rank"]
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TRANSFORMERS_VERBOSITY": "error"}
    env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    started = [
        subprocess.Popen(
            [*argv, str(rank), str(world), str(folder), method],
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(world)
    ]
    found = [json.loads(one.communicate()[0].splitlines()[-1]) for one in started]
    worst = {key: max(one[key] for one in found) for key in found[0]}
    sizes = {f"{key}_mib": worst[key] / MIB for key in ("peak", "share", "whole", "layer")}
    return {"kind": kind, "method": method, "ranks": world, "seconds": worst["seconds"], **sizes}


def summarise(report: Report) -> None:
    """Peaks by model and ranks; the goal is the share, one layer, and the interpreter's own."""
    cells = {(row["kind"], row["ranks"], row["method"]): row for row in report.rows}
    lines: list[list[Any]] = []
    for kind, ranks in dict.fromkeys((row["kind"], row["ranks"]) for row in report.rows):
        rows, whole = (cells[kind, ranks, method] for method in METHODS)
        sizes = [rows["whole_mib"], rows["layer_mib"], rows["share_mib"]]
        lines.append([kind, ranks, *sizes, rows["peak_mib"], whole["peak_mib"]])
        name = f"MiB beyond share and one layer, {kind}, {ranks} rank{'s' if ranks > 1 else ''}"
        beyond = rows["peak_mib"] - rows["share_mib"] - rows["layer_mib"]
        report.goal(name, beyond, "<", SLACK_MIB)
    columns = ["model", "ranks", "MiB", "largest layer", "share", "peak, by rows", "peak, whole"]
    report.table("memory", columns, lines)


def main() -> int:
    """All cases; 0 if every goal is met."""
    if sys.argv[1:2] == ["--rank"]:
        rank, world, folder, method = sys.argv[2:]
        run_rank(int(rank), int(world), folder, method)
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--ranks", default="1,2,4")
    args = parser.parse_args()
    report = Report("load_memory")
    for kind in KINDS:
        for world in map(int, args.ranks.split(",")):
            with tempfile.TemporaryDirectory() as scratch:
                folder = Path(scratch) / "model"
                write_model(kind, args.layers, folder)
                for method in METHODS:
                    report.add(**measure(kind, method, world, folder))
    report.restate(summarise)
    return 0 if report.show(args.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
