"""A plan as a batch script for SLURM: one job over all nodes, one step per process.

The nodes of the plan say how many GPUs a host must have, not which hosts: the script places them on
those that the job got. Hosts of different numbers of GPUs are the components of a heterogeneous
job.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from umbra.deploy.cluster.cluster_file import Node
from umbra.deploy.cluster.launch import CONFIG_FILE, Launch, Paths, environment
from umbra.deploy.cluster.plan import Plan, Process
from umbra.proto.errors import UsageError
from umbra.services.process.supervisor import FINAL_CODES

SLURM_FILE = "run.sbatch"
DRAIN_S = 120  # between SIGTERM and the end of the time limit: a trainer may have to end its step
FINISH_S = 60  # for the others to leave once the trainer has
KILL_WAIT_S = 25  # SLURM kills 30 s after SIGTERM, unless its KillWait says otherwise

SCRIPT = """\
#!/bin/bash
# Submit with: sbatch {file}
{options}
set -euo pipefail

# The hosts of the job, in the order of the plan's nodes: names, addresses, and the options with
# which srun finds them. The address is the cluster file's, or by which SLURM reaches the host.
hosts=() addresses=() components=()
address() {{
    case $1 in
{addresses}
        *) scontrol show node "$1" --oneliner | sed -n 's/.* NodeAddr=\\([^ ]*\\).*/\\1/p' ;;
    esac
}}
take() {{ # HOST LIST, COMPONENT
    local host
    for host in $(scontrol show hostnames "$1"); do
        hosts+=("$host") addresses+=("$(address "$host")") components+=("$2")
    done
}}
{takes}
if [ "${{#hosts[@]}}" -ne {count} ]; then
    echo "the plan needs {count} hosts, the job has ${{#hosts[@]}}: submit without --nodes" >&2
    exit {usage}
fi

{exports}
mkdir -p {logs}

# step NODE GPUS NAME RESTARTS COMMAND...: runs COMMAND on the host of a node, and again when it
# fails. All steps of a host share its memory and CPUs; each sees the GPUs that are its own.
steps=()
step() {{
    local node=$1 gpus=$2 name=$3 restarts=$4
    shift 4
    again "$restarts" "$name" \\
        srun ${{components[node]}} --nodes=1 --ntasks=1 --nodelist="${{hosts[node]}}" --overlap \\
        --mpi=none --cpu-bind=none --output={pattern}/"$name".log --open-mode=append \\
        env CUDA_VISIBLE_DEVICES="$gpus" "$@" &
    steps+=($!)
}}

# again RESTARTS NAME COMMAND...: runs COMMAND, and so often again within an hour after a pause that
# doubles from 2 to 64 s. Codes {final} are final: the same would happen again.
again() {{
    local most=$1 name=$2 left=$1 pause=2 child="" code began
    shift 2
    trap '[ -z "$child" ] || kill "$child" 2>/dev/null || true; wait; exit 143' TERM
    while :; do
        began=$SECONDS code=0
        "$@" &
        child=$!
        wait "$child" || code=$?
        if [ "$((SECONDS - began))" -ge 3600 ]; then left=$most pause=2; fi
        case $code in {final}) exit "$code" ;; esac
        if [ "$left" -le 0 ]; then
            echo "$name ended with exit code $code and is not restarted" >&2
            exit "$code"
        fi
        echo "$name ended with exit code $code: restart in $pause s" >&2
        sleep "$pause" &
        child=$!
        wait "$child"
        left=$((left - 1)) pause=$((pause < 64 ? 2 * pause : 64))
    done
}}

# await SECONDS: waits for the steps to end, but no longer.
await() {{
    local until=$((SECONDS + $1))
    while [ -n "$(jobs -pr)" ] && [ "$SECONDS" -lt "$until" ]; do sleep 1; done
}}

trap 'kill "${{steps[@]}}" 2>/dev/null || true; await {kill_wait}' EXIT
trap 'exit 143' TERM

