#!/usr/bin/env bash
# Check that constraints.txt resolves from the public package index alone: what each command installs, for every Python, on
# Linux and macOS. Says what does not resolve and why, and fails. Needs a network.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/public_index.sh

echo "--editable .[lm,rec]" > "$scratch/demo.in"
echo "--editable .[all,fla]" > "$scratch/all.in"

# resolve "NAME|PYTHON|SYSTEM|ARGUMENTS": prints "ok", or what is wrong.
resolve() {
    IFS="|" read -r name python system arguments <<< "$1"
    local log
    log=$(mktemp -p "$scratch")
    # shellcheck disable=SC2086  # arguments are words
    if public_uv pip compile $arguments --constraint constraints.txt --python-version "$python" --python-platform "$system" \
        --quiet --no-header > "$log" 2>&1; then
        echo ok
    else
        echo "$name does not resolve for Python $python on $system:"
        cat "$log"
    fi
}
export -f resolve public_uv
export uv scratch

for python in 3.11 3.12 3.13 3.14; do
    for system in x86_64-manylinux_2_28 aarch64-apple-darwin; do
        echo "make demo|$python|$system|$scratch/demo.in"
        echo "make test and all extras|$python|$system|$scratch/all.in --group dev"
        echo "make docs|$python|$system|$scratch/demo.in --group docs"
    done
done > "$scratch/wanted"
resolve "$(head -1 "$scratch/wanted")" > /dev/null  # fills the cache of versions that the others share
xargs -d '\n' -n 1 -P 4 bash -c 'resolve "$1"' _ < "$scratch/wanted" > "$scratch/results"

wanted=$(wc -l < "$scratch/wanted")
resolved=$(grep -cx ok "$scratch/results" || true)
grep -vx ok "$scratch/results" >&2 || true
if grep -qi "failed to fetch\|error sending request\|dns error" "$scratch/results"; then
    echo "the package index could not be reached: this needs a network" >&2
fi
echo "constraints.txt: $resolved of $wanted resolutions from the public index"
[ "$resolved" -eq "$wanted" ]
