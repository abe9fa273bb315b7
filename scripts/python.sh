# Sourced by the other scripts: sets $python to a Python 3.10 or newer ($PYTHON when that is given), and defines make_venv.

python=
for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python3.13}; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
  echo "Python 3.10 or newer is needed${PYTHON:+, and PYTHON=$PYTHON is not one}; PYTHON=/path/to/python picks one" >&2
  exit 1
fi

make_venv() { # DIR [options of venv]
  "$python" -m venv "${@:2}" "$1" || {
    echo "'$python -m venv' does not work; on Debian or Ubuntu: apt-get install python3-venv" >&2
    exit 1
  }
}
