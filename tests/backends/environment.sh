#!/bin/sh
# Build the environment in which verl's or slime's own code runs for the tests: .venvs/verl, .venvs/slime (2 to 3 GB each).
#     sh tests/backends/environment.sh verl|slime
# Both pin libraries that contradict each other's and ours, hence one environment each.
set -eu
cd "$(dirname "$0")/../.."
name=$1
home=.venvs/$name
[ -e "$home/.ready" ] && exit 0
rm -rf "$home"
"${PYTHON:-python3}" -m venv "$home"
"$home/bin/python" -m pip install -q --disable-pip-version-check uv
# Through pip, which honours PIP_EXTRA_INDEX_URL: see constraints.txt on small builds of torch.
"$home/bin/python" -m pip install -q --disable-pip-version-check -c constraints.txt torch
install="$home/bin/uv pip install -q --python $home/bin/python -c constraints.txt"
case $name in
verl)
    $install verl==0.9.1 TransferQueue cachetools pyzmq msgspec uvicorn -e '.[gateway]'
    ;;
slime)
    # slime's imports without its GPU stack; the versions are those of slime's container image at 624b824.
    $install -r tests/backends/slime/requirements.txt -e '.[gateway]'
    # SGLang for its argument parser. Without dependencies, which would bring CUDA; torchvision 0.15 is the last that can be
    # imported without its compiled part.
    $install --no-deps sglang==0.5.15.post1 triton torchvision==0.15.2
    ;;
*)
    echo "verl or slime?" >&2
    exit 2
    ;;
esac
touch "$home/.ready"
