"""A plan as a batch script for SLURM: one job over all nodes, one step per process."""

from __future__ import annotations

import shlex

from umbra.deploy.cluster import invocation
from umbra.deploy.cluster.invocation import Paths
from umbra.deploy.cluster.plan import Plan, Process

HEAD = """\
#!/bin/bash
# Submit with: sbatch {file}
#SBATCH --job-name={job}
#SBATCH --nodes={count}
#SBATCH --nodelist={nodes}
#SBATCH --exclusive
{gpus}#SBATCH --output={results}/slurm-%j.log
set -euo pipefail

"""

# Exit codes 2, 4 and 7 are final: the same would happen again.
KEEP = """
mkdir -p {results}/logs

# keep NODE GPUS NAME RESTARTS COMMAND...: runs COMMAND on NODE, and again when it fails.
keep() {{
    local node=$1 gpus=$2 name=$3 left=$4 code
    shift 4
    while :; do
        code=0
        srun --nodes=1 --ntasks=1 --nodelist="$node" --overlap \\
            --output={results}/logs/"$name".log --open-mode=append \\
            env CUDA_VISIBLE_DEVICES="$gpus" "$@" || code=$?
        case $code in 0 | 2 | 4 | 7) return "$code" ;; esac
        if [ "$left" -eq 0 ]; then return "$code"; fi
        left=$((left - 1))
        sleep 2
    done
}}

trap 'kill $(jobs -p) 2>/dev/null || true' EXIT

"""

TAIL = """
# The trainer ends the run; the others then leave by themselves.
code=0
wait "$trainer" || code=$?
if [ "$code" -eq 0 ]; then wait || true; fi
exit "$code"
"""


def slurm_script(plan: Plan, paths: Paths, file: str) -> str:
    """The script that `sbatch` takes; `file` is its own path."""
    used = [node for node in plan.nodes if plan.on(node)]
    gpus = {node.gpus for node in used}
    asked = f"#SBATCH --gpus-per-node={max(gpus)}\n" if len(gpus) == 1 and max(gpus) else ""
    results = shlex.quote(paths.results)
    head = HEAD.format(
        file=file,
        job=f"umbra-{plan.config.run.name}",
        count=len(used),
        nodes=",".join(node.name for node in used),
        gpus=asked,
        results=paths.results,
    )
    variables = invocation.environment(plan, paths).items()
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables)
    steps = "".join(_step(plan, process, paths) for process in plan.processes)
    return head + exports + KEEP.format(results=results) + steps + TAIL


def _step(plan: Plan, process: Process, paths: Paths) -> str:
    gpus = ",".join(map(str, process.gpus))
    limit = str(invocation.restarts(process))
    arguments = ["umbra", *invocation.command(plan, process, paths)]
    line = shlex.join(["keep", process.node.name, gpus, process.name, limit, *arguments]) + " &\n"
    return line + ("trainer=$!\n" if process.task == "train" else "")
