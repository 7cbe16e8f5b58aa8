#!/bin/sh
# Installs the packages in the arguments, and Python's headers if the base has none. Without
# arguments it does nothing: the base image has a compiler, or no apt-get.
set -eu
[ $# -gt 0 ] || exit 0
headers=$(python3 -c 'import sysconfig; print(sysconfig.get_path("include"))')
[ -e "$headers/Python.h" ] || set -- "$@" python3-dev
apt-get update
apt-get install -y --no-install-recommends "$@"
rm -rf /var/lib/apt/lists/*
