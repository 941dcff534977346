#!/bin/sh
# System packages that some tests use. Installed where that is possible (root, apt); elsewhere those tests skip and say so.
set -eu
want=""
need() { # PROGRAM PACKAGE...: the packages, unless the program is there
    program=$1
    shift
    PATH="$PATH:/usr/sbin:/sbin" command -v "$program" >/dev/null 2>&1 || want="$want $*"
}
need bwrap bubblewrap
need wrk wrk
need tesseract tesseract-ocr tesseract-ocr-eng
need runsc runsc
need shellcheck shellcheck
need chromium chromium fonts-dejavu-core
# A container engine; without recommended packages Podman comes without its network, and with a runtime that refuses the mixed
# control groups of some machines.
need podman podman
need runc runc
need iptables iptables
[ -e /usr/lib/podman/netavark ] || want="$want netavark"
[ -e /usr/lib/podman/aardvark-dns ] || want="$want aardvark-dns"
# What a base image is made of for the examples' images, which `make nightly` builds.
[ -z "${AGENTCORE_RL_NIGHTLY:-}" ] || need debootstrap debootstrap
# A JDK, and Maven with the plugins that every build asks for, from Debian: the migration example builds offline (230 MB, or 40 MB where
# JDK and Maven are there).
need javac openjdk-17-jdk-headless
need mvn maven
plugins=/usr/share/maven-repo/org/apache/maven/plugins
[ -e /usr/share/maven-repo/junit/junit/4.x ] || want="$want junit4"
[ -e $plugins/maven-surefire-plugin ] || want="$want libsurefire-java"
for plugin in clean compiler jar resources; do
    [ -e $plugins/maven-$plugin-plugin ] || want="$want libmaven-$plugin-plugin-java"
done
[ -n "$want" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "not installed (needs root and apt):$want; the tests that use them will skip"
    exit 0
fi
missing() {
    echo "not available here: $1; the tests that use it will skip"
}
echo "installing system packages for the tests:$want"
apt-get update -qq >/dev/null 2>&1 || echo "the package lists could not be refreshed"
install() {
    # Another run of the tests on this machine may be at it just now.
    DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "$@" >/dev/null 2>&1
}
there=""
for package in $want; do
    if apt-cache show "$package" >/dev/null 2>&1; then there="$there $package"; else missing "$package"; fi
done
# All in one go; if that fails, each for itself.
# shellcheck disable=SC2086  # several packages, none with a blank
[ -z "$there" ] || install $there || for package in $there; do install "$package" || missing "$package"; done
