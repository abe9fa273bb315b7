#!/usr/bin/env bash
# demo.sh [arguments of `pageweaver demo`]   set up .venv when that has not been done, then run the demo
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
scripts/setup.sh .venv
exec .venv/bin/pageweaver demo "$@"
