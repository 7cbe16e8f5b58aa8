#!/usr/bin/env bash
# Installs what the tests on real launchers need, on Debian or Ubuntu, as root: SLURM and munge, and
# Docker with Compose. Nothing is configured and nothing is started: each test runs clusters and
# daemons of its own.
set -euo pipefail
export DEBIAN_FRONTEND=noninteractive
apt-get update
install() { apt-get install -y --no-install-recommends "$@"; }
install slurmctld slurmd slurm-client munge iproute2 util-linux
install containerd runc iptables tini debootstrap ca-certificates

# Debian 12 has a Docker without Compose. A newer one is unpacked aside, and nothing of it installed.
DOCKER=/opt/umbra-docker
if ! { command -v dockerd && docker compose version && docker buildx version; } >/dev/null 2>&1; then
    aside=$(mktemp -d)
    trap 'rm -rf "$aside"' EXIT
    mkdir -p "$aside"/{lists,cache/archives}/partial "$aside"/{debs,root}
    keyring=/usr/share/keyrings/debian-archive-keyring.gpg
    mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -n 1)
    echo "deb [signed-by=$keyring] $mirror trixie main" >"$aside/sources.list"
    options=(-o "Dir::Etc::sourcelist=$aside/sources.list" -o "Dir::Etc::sourceparts=-"
        -o "Dir::State::lists=$aside/lists" -o "Dir::Cache=$aside/cache" -o "APT::Sandbox::User=root")
    apt-get "${options[@]}" update
    (cd "$aside/debs" && apt-get "${options[@]}" download docker.io docker-cli docker-compose docker-buildx)
    for package in "$aside"/debs/*.deb; do dpkg -x "$package" "$aside/root"; done
    mkdir -p "$DOCKER"/{bin,cli-plugins}
    cp "$aside"/root/usr/sbin/* "$aside/root/usr/bin/docker" "$DOCKER/bin/"
    cp "$aside"/root/usr/libexec/docker/cli-plugins/* "$DOCKER/cli-plugins/"
    ln -sf /usr/bin/tini-static "$DOCKER/bin/docker-init"
fi
