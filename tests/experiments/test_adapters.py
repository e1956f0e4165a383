"""The comparison of adapters runs from two texts to the page's table, with equal numbers of trained parameters."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from tests.docs.test_pages import tool
from tests.test_experiments import experiment

pytest.importorskip("peft")
pytest.importorskip("matplotlib")


def test_from_texts_to_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = experiment("adapters")
    for name, words in {"one.txt": ["the", "sea", "was"], "two.txt": ["def", "x =", "+ 1"]}.items():
        text = " ".join(random.Random(0).choices(words, k=1000))
        (tmp_path / name).write_text(text, encoding="utf-8")
    small = {"width": 16, "layers": 1, "context": 8, "batch": 2, "pretraining_steps": 2, "steps": 2, "recall_steps": 2}
    small |= {"test_rows": 8, "lora_rank": 2, "timed_widths": [16], "timed_steps": 1, "learning_rates": [1e-3, 10.0]}
    given = [f"{name}={json.dumps(value)}" for name, value in small.items()]
    output, picture = tmp_path / "adapters.jsonl", tmp_path / "adapters.png"
    words = [str(tmp_path / "one.txt"), str(tmp_path / "two.txt"), "--seeds", "0", "1", "--set", *given]
    monkeypatch.setattr(sys, "argv", ["adapters.py", *words, "--output", str(output), "--picture", str(picture)])
    adapters.main()
    assert picture.exists()
    lines = [json.loads(text) for text in output.read_text(encoding="utf-8").splitlines()]
    assert len({line["key"] for line in lines}) == len(lines)
    assert not any(str(tmp_path) in line["command"] for line in lines)
    final = {(x["task"], x["rule"], x["seed"]): x for x in lines if x["phase"] == "final"}
    assert len(final) == 2 * 4 * 2
    counts = {rule: final["adapter text", rule, 0]["result"]["trained"] for rule in adapters.METHODS}
    assert counts["base"] == 0
    assert all(abs(counts[rule] / counts["lora"] - 1) < 0.15 for rule in ("prism", "both"))
    for rule in ("lora", "prism", "both"):
        tries = [x for x in lines if (x["task"], x["rule"], x["phase"]) == ("adapter text", rule, "search")]
        best = min(tries, key=lambda line: line["result"]["validation"])["learning_rate"]
        assert [line["learning_rate"] for line in tries] == [1e-3, 10.0]
        assert [final["adapter text", rule, seed]["learning_rate"] for seed in (0, 1)] == [best, best]
        for seed in (0, 1):  # a fine-tuned model differs from the frozen base
            scores = [final["adapter text", name, seed]["result"]["scores"]["second text"] for name in (rule, "base")]
            assert scores[0] != scores[1]

    claims = tool("claims")
    written = claims.blocks(sys.modules["evidence"].Evidence(tmp_path))["adapters"]()
    assert f"| PRISM adapter | {counts['prism']:,} |" in written
    assert "| LoRA |" in written and "times as long as LoRA's" in written.replace("\n", " ")


def test_validation_and_test_of_recall_differ_from_training() -> None:
    adapters = experiment("adapters")
    sample = adapters.recall(adapters.SETTINGS, 4)
    drawn = [sample(adapters.torch.Generator().manual_seed(s))[0] for s in (0, adapters.VALIDATION, adapters.TEST)]
    assert not drawn[0].equal(drawn[1]) and not drawn[0].equal(drawn[2]) and not drawn[1].equal(drawn[2])
