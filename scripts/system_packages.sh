#!/bin/sh
# System packages that some tests use. Installed where that is possible (root, apt); elsewhere those tests skip and say so.
set -eu
want=""
command -v bwrap >/dev/null 2>&1 || want="$want bubblewrap"
command -v wrk >/dev/null 2>&1 || want="$want wrk"
command -v runsc >/dev/null 2>&1 || want="$want runsc"
[ -n "$want" ] || exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "not installed (needs root and apt):$want; the tests that use them will skip"
    exit 0
fi
echo "installing system packages for the tests:$want"
apt-get update -qq >/dev/null
for package in $want; do
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >/dev/null 2>&1 ||
        echo "not available here: $package; the tests that use it will skip"
done
