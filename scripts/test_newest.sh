#!/usr/bin/env bash
# Run the tests with the newest of everything that pyproject.toml allows, in an environment of its own.
set -euo pipefail
if [[ ${1:-} == -* ]]; then
    echo "usage: scripts/test_newest.sh [ENVIRONMENT [PYTEST OPTION …]]    (ENVIRONMENT is build/newest by default)"
    [[ $1 == -h || $1 == --help ]]
    exit
fi
cd "$(dirname "$0")/.."
environment=${1:-build/newest}
if [[ -e $environment && ! -e $environment/pyvenv.cfg ]]; then
    echo "ENVIRONMENT must be a new folder or an environment of Python, which is made anew, got $environment" >&2
    exit 1
fi
rm -rf "$environment"
if command -v uv > /dev/null; then
    uv venv --quiet --python "${PYTHON:-python3}" "$environment"
    uv pip install --quiet --python "$environment/bin/python" --editable ".[all,fla]" --group dev
else
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/python" -m pip install --quiet "pip>=25.1"
    "$environment/bin/python" -m pip install --quiet --upgrade --editable ".[all,fla]" --group dev
fi
"$environment/bin/python" -m pytest -n 2 --dist worksteal "${@:2}"
