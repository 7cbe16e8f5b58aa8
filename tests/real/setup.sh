#!/usr/bin/env bash
# Installs what the tests on real launchers need, on Debian or Ubuntu, as root: SLURM and munge.
# Nothing is configured and nothing is started: each test runs a cluster of its own.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge iproute2 util-linux
