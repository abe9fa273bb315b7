# Sourced by the other scripts: sets $python to a Python 3.10 or newer ($PYTHON when that is given), and defines make_venv.
# A script that needs particular versions sets python_versions first, "3.11 3.12" say.

python=
for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.10 python3.13}; do
  if "$candidate" - "${python_versions:-}" >/dev/null 2>&1 <<'PY'; then python=$candidate; break; fi
import sys
wanted = sys.argv[1].split()
sys.exit(sys.version_info < (3, 10) or (wanted != [] and "%d.%d" % sys.version_info[:2] not in wanted))
PY
done
if [ -z "$python" ]; then
  wanted=${python_versions:-3.10 or newer}
  echo "Python ${wanted// 3/ or 3} is needed${PYTHON:+, and PYTHON=$PYTHON is none}; PYTHON=/path/to/python picks one" >&2
  exit 1
fi

make_venv() { # DIR [options of venv]
  "$python" -m venv "${@:2}" "$1" || {
    echo "'$python -m venv' does not work; on Debian or Ubuntu: apt-get install python3-venv" >&2
    exit 1
  }
}
