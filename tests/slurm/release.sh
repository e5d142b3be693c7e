#!/usr/bin/env bash
# Runs tests/slurm on the Slurm and the Python of another Debian release, in a chroot: `make test-slurm RELEASE=trixie`.
# Needs root and debootstrap. The chroot stays in .releases/RELEASE (9 GB) for the next time; delete it to start anew.
# Mounts and processes live in namespaces of their own, so they end with this script.
set -euo pipefail
cd "$(dirname "$0")/../.."
release=${1:?usage: release.sh RELEASE [arguments of pytest]}
shift
root=$PWD/.releases/$release
packages="slurmctld slurmd slurm-client slurmdbd munge mariadb-server openmpi-bin iproute2 zsh g++ git make procps
    python3 python3-dev python3-venv"

[ "$(id -u)" = 0 ] || { echo "release.sh: needs root, to make a chroot" >&2; exit 2; }
command -v debootstrap >/dev/null || { echo "release.sh: apt-get install debootstrap" >&2; exit 2; }
if [ -z "${IN_NAMESPACES:-}" ]; then
    IN_NAMESPACES=1 exec unshare --mount --pid --fork --kill-child --propagation private "$0" "$release" "$@"
fi

if [ ! -e "$root/etc/debian_version" ]; then
    # Debian's own names for its releases; packages come from where this machine gets its own.
    mirror=$(grep -rhosE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list* | head -n 1) || true
    debootstrap --variant=minbase --include=ca-certificates "$release" "$root.part" $mirror
    mv "$root.part" "$root"
fi
# The network as on this machine: names, certificates, and how apt reaches its packages.
cp /etc/resolv.conf /etc/hosts "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
cp /etc/apt/apt.conf.d/* "$root/etc/apt/apt.conf.d/"
printf '#!/bin/sh\nexit 101\n' >"$root/usr/sbin/policy-rc.d"  # apt starts no daemons here
chmod +x "$root/usr/sbin/policy-rc.d"

mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mkdir -p "$root$PWD"
mount --bind "$PWD" "$root$PWD"

accounting=1
[ "$release" != sid ] || accounting=0  # its slurmdbd fails with its libmariadb: "maxmimum allowed number of columns (=0)"

# Not just chroot: a process that enters the namespace of another would leave a chroot.
mkdir -p "$root/.outside"
repository=$PWD
cd "$root"
pivot_root . .outside
# shellcheck disable=SC2016,SC2086
exec chroot . env -i HOME=/root LANG=C.UTF-8 PATH=/opt/laststep/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    DEBIAN_FRONTEND=noninteractive LASTSTEP_REQUIRE_ALL=1 REPOSITORY="$repository" PACKAGES="$(echo $packages)" \
    RELEASE="$release" WORKERS="${WORKERS:-4}" LASTSTEP_ACCOUNTING="$accounting" \
    bash -euc '
        umount -l /.outside
        dpkg -s $PACKAGES >/dev/null 2>&1 || {
            apt-get update -qq
            apt-get install -y -qq --no-install-recommends $PACKAGES >/dev/null
            apt-get clean
        }
        cd "$REPOSITORY"
        [ -x /opt/laststep/bin/python ] || python3 -m venv /opt/laststep
        [ /opt/laststep/installed -nt setup.cfg ] || {
            pip install --quiet --no-cache-dir --editable ".[dev]"
            touch /opt/laststep/installed
        }
        exec python -m pytest -p no:cacheprovider -n "$WORKERS" --dist loadgroup --no-loadscope-reorder tests/slurm \
            --junitxml=".releases/$RELEASE.xml" \
            -o junit_suite_name="Slurm $(slurmctld -V | sed "s/.* //"), $(python --version)$(
                [ "$LASTSTEP_ACCOUNTING" = 1 ] || echo ", no accounting")" "$@"
    ' bash "$@"
