#!/bin/sh
# Installs into /opt/umbra what the extras in the arguments need, but not Umbra itself; with `nccl`
# the CuPy for the CUDA of the torch that came. Beside it lie requirements.py, pyproject.toml and
# constraints.txt; PIP_OPTIONS are more options for pip.
set -eu
install() {
    python3 requirements.py "$@" > wanted.txt
    # shellcheck disable=SC2086  # options are words
    python3 -m pip --python /opt/umbra/bin/python install --prefer-binary ${PIP_OPTIONS:-} \
        --constraint=constraints.txt --requirement=wanted.txt
}
extras='' cupy=''
for extra in "$@"; do
    if [ "$extra" = nccl ]; then cupy=wanted; else extras="$extras $extra"; fi
done
# shellcheck disable=SC2086  # extras are words
install $extras
if [ -n "$cupy" ]; then # the import is a test, too: it needs no GPU
    case $(/opt/umbra/bin/python -c 'import torch; print(torch.version.cuda)') in
        12.*) install nccl ;;
        13.*) install nccl-cuda13 ;;
        *) echo "this torch is not built for CUDA 12 or 13: neither is there a CuPy for it" >&2; exit 1 ;;
    esac
fi
# Tests of the packages: a tenth of the cpu image.
find /opt/umbra -type d \( -name tests -o -path '*/torch/test' \) -prune -exec rm -rf {} +
