#!/usr/bin/env bash
# setup.sh [VENV_DIR]   make a virtual environment (default .venv) with PageWeaver in it, editable; nothing to do when it is up to date
#
# A Python that already has PyTorch 2.11 to 2.14 (a GPU machine with SGLang, say) lends it to the environment; otherwise
# PyTorch is installed: the build without CUDA's libraries where pip offers one and there is no GPU.
# PYTHON=/path/to/python picks the Python (3.10 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${1:-.venv}
# shellcheck source=scripts/python.sh
. scripts/python.sh

stamp="$("$python" -c 'import sys; print(sys.version, sys.executable)') $(cat pyproject.toml scripts/setup.sh | sha256sum | cut -d' ' -f1)"
if [ -x "$venv/bin/pageweaver" ] && [ "$(cat "$venv/.pageweaver-setup" 2>/dev/null)" = "$stamp" ]; then
  exit 0
fi

has_torch() { "$1" -c 'import sys, torch; sys.exit(not (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15))' 2>/dev/null; }

options=()
if has_torch "$python"; then options=(--system-site-packages); fi
echo "setup.sh: making $venv with $("$python" --version)${options:+ and the PyTorch that it has}"
make_venv "$venv" "${options[@]}"
if ! has_torch "$venv/bin/python"; then
  if [ -n "$(nvidia-smi -L 2>/dev/null)" ]; then torch='torch>=2.11,<2.15'; else torch=torch==2.13.0; fi
  echo "setup.sh: installing $torch"
  "$venv/bin/python" -m pip install -q "$torch"
fi
echo "setup.sh: installing PageWeaver"
"$venv/bin/python" -m pip install -q -e .
echo "$stamp" >"$venv/.pageweaver-setup"
