#!/usr/bin/env bash
# test.sh [arguments of pytest]   set up the test environment when that has not been done, then run every test this machine can run
#
# 1. all tests without a GPU, with SGLang 0.5.23;
# 2. the SGLang tests again with SGLang 0.5.17;
# 3. where there is a CUDA device: the GPU tests, in the environment that demo.sh uses.
# The tests without a GPU run in a process per core, at most four; `-n 0` among the arguments runs them in this one.
# VENV=DIR picks the test environment's folder (default .venv-test); PYTHON=/path/to/python picks the Python, 3.11 or 3.12.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=${VENV:-.venv-test}
python_versions="3.11 3.12" # for which the pinned packages of the SGLang tests have wheels
# shellcheck source=scripts/python.sh
. scripts/python.sh

stamp="$("$python" -c 'import sys; print(sys.version, sys.executable)') $(cat pyproject.toml scripts/install-sglang-cpu.sh | sha256sum | cut -d' ' -f1)"
if [ "$(cat "$venv/.pageweaver-setup" 2>/dev/null)" != "$stamp" ]; then
  echo "test.sh: setting up $venv (a few minutes)"
  PYTHON=$python scripts/install-sglang-cpu.sh "$venv"
  echo "test.sh: PageWeaver and the test tools (pip now lists what SGLang misses: all meant, see install-sglang-cpu.sh)"
  "$venv/bin/python" -m pip install -q -e '.[test,dev]'
  echo "$stamp" >"$venv/.pageweaver-setup"
fi

# The tests' tensors are small: more threads only wait for each other, for minutes on a busy machine.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# A module stays together: what its tests share is made once.
spread=(-n logical --maxprocesses 4 --dist loadfile)

echo "== tests without a GPU, SGLang 0.5.23"
"$venv/bin/python" -m pytest -m "not gpu" "${spread[@]}" "$@"

echo "== SGLang tests, SGLang 0.5.17"
PYTHONPATH=$(cd "$venv" && pwd)/sglang-0.5.17 "$venv/bin/python" -m pytest -m "sglang and not gpu" "${spread[@]}" "$@"

if [ -n "$(nvidia-smi -L 2>/dev/null)" ]; then
  echo "== GPU tests"
  scripts/setup.sh .venv
  .venv/bin/python -m pip install -q -e '.[test]'
  .venv/bin/python -m pytest -m gpu "$@"
else
  echo "== no CUDA device here: the GPU tests were not run"
fi
