#!/usr/bin/env bash
# Everything that needs a GPU, by steps, on a machine with one GPU and no network.
#
#   benchmarks/gpu_session.sh                  lists the steps, by calls of less than ten minutes
#   benchmarks/gpu_session.sh 1                the steps of a call: seven calls are all of it
#   benchmarks/gpu_session.sh nccl up          these steps, in the order of the list
#   benchmarks/gpu_session.sh --dry-run        on any machine: whether each step would begin
#   benchmarks/gpu_session.sh --wheels .whl    packages that such a machine may lack, to be taken there
#
# A step has a limit of its own, one that fails or hangs does not keep the next from running, and one
# for which no time is left (SECONDS_IN_ALL) is not begun. What it leaves is in $OUT/STEP, by default
# in runs/gpu/STEP: log.txt, its junit file or JSON, recompiles.log (torch's, of all its processes),
# memory.csv (MiB of each process, each second) and summary.json, which has the most of each.
#
# --wheels makes folders of 60 MB at most, for a way that takes no more at a time: $WHEELS/1 and so on.
# A wheel that came in parts is used once all of them are there.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

WHEELS=${WHEELS:-.whl}
# Beside torch, Transformers and accelerate.
LACKING=(cffi cryptography lmdb msgspec pyzmq starlette tomli-w uvicorn zstandard)
CUPY=${CUPY:-cupy-cuda13x fastrlock cuda-pathfinder} # of the CUDA of torch there
PART_MB=58
TOTAL=${SECONDS_IN_ALL:-560}
PYTHON=${PYTHON:-python3}

# call, name, limit in seconds, command: `facts`, `tests FILE...`, `spread FILE...` (tests that compile
# most of the time, by eight processes) or `bench SCRIPT OPTIONS...`
STEPS=(
    "1  facts        60  facts"
    "1  copies       60  tests test_page_locked.py"
    "1  trainer     120  tests test_trainer_gpu.py"
    "1  attention   200  spread test_attention_gpu.py"
    "1  engine      150  tests test_torch_engine_gpu.py"
    "2  vllm_check  280  tests test_vllm_gpu.py::test_publishes_reach_all_workers"
    "3  up_shm      240  bench gpu_run --plane shm"
    "3  planes      200  tests test_planes_gpu.py"
    "4  mfu_06b     140  bench trainer_speed --device cuda --passes 2"
    "4  mfu_06b_16k 140  bench trainer_speed --device cuda --passes 1 --pack-tokens 16384 --micro-tokens 16384"
    "4  mfu_8b      200  bench trainer_speed --device cuda --passes 2 --hidden 4096 --layers 4 --heads 32 --ff 12288"
    "5  up          240  bench gpu_run --plane cuda_ipc"
    "5  kill        260  bench gpu_run --plane cuda_ipc --kill"
    "6  up_vllm     260  bench gpu_run --plane cuda_ipc --engine vllm"
    "6  vllm        190  tests test_vllm_gpu.py::test_three_updates_in_flight_keep_every_request test_vllm_gpu.py::test_a_version_in_gpu_memory_is_mapped_by_the_worker"
    "7  vllm_reload 560  tests test_vllm_gpu.py::test_new_weights_are_served_as_those_from_disk"
)

