#!/bin/sh
# Installs into /opt/umbra what the extras in the arguments need, but not Umbra itself. Beside it
# lie requirements.py, pyproject.toml and constraints.txt; PIP_OPTIONS are more options for pip.
set -eu
python3 requirements.py "$@" > wanted.txt
# shellcheck disable=SC2086  # options are words
python3 -m pip --python /opt/umbra/bin/python install --prefer-binary ${PIP_OPTIONS:-} \
    --constraint=constraints.txt --requirement=wanted.txt
# Tests of the packages: a tenth of the cpu image.
find /opt/umbra -type d \( -name tests -o -path '*/torch/test' \) -prune -exec rm -rf {} +
