#!/usr/bin/env bash
# install-sglang-cpu.sh VENV_DIR   the two SGLang versions of the tests, for a machine without a GPU
#
# Makes VENV_DIR (or uses it) and installs
#   VENV_DIR/bin/python          a Python with SGLang 0.5.23
#   VENV_DIR/sglang-0.5.17       a folder for PYTHONPATH, with SGLang 0.5.17 and the transformers it needs
# SGLang comes without its dependencies, which would bring PyTorch with CUDA, kernels and a web server: the tests use
# its arguments, KV pool, attention backends and Triton kernels, and need none of those. 2.5 GB, about two minutes.
# Python 3.11 or 3.12; PYTHON=/path/to/python picks one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ $# != 1 ]; then
  echo "usage: scripts/install-sglang-cpu.sh VENV_DIR" >&2
  exit 2
fi
venv=$1
# shellcheck source=scripts/python.sh
. scripts/python.sh

if [ ! -x "$venv/bin/python" ]; then make_venv "$venv"; fi
install() { "$venv/bin/python" -m pip install -q "$@"; }

# What both SGLang versions import. Pinned: newer ones may not fit versions of SGLang that are no longer maintained.
requirements=$(mktemp)
trap 'rm -f "$requirements"' EXIT
cat >"$requirements" <<'EOF'
torch==2.13.0
triton==3.7.1
transformers==5.19.0
apache-tvm-ffi==0.1.11
compressed-tensors==0.18.0
openai==2.8.0
xgrammar==0.2.1
sentencepiece==0.2.1
gguf==0.19.0
numpy==2.4.6
orjson
psutil
pybase64
requests
packaging
pillow
starlette
msgspec
pydantic>=2.6,<3
pyzmq>=25.1.2
tqdm
IPython
aiohttp
dill
einops
partial_json_parser
prometheus_client
EOF
echo "install-sglang-cpu.sh: PyTorch and the libraries that SGLang imports"
install -r "$requirements"
echo "install-sglang-cpu.sh: SGLang 0.5.23"
install --no-deps sglang==0.5.23 torchvision==0.28.0
older=$venv/sglang-0.5.17
if [ ! -d "$older/sglang-0.5.17.dist-info" ]; then
  echo "install-sglang-cpu.sh: SGLang 0.5.17"
  rm -rf "$older"
  # transformers 5.19 registers a model type that this SGLang registers too
  install --no-deps --target "$older" sglang==0.5.17 transformers==5.12.1 tokenizers==0.22.2 huggingface_hub==1.33.0
fi

echo "SGLang 0.5.23: $venv/bin/python"
echo "SGLang 0.5.17: PYTHONPATH=$older $venv/bin/python"