fetch() { # the wheels for Python 3.12 on x86-64, into $1/1, $1/2, ...
    local all part=1 wheel number
    all=$(mktemp -d)
    # shellcheck disable=SC2086  # packages are words
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --dest "$all" "${LACKING[@]}" $CUPY || return 1
    rm -rf "$1"
    mkdir -p "$1/1"
    for wheel in "$all"/*.whl; do
        number=$(($(stat -c %s "$wheel") / (PART_MB << 20) + 1))
        if [ "$number" = 1 ]; then
            mv "$wheel" "$1/1/"
        else
            for part in $(seq "$number"); do
                mkdir -p "$1/$((part + 1))"
                dd if="$wheel" of="$1/$((part + 1))/${wheel##*/}.${part}of$number" status=none \
                    bs=1M skip=$(((part - 1) * PART_MB)) count=$PART_MB
            done
        fi
    done
    rm -rf "$all"
    du -sh "$1"/*
}

unpack() { # the wheels that are whole, into $WORK/site
    local first name number
    mkdir "$WORK/wheels"
    find "$WHEELS" -type f -name '*.whl' -exec cp {} "$WORK/wheels" \;
    while read -r first; do
        name=$(basename "${first%.1of*}") number=${first##*.1of}
        [ "$(find "$WHEELS" -name "$name.*of$number" | wc -l)" = "$number" ] || continue
        for part in $(seq "$number"); do
            find "$WHEELS" -name "$name.${part}of$number" -exec cat {} \;
        done > "$WORK/wheels/$name"
    done < <(find "$WHEELS" -name '*.whl.1of*')
    if "$PYTHON" -c 'import cupy' 2> /dev/null; then rm -f "$WORK"/wheels/cupy_*; fi
    "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade --target "$WORK/site" \
        "$WORK"/wheels/*.whl
}

facts() { # print this machine's facts
    nvidia-smi 2>&1
    nvidia-smi --query-gpu=index,name,driver_version,memory.total,compute_mode,mig.mode.current --format=csv 2>&1
    nvidia-smi topo -m 2>&1
    local tool
    for tool in nvcc gcc g++ ninja; do
        printf '%s: ' "$tool"
        "$tool" --version 2> /dev/null | grep -m 1 -E '[0-9]+\.[0-9]+' || echo absent
    done
    env | grep -E '^(CUDA|NCCL|VLLM|TORCH|NVIDIA)' | sort
    nproc
    free -g | sed -n 2p
    "$PYTHON" -m pip list 2> /dev/null | grep -i -E '^(torch|triton|vllm|cupy|nvidia|cuda|flash|xformers|transformers|accelerate|peft|numpy)'
    "$PYTHON" -m umbra check
    return 0 # a missing program is a fact too
}

watch_memory() { # into $1; until it is killed
    exec nvidia-smi --query-compute-apps=pid,used_memory,process_name --format=csv,noheader,nounits \
        --loop=1 > "$1" 2> /dev/null
}

run_step() { # step $1 with limit $2 and kind $3; its words follow
    local name=$1 limit=$2 kind=$3
    local folder=$OUT/$name
    shift 3
    case $kind in
        facts)
            export -f facts
            ARGV=(bash -c facts) ;;
        tests | spread)
            ARGV=("$PYTHON" -m pytest -q -m gpu -p no:cacheprovider -o junit_family=xunit1
                "--junit-xml=$folder/junit.xml" "${@/#/tests/gpu/}")
            [ "$kind" = spread ] && ARGV+=(-n 8) ;;
        bench) ARGV=("$PYTHON" "benchmarks/$1.py" "${@:2}" --json "$folder/result.json") ;;
    esac
    if command -v nvidia-smi > /dev/null; then
        watch_memory "$folder/memory.csv" &
        watcher=$!
    fi
    TORCH_LOGS=recompiles TORCH_LOGS_OUT=$folder/recompiles.log \
        timeout --kill-after=5 "$limit" "${ARGV[@]}" > "$folder/log.txt" 2>&1
    code=$?
    if [ -n "${watcher:-}" ]; then
        kill "$watcher"
        wait "$watcher" 2> /dev/null
        unset watcher
    fi
}

summarise() { # the step in folder $1, which took $2 seconds and ended with code $3, of limit $4
    "$PYTHON" - "$@" << 'PYTHON'
import csv, json, re, sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

folder, seconds, code, limit = Path(sys.argv[1]), *map(int, sys.argv[2:])
state = {0: "passed", 124: f"stopped after {limit} s", 137: f"stopped after {limit} s"}.get(code, "failed")
found = {"step": folder.name, "state": state, "seconds": seconds, "exit_code": code}
if (file := folder / "junit.xml").exists():
    suite = ElementTree.parse(file).find(".//testsuite")
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    if code == 0 and counts["skipped"]:  # such as all where there is no GPU: none has passed
        found["state"] = f"skipped {counts['skipped']} of {counts['tests']}"
    found |= counts
    found["measured"] = {p.get("name"): p.get("value") for p in suite.iter("property")}
if (file := folder / "result.json").exists():
    result = json.loads(file.read_text())
    found["rows"] = result["rows"]
    found["missed"] = [goal for goal in result["goals"] if not goal["met"]]
if (file := folder / "recompiles.log").exists():
    found["recompiled"] = Counter(re.findall(r"Recompiling function (\S+)", file.read_text(errors="replace")))
if (file := folder / "memory.csv").exists():
    most = {}
    for row in csv.reader(file.open()):
        if len(row) == 3 and row[1].strip().isdigit():
            process = f"{row[2].strip().rpartition('/')[2]} {row[0]}"
            most[process] = max(most.get(process, 0), int(row[1]))
    found["memory_mib"] = most
(folder / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
print(f"{found['step']:12} {seconds:4} s  {found['state']}")
for name in ("measured", "recompiled", "memory_mib"):
    if found.get(name):
        print(f"    {name}: {', '.join(f'{key} {value}' for key, value in found[name].items())}")
sys.exit(found["state"] != "passed")
PYTHON
}

dry_run() { # the tests of all steps are collected in one process, and the benchmarks checked in another
    local files
    files=$(printf '%s\n' "${STEPS[@]}" | sed -n -E 's/.* (tests|spread) //p' | tr ' ' '\n' | sed 's|^|tests/gpu/|')
    # shellcheck disable=SC2086  # files are words
    "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider --collect-only $files > "$WORK/log.txt" 2>&1 ||
        { cat "$WORK/log.txt"; return 1; }
    printf '%s\n' "${STEPS[@]}" | sed -n 's/.* bench //p' | "$PYTHON" -c '
import runpy, sys
sys.path.insert(0, "benchmarks")
for line in sys.stdin.read().splitlines():
    script, *options = line.split()
    sys.argv = [script, *options, "--check"]
    try:
        runpy.run_path(f"benchmarks/{script}.py", run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
' || return 1
    facts > "$WORK/facts.txt" 2>&1 || return 1
    echo "${#STEPS[@]} steps would begin"
}

list_steps() {
    local call
    for call in 1 2 3 4 5 6 7; do
        echo "call $call, at most $(printf '%s\n' "${STEPS[@]}" |
            awk -v call=$call '$1 == call {n += $3} END {print n}') s:"
        printf '%s\n' "${STEPS[@]}" | awk -v call=$call '$1 == call {printf "    %-12s %4d s\n", $2, $3}'
    done
}

WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
OUT=$(realpath -m "${OUT:-runs/gpu}")
export PYTHON PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
case "${1:-}" in
    "") list_steps; exit ;;
    --dry-run) dry_run; exit ;;
    --wheels) fetch "${2:-$WHEELS}"; exit ;;
    -*) echo "gpu_session.sh: $1 is no option: --dry-run, --wheels DIR, or names of steps" >&2; exit 2 ;;
esac
for wanted in "$@"; do
    if ! printf '%s\n' "${STEPS[@]}" | awk '{print $1; print $2}' | grep -qx -- "$wanted"; then
        echo "gpu_session.sh: there is no step $wanted:" >&2
        list_steps >&2
        exit 2
    fi
done
if [ -n "$(find "$WHEELS" -name '*.whl*' -print -quit 2> /dev/null)" ]; then
    unpack || exit 1
    export PYTHONPATH="$WORK/site:$PYTHONPATH"
fi

failed=0
for step in "${STEPS[@]}"; do
    read -r call name limit words <<< "$step"
    [[ " $* " == *" $name "* || " $* " == *" $call "* ]] || continue
    left=$((TOTAL - SECONDS))
    if [ "$left" -lt 15 ]; then
        printf '%-12s %4d s  not begun: no time was left\n' "$name" 0
        failed=1
        continue
    fi
    [ "$left" -lt "$limit" ] && limit=$left
    rm -rf "${OUT:?}/$name"
    mkdir -p "$OUT/$name"
    began=$SECONDS
    # shellcheck disable=SC2086  # the words of a command
    run_step "$name" "$limit" $words
    if ! summarise "$OUT/$name" $((SECONDS - began)) "$code" "$limit"; then
        failed=1
        tail -n 15 "$OUT/$name/log.txt" | sed 's/^/    /'
    fi
done
exit $failed
