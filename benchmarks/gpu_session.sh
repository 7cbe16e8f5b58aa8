#!/usr/bin/env bash
# Everything that needs a GPU, in the order of its worth, on a machine with one GPU and no network.
#
#   benchmarks/gpu_session.sh --wheels .whl    packages that such a machine may lack, to be taken there
#   benchmarks/gpu_session.sh                  all steps; results in $OUT, or in runs/gpu
#   benchmarks/gpu_session.sh nccl up          these steps
#   benchmarks/gpu_session.sh --dry-run        on any machine: whether each step would begin
#
# It takes eight minutes at most (SECONDS_IN_ALL). A step has a limit of its own, one that fails or
# hangs does not keep the next from running, and one for which no time is left is not begun.
# $OUT/summary.json has a row for each step as soon as it ends; session.tar.gz its junit file or JSON,
# its output, and what `umbra check` says.

set -uo pipefail
cd "$(dirname "$0")/.." || exit 1

WHEELS=${WHEELS:-.whl}
# Beside torch, CuPy, Transformers and accelerate.
LACKING=(cffi cryptography lmdb msgspec pyzmq starlette tomli-w torchao uvicorn zstandard)
TOTAL=${SECONDS_IN_ALL:-480}
PYTHON=${PYTHON:-python3}

# name, limit in seconds, command: `tests FILE...` or `bench SCRIPT OPTIONS...`
STEPS=(
    "trainer    120  tests test_trainer_gpu.py test_checkpoints_gpu.py"
    "copies      60  tests test_page_locked.py"
    "engine      60  tests test_torch_engine_gpu.py"
    "up_shm     120  bench gpu_run --plane shm"
    "cuda_ipc    60  tests test_cuda_ipc.py"
    "nccl        90  tests test_nccl.py"
    "planes      90  tests test_hub_planes.py"
    "up         120  bench gpu_run --plane cuda_ipc"
    "kill       120  bench gpu_run --plane cuda_ipc --kill"
    "attention  300  tests test_attention_gpu.py"
    "experts    120  tests test_experts_gpu.py"
    "mfu_06b    240  bench trainer_speed --device cuda --passes 2"
    "mfu_8b     180  bench trainer_speed --device cuda --passes 2 --hidden 4096 --layers 4 --heads 32 --ff 12288"
    "vllm       120  tests test_vllm_gpu.py"
)

fetch() { # the wheels, for Python 3.12 on x86-64
    "$PYTHON" -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp --platform manylinux_2_34_x86_64 --platform manylinux_2_28_x86_64 \
        --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --dest "$1" "${LACKING[@]}" && du -sh "$1"
}

command_of() { # fills ARGV with the command of step $1; its words follow
    local name=$1 kind=$2
    shift 2
    if [ "$kind" = tests ]; then
        ARGV=("$PYTHON" -m pytest -q -m gpu -p no:cacheprovider "${@/#/tests/gpu/}")
    else
        local script=$1
        shift
        ARGV=("$PYTHON" "benchmarks/$script.py" "$@")
    fi
    if [ -n "$DRY" ]; then
        [ "$kind" = tests ] && ARGV+=(--collect-only) || ARGV+=(--check)
    elif [ "$kind" = tests ]; then
        ARGV+=("--junit-xml=$WORK/$name.xml")
    else
        ARGV+=(--json "$WORK/$name.json")
    fi
}

skipped() { # whether tests of step $1 were skipped, such as all where there is no GPU: none has passed
    [ -f "$WORK/$1.xml" ] || return 1
    SKIPPED=$(grep -o 'skipped="[0-9]*" tests="[0-9]*"' "$WORK/$1.xml" | sed 's/[^0-9 ]//g; s/ / of /')
    [ "${SKIPPED%% *}" -gt 0 ]
}

DRY=
case "${1:-}" in
    "") ;;
    --dry-run) DRY=1 ;;
    --wheels) fetch "${2:-$WHEELS}"; exit ;;
    -*) echo "gpu_session.sh: $1 is no option: --dry-run, --wheels DIR, or names of steps" >&2; exit 2 ;;
esac
if [ -z "$DRY" ] && [ $# -gt 0 ]; then # the steps that were named, in their order
    chosen=()
    for step in "${STEPS[@]}"; do [[ " $* " == *" ${step%% *} "* ]] && chosen+=("$step"); done
    if [ ${#chosen[@]} -lt $# ]; then
        echo "gpu_session.sh: the steps are: ${STEPS[*]%% *}" >&2
        exit 2
    fi
    STEPS=("${chosen[@]}")
fi

OUT=${OUT:-runs/gpu}
WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$OUT"
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
if [ -z "$DRY" ] && compgen -G "$WHEELS/*.whl" > /dev/null; then
    "$PYTHON" -m pip install --quiet --no-index --no-deps --upgrade \
        --target "$WORK/site" "$WHEELS"/*.whl || exit 1
    export PYTHONPATH="$WORK/site:$PYTHONPATH"
fi

failed=0
rows=()
[ -n "$DRY" ] || timeout 60 "$PYTHON" -m umbra check > "$WORK/check.log" 2>&1 # GPUs, versions
if [ -n "$DRY" ]; then # the tests of all steps are collected in one process
    files=$(printf '%s\n' "${STEPS[@]}" | sed -n 's/.* tests //p' | xargs)
    benches=()
    for step in "${STEPS[@]}"; do [[ $step == *" tests "* ]] || benches+=("$step"); done
    STEPS=("tests 600 tests $files" "${benches[@]}")
fi
for step in "${STEPS[@]}"; do
    read -r name limit words <<< "$step"
    left=$((TOTAL - SECONDS))
    if [ -z "$DRY" ] && [ "$left" -lt 15 ]; then
        state="not begun: no time was left" code=null took=0
    else
        [ -z "$DRY" ] && [ "$left" -lt "$limit" ] && limit=$left
        # shellcheck disable=SC2086  # the words of a command
        command_of "$name" $words
        began=$SECONDS
        timeout --kill-after=5 "$limit" "${ARGV[@]}" > "$WORK/$name.log" 2>&1
        code=$? took=$((SECONDS - began))
        case $code in
            0) state=passed && skipped "$name" && state="skipped $SKIPPED" ;;
            124 | 137) state="stopped after $limit s" ;;
            *) state=failed ;;
        esac
    fi
    [ "$state" = passed ] || failed=1
    printf '%-10s %4d s  %s\n' "$name" "$took" "$state"
    [ "$state" = passed ] || tail -n 15 "$WORK/$name.log" 2> /dev/null | sed 's/^/    /'
    rows+=("{\"step\": \"$name\", \"state\": \"$state\", \"exit_code\": $code, \"seconds\": $took}")
    if [ -z "$DRY" ]; then
        (IFS=,; printf '[%s]\n' "${rows[*]}") > "$OUT/summary.json"
        tar -C "$WORK" --exclude=./site -czf "$OUT/session.tar.gz" .
    fi
done
exit $failed
