"""Install the wheel, then the sdist, into an empty environment. The README's first Python example must run there, and the
commands, which need extras, must say so.

python scripts/check_dist.py dist          # after `python -m hatchling build`; needs a package index or its cache
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def first_example(page: str) -> str:
    """The first Python block of a Markdown page."""
    found = re.search(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError("README.md has no Python block")
    return found[1]


def only(folder: Path, pattern: str) -> Path:
    """The only file that matches a pattern. Raises an error for several, so that no old version is tested by mistake."""
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise ValueError(f"{folder} holds {len(found)} files {pattern}, expected one: empty it and build again")
    return found[0]


def check_advice(command: list[str | Path], empty: str) -> None:
    """Without extras a command fails with one sentence that says what to install."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=empty)
    advice = done.stderr.strip()
    if done.returncode != 2 or "pip install" not in advice or "\n" in advice:
        raise ValueError(
            f"{command} ended with {done.returncode}, expected 2 and a sentence with pip install:\n{advice}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheel and the sdist are")
    folder = parser.parse_args().folder.resolve()
    example = first_example((ROOT / "README.md").read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as empty:
        venv.create(Path(empty) / "venv", with_pip=True)
        python = Path(empty) / "venv" / "bin" / "python"
        pip = ["uv", "pip", "install", "--python", python] if shutil.which("uv") else [python, "-m", "pip", "install"]
        pip += ["--quiet", "--constraint", ROOT / "constraints.txt"]
        for archive, how in (
            (only(folder, "*.whl"), []),
            (only(folder, "*.tar.gz"), ["--reinstall" if shutil.which("uv") else "--force-reinstall", "--no-deps"]),
        ):
            subprocess.run([*pip, *how, archive], check=True)
            # Isolated (-I) and from another folder: the source tree must not be what is imported.
            subprocess.run([python, "-I", "-c", example], check=True, cwd=empty)
            for words in ([], ["rules"], ["train", "lm"], ["train", "rec", "--help"], ["serve", "rec", "runs/shop"]):
                check_advice([python.with_name("prism"), *words], empty)
                check_advice([python, "-I", "-m", "prism", *words], empty)
            print(f"{archive.name}: the README's example ran in an empty environment, and commands named their extras")


if __name__ == "__main__":
    main()
