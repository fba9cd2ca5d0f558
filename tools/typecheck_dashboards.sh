#!/bin/sh
# Type-check the generated dashboards against four lines of Grafana. Needs Node 18 or later and npm.
# The packages go into tests/monitor/typecheck/node_modules, which git ignores.
set -eu
cd "$(dirname "$0")/.."
npm install --prefix tests/monitor/typecheck --no-package-lock --ignore-scripts --no-audit --no-fund
exec "${PYTHON:-python}" -m pytest -q tests/monitor/test_typecheck.py
