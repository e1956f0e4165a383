#!/usr/bin/env bash
# Write constraints.txt: exact versions of all that pyproject.toml names, for every Python and system that it allows, from the
# public package index alone. A version that stands there stays where the ranges allow it.
#
#   scripts/pin.sh                               after a range in pyproject.toml has changed
#   scripts/pin.sh --upgrade-package torch       the newest of one package
#   scripts/pin.sh --upgrade                     the newest of everything; then run the tests
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/public_index.sh

cp constraints.txt "$scratch/constraints.txt"
echo "--editable .[all,fla]" > "$scratch/requirements.in"
public_uv pip compile "$scratch/requirements.in" --group dev --group docs --universal --python-version 3.11 --quiet \
    --no-header --no-annotate --no-emit-package prism-sequence --output-file "$scratch/constraints.txt" "$@"
{
    echo "# Exact versions that \`make\` installs and CI tests. pyproject.toml states the ranges that should work."
    echo "# Made by scripts/pin.sh, checked by \`make resolve\`."
    cat "$scratch/constraints.txt"
} > "$scratch/new.txt"
mv "$scratch/new.txt" constraints.txt
git --no-pager diff --stat -- constraints.txt