{steps}
# The trainer ends the run; the others then leave by themselves.
code=0
wait "$trainer" || code=$?
if [ "$code" -eq 0 ]; then await {finish}; fi
exit "$code"
"""


def slurm_files(
    plan: Plan, config: str, *, out: Path, keys: Path | None, modules: str
) -> dict[str, str]:
    """Return the script that `sbatch` takes, and the run's configuration, whose text is `config`.

    Both go into the folder `out`, which receives the script's output. UsageError says which name or
    path cannot be written in the script.
    """
    results, file = Path(plan.config.run.dir).resolve() / plan.run_id, str(out / SLURM_FILE)
    store, folder = plan.config.buffer.store or str(results / "store"), str(keys or "")
    paths = Paths(str(out / CONFIG_FILE), str(results), store, folder, modules)
    components = _components(plan)
    order = [node.name for nodes in components for node in nodes]
    # See `_quoted`; an idle node has no host, and nobody asks for its address.
    places = {name: f"\0{index}\0" for index, name in enumerate(order)}
    indexed = plan.readdressed(lambda node: places.get(node.name, node.address))
    takes = ['take "$SLURM_JOB_NODELIST" ""']
    if len(components) > 1:
        takes = [
            f'take "$SLURM_JOB_NODELIST_HET_GROUP_{index}" --het-group={index}'
            for index in range(len(components))
        ]
    addresses = (f"{shlex.quote(n.name)}) echo {shlex.quote(n.address)} ;;" for n in plan.nodes)
    variables = environment(indexed, paths).items()
    script = SCRIPT.format(
        file=_line(file),
        options="".join(_options(plan, components, file)),
        addresses="\n".join(f"        {line}" for line in addresses),
        takes="\n".join(takes),
        count=len(order),
        usage=UsageError.exit_code,
        exports="".join(f"export {name}={_quoted(value)}\n" for name, value in variables),
        logs=shlex.quote(f"{results}/logs"),
        pattern=shlex.quote(_pattern(f"{results}/logs")),
        final="|".join(map(str, (0, *FINAL_CODES))),
        kill_wait=KILL_WAIT_S,
        steps="".join(_step(indexed, order, process, paths) for process in indexed.processes),
        finish=FINISH_S,
    )
    return {SLURM_FILE: script, CONFIG_FILE: config}


def _components(plan: Plan) -> list[list[Node]]:
    """Return the nodes that are used, by their number of GPUs: one request of SLURM each.

    Most GPUs first, because SLURM fills the requests in this order: one for nodes without would
    else take nodes that have them.
    """
    by_gpus: dict[int, list[Node]] = {}
    for node in sorted(filter(plan.on, plan.nodes), key=lambda node: -node.gpus):
        by_gpus.setdefault(node.gpus, []).append(node)
    return list(by_gpus.values())


def _options(plan: Plan, components: list[list[Node]], file: str) -> Iterator[str]:
    folder = file.rpartition("/")[0]  # is there when the job begins
    yield _option("job-name", f"umbra-{plan.config.run.name}")
    yield _option("output", f"{_pattern(folder)}/slurm-%j.log")
    yield "#SBATCH --open-mode=append\n#SBATCH --requeue\n"
    for index, nodes in enumerate(components):
        yield "#SBATCH hetjob\n" if index else ""
        yield f"#SBATCH --nodes={len(nodes)}\n#SBATCH --exclusive\n#SBATCH --mem=0\n"
        if nodes[0].gpus:
            yield f"#SBATCH --gpus-per-node={nodes[0].gpus}\n"
        # A lost node does not end the job; the steps are told of the time limit before it comes.
        yield f"#SBATCH --no-kill\n#SBATCH --signal=TERM@{DRAIN_S}\n"
        for option in plan.cluster.slurm_options:
            name, _, value = option.removeprefix("--").partition("=")
            yield _option(name, value) if value else f"#SBATCH --{name}\n"


def _option(name: str, value: str) -> str:
    escaped = re.sub(r'(["\\])', r"\\\1", _line(value))
    return f'#SBATCH --{name}="{escaped}"\n'


def _pattern(path: str) -> str:
    """Return `path` with % escaped, which SLURM would replace."""
    return path.replace("%", "%%")


def _line(text: str) -> str:
    if any(character < " " for character in text):
        raise UsageError(f"{text!r} cannot stand in a script for sbatch: choose another name")
    return text


def _step(plan: Plan, order: list[str], process: Process, paths: Paths) -> str:
    """Return the line that starts `process`; each node has a results folder of its own."""
    node = process.node.name
    entry = Launch(plan, process, paths._replace(results=f"{paths.results}/{node}"))
    gpus = ",".join(map(str, process.gpus))
    words = ["step", str(order.index(node)), gpus, process.name, str(entry.restarts), "umbra"]
    line = " ".join(map(_quoted, [*words, *entry.command])) + "\n"
    return line + ("trainer=$!\n" if process == plan.the("train") else "")


def _quoted(text: str) -> str:
    """Return `text` as a shell word; in place of \\0INDEX\\0 comes the address of a host."""
    if "\0" not in text:
        return shlex.quote(text)
    escaped = re.sub(r'([\\"$`])', r"\\\1", text)
    return '"' + re.sub("\0([0-9]+)\0", r"${addresses[\1]}", escaped) + '"'
