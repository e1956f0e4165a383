"""Copy the results of a comparison into experiments/results: one line per training, without curves and local paths.

    python experiments/collect.py runs/novels/results.jsonl novels          # experiments/results/novels.jsonl

Of every training the last line stays, but a finished one stays finished. One that was started and never ended becomes
`stopped`. Paths lose their folders, and tracebacks and curves (of which the report has pictures) are left out. Lines of an
earlier copy stay if the new file lacks their training. Where a longer search chose another learning rate, final runs at the
rate of the latest one count, and the phase of others becomes `superseded`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PATH = re.compile(r"(?<![\w.])[~.]*(?:/[\w.~+-]+)+/?")


def without_folders(value: Any) -> Any:
    """The same with every absolute path in its texts reduced to a name."""
    if isinstance(value, dict):
        return {key: without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_folders(item) for item in value]
    return _PATH.sub(lambda match: Path(match[0]).name, value) if isinstance(value, str) else value


def stored(line: dict[str, Any]) -> dict[str, Any]:
    """A line as it is kept."""
    kept = {key: value for key, value in line.items() if key != "details"}
    if "result" in kept:
        kept["result"] = {key: value for key, value in kept["result"].items() if key != "curve"}
    if kept["status"] == "started":
        kept |= {"status": "stopped", "error": "killed"}
    cleaned: dict[str, Any] = without_folders(kept)
    return cleaned


def supersede(lines: Collection[dict[str, Any]]) -> None:
    """Mark finished final runs at another learning rate than the latest one of their task, rule and size."""
    final = [line for line in lines if (line["status"], line.get("phase")) == ("done", "final")]
    latest: dict[tuple[Any, ...], Any] = {}
    for line in sorted(final, key=lambda line: str(line.get("time", ""))):
        latest[line["task"], line["rule"], line.get("state_size")] = line.get("learning_rate")
    for line in final:
        if line.get("learning_rate") != latest[line["task"], line["rule"], line.get("state_size")]:
            line["phase"] = "superseded"


def collect(source: Path, target: Path) -> int:
    """Write the lines of `source` to `target`; returns how many it has now."""
    lines: dict[str, dict[str, Any]] = {}
    about: dict[str, Any] = {}
    for path in (target, source):
        for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            line = json.loads(text)
            known = lines.get(line["key"])
            if known is None or known["status"] != "done" or line["status"] == "done":
                lines[line["key"]] = stored(line)
            about |= {key: line[key] for key in ("machine", "prism", "command") if key in line}
    supersede(lines.values())
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = [{**without_folders(about), **line} for line in lines.values()]  # a line of a start has no machine
    target.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in whole), encoding="utf-8")
    return len(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="results.jsonl of a comparison")
    parser.add_argument("name", help="name of the file in experiments/results")
    arguments = parser.parse_args()
    target = RESULTS / f"{arguments.name}.jsonl"
    print(collect(arguments.source, target), "lines in", target.name)


if __name__ == "__main__":
    main()
