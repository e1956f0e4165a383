#!/usr/bin/env bash
# Install what the tests of `prism serve` use besides Python, where this is root and has apt: PostgreSQL, Chromium.
# Tests that need one that is missing say that they are skipped.
set -euo pipefail

missing=()
compgen -G "/usr/lib/postgresql/*/bin/initdb" > /dev/null || command -v initdb > /dev/null || missing+=(postgresql)
command -v chromium > /dev/null || missing+=(chromium)
command -v curl > /dev/null || missing+=(curl)
if [ ${#missing[@]} -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get > /dev/null; then
    echo "not installed: ${missing[*]}; tests that need them are skipped" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
if ! { apt-get update -qq && apt-get install -qq -y --no-install-recommends "${missing[@]}" > /dev/null; }; then
    echo "apt could not install ${missing[*]}; tests that need them are skipped" >&2
fi
