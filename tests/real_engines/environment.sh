#!/bin/sh
# Build the environment in which vLLM runs for the tests and for `--engine vllm`: .venvs/vllm (2.8 GB).
#     sh tests/real_engines/environment.sh
# BASE is the Python of an environment that has uv, the development environment unless told otherwise.
set -eu
cd "$(dirname "$0")/../.."
base=${BASE:-.venv/bin/python}
home=.venvs/vllm
wanted=tests/real_engines/requirements.txt
# Made for these requirements and still there: nothing to do.
cmp -s "$wanted" "$home/.ready" && "$home/bin/python" -c '' 2>/dev/null && exit 0
rm -rf "$home"
"$base" -m uv venv -q --python "$base" "$home"
python=$home/bin/python
# torch through pip, which honours PIP_FIND_LINKS: see constraints.txt.
"$base" -m pip --python "$python" install -q --no-compile --disable-pip-version-check -c constraints.txt torch
# torch is there; the others are CUDA builds on the package index, which break `import transformers`.
printf '%s; sys_platform == "never"\n' torch torchvision torchaudio torchcodec >"$home/overrides.txt"
install() { # A package index that stumbles is asked once more.
    set -- "$base" -m uv pip install -q --python "$python" --overrides "$home/overrides.txt" "$@"
    "$@" || { sleep 5 && "$@"; }
}
install -r "$wanted"
# Without it the first start takes six minutes instead of one.
"$python" -m compileall -qq -j 2 "$home/lib" || true
cp "$wanted" "$home/.ready"
