# Sourced by pin.sh and resolve.sh: `public_uv …` is uv as on a machine that has only the public package index. No
# configuration, wheels or cache of this machine reach it. A pin that only resolved here went unseen for days.
uv=$(command -v uv || echo "$PWD/.venv/bin/uv")
if ! [ -x "$uv" ]; then
    echo "$0 needs uv: pip install uv" >&2
    exit 1
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# The system's certificates: behind a company's proxy there are no others.
public_uv() {
    env -i PATH=/usr/local/bin:/usr/bin:/bin HOME="$scratch/home" UV_NO_CONFIG=1 UV_SYSTEM_CERTS=1 MACOSX_DEPLOYMENT_TARGET=14.0 "$uv" "$@"
}
