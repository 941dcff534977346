#!/bin/sh
# Build the environment in which verl's or slime's own code runs for the tests: .venvs/verl, .venvs/slime (2 to 3 GB each,
# of which .venvs/verl shares most with the development environment on disk).
#     sh tests/backends/environment.sh verl|slime
# Both pin libraries that contradict each other's and ours, hence one environment each. BASE is the Python of an environment
# that has uv and torch, the development environment unless told otherwise.
set -eu
cd "$(dirname "$0")/../.."
name=$1
base=${BASE:-.venv/bin/python}
home=.venvs/$name
case $name in
verl | slime) wanted=tests/backends/$name/requirements.txt ;;
*)
    echo "verl or slime?" >&2
    exit 2
    ;;
esac
# Made for these requirements and still there: nothing to do.
cmp -s "$wanted" "$home/.ready" && "$home/bin/python" -c '' 2>/dev/null && exit 0
rm -rf "$home"
"$base" -m uv venv -q --python "$base" "$home"
python=$home/bin/python

# The same torch as in the development environment, as hard links: it takes a second where pip needs a minute. Where that
# cannot be (another Python, a file system without links), through pip, which honours PIP_FIND_LINKS: see constraints.txt.
where='import sysconfig; print(sysconfig.get_paths()["purelib"])'
from=$("$base" -c "$where") to=$("$python" -c "$where")
if [ "$(basename "$(dirname "$from")")" != "$(basename "$(dirname "$to")")" ] ||
    ! cp -al "$from/torch" "$from/torchgen" "$from/functorch" "$from"/torch-*.dist-info "$to/" 2>/dev/null; then
    rm -rf "$to"/torch "$to"/torchgen "$to"/functorch "$to"/torch-*.dist-info
    "$base" -m pip --python "$python" install -q --disable-pip-version-check -c constraints.txt torch
fi

install() { # A package index that stumbles is asked once more.
    set -- "$base" -m uv pip install -q --python "$python" -c constraints.txt "$@"
    "$@" || { sleep 5 && "$@"; }
}
install -r "$wanted" -e '.[gateway]'
if [ "$name" = slime ]; then
    # SGLang for its argument parser. Without dependencies, which would bring CUDA; torchvision 0.15 is the last that can be
    # imported without its compiled part.
    install --no-deps sglang==0.5.15.post1 triton torchvision==0.15.2
fi
cp "$wanted" "$home/.ready"
