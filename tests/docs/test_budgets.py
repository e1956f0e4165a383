"""Comparisons of one corpus with several budgets: which one decides, and what pages say of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.docs.test_claims import CLAIMS, as_built, claims, line
from tests.docs.test_pages import tool

evidence = tool("evidence")
text_comparisons = tool("text_comparisons")

WORDS = {"accuracy": 0.125}


def trained(rule: str, seed: int, score: float, tokens: int, **text: Any) -> dict[str, Any]:
    """A line of a model with PRISM's start."""
    given = line(rule, seed, score, key=f"{rule} {seed} {tokens}", settings=as_built(rule))
    given["settings"] |= {"steps": 10, "batch": 2, "context": 1024}
    longer = {"nats": score, "repeated rare bigrams": 2 * score, "nats at 4,096": score - 0.5}
    given["result"] |= {"tokens": tokens, "parameters": 30_000_000, "scores": longer, "text": text}
    return given


def stored(folder: Path, **files: list[dict[str, Any]]) -> Any:
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return evidence.Evidence(folder)


def both(gain: float, tokens: int, seeds: int) -> list[dict[str, Any]]:
    """Rank 2 and rank 1 that start alike; `gain` is what rank 2 saves."""
    return [
        trained(rule, seed, 3.0 + seed / 100 - (gain if rule == "prism" else 0.0), tokens)
        for rule in ("prism", "gated_delta")
        for seed in range(seeds)
    ]


def test_most_seeds_decide_and_then_most_tokens(tmp_path: Path) -> None:
    check = next(claim for claim in CLAIMS if claim.slug == "gated-delta").check
    for seeds, gain in ((3, "+.2500"), (5, "+.5000")):
        found = check(stored(tmp_path, short=both(0.25, 33_000_000, 5), long=both(0.5, 66_000_000, seeds)))
        assert found.figure.startswith(f"novels {gain}")
    for row in ("33 M tokens, nats | 2.7700", "66 M tokens, nats | 2.5200"):
        assert f"| novels, 30 M, {row}" in found.text  # both are shown


def test_readme_quotes_the_largest_budget_with_enough_seeds(tmp_path: Path) -> None:
    for seeds, said in (
        (2, ".250 ± .000 nats a token on novels (30 M"),
        (3, ".500 ± .000 nats a token on novels (30 M"),
    ):
        found = stored(tmp_path, short=both(0.25, 33_000_000, 5), long=both(0.5, 66_000_000, seeds))
        assert said in claims.on_text(found)
    (tmp_path / "short.jsonl").unlink()
    assert "(30 M parameters, 66 M tokens, 2 seeds)" in claims.on_text(stored(tmp_path, long=both(0.5, 66_000_000, 2)))


def test_readme_has_the_models_of_the_largest_budget_on_every_corpus(tmp_path: Path) -> None:
    def on(task: str, *lines: dict[str, Any]) -> list[dict[str, Any]]:
        return [one | {"task": task, "key": f"{one['key']} {task}"} for one in lines]

    ours = both(0.25, 66_000_000, 2)
    alone = trained("linear", 0, 1.0, 66_000_000)
    found = stored(tmp_path, short=both(1.0, 33_000_000, 5), long=[*on("novels", *ours, alone), *on("code", *ours)])
    rows = [row for row in text_comparisons.overview(found).splitlines() if row.startswith("| ")]
    assert rows == [
        "| model | novels | code | seeds |",
        "| `prism` | 2.755 ± .005 | 2.755 ± .005 | 2 |",
        "| `gated_delta` | 3.005 ± .005 | 3.005 ± .005 | 2 |",
    ]
    assert text_comparisons.overview(evidence.Evidence(tmp_path / "none")).startswith("No comparison")


def test_longer_contexts_and_last_words_are_shown(tmp_path: Path) -> None:
    lines = [trained("prism", 0, 3.0, 1000, lambada=WORDS), trained("gated_delta", 0, 3.25, 1000)]
    found = text_comparisons.contexts(stored(tmp_path, text=lines))
    assert "| rule | 1,024 | 4,096 | LAMBADA |" in found
    assert "| prism | 3.000 | 2.500 | .125 |" in found and "| gated_delta | 3.250 | 2.750 | |" in found
    found = text_comparisons.contexts(stored(tmp_path, text=lines[1:]))
    assert "LAMBADA" not in found and "| gated_delta | 3.250 | 2.750 |" in found
    assert text_comparisons.contexts(stored(tmp_path, text=[line("prism", 0, 3.0)])).startswith("No run")


def test_scores_of_seed_0_alone_are_shown(tmp_path: Path) -> None:
    found = claims.blocks(stored(tmp_path, text=[trained("prism", 0, 3.0, 1000)]))["text"]()
    assert "| prism | 3.000 | | 6.00 | |" in found


def test_the_lead_of_a_start_is_told_for_each_budget(tmp_path: Path) -> None:
    def run(name: str, seed: int, score: float, tokens: int) -> dict[str, Any]:
        given = trained("gated_delta", seed, score, tokens) | {"rule": name, "key": f"{name} {seed} {tokens}"}
        options = {"timescales": [1, 1024], "start": "recall"} if name == "recall" else {}
        given["settings"] |= {"model": {"layers": "gated_delta", "rule_options": {"gated_delta": options}}}
        return given

    short = [run("recall", 0, 3.0, 33_000_000), run("published", 0, 3.5, 33_000_000)]
    short += [run("recall", 1, 3.0, 33_000_000), run("published", 1, 4.0, 33_000_000)]  # a seed that the other lacks
    long = [run("recall", 0, 2.5, 66_000_000), run("published", 0, 2.75, 66_000_000)]
    short += [trained("gated_delta", 0, 2.0, 33_000_000)]  # with another output gate: not the start alone
    found = text_comparisons.recall_start(stored(tmp_path, short=short, long=long)).replace("\n", " ")
    assert "it is .50 after 33 M tokens and .25 after 66 M on novels (1 seed)." in found
    assert "| novels, 66 M tokens | 2.500 | 2.750 | +.250 | 1 |" in found
    (tmp_path / "long.jsonl").unlink()
    assert "lead" not in text_comparisons.recall_start(evidence.Evidence(tmp_path))


def test_recommenders_that_start_alike_come_before_published_ones(tmp_path: Path) -> None:
    def ranked(model: str, log: str, score: float) -> list[dict[str, Any]]:
        result = {"scores": {"NDCG@10": score}, "better": "higher", "metric": "NDCG@10", "parameters": 10}
        more = {"settings": ["epochs=1"], "task": log, "result": result, "function": ""}
        return [line(model, seed, None, key=f"{model} {log} {seed}", **more) for seed in range(3)]

    published = [*ranked("gated_delta", "ml-1m", 0.1), *ranked("prism-2", "ml-1m", 0.2)]
    check = next(claim for claim in CLAIMS if claim.slug == "gated-delta").check
    found = check(stored(tmp_path, recommend=published))
    assert found.figure.startswith("ML-1M +.1000") and "not the rank alone" in found.text.replace("\n", " ")
    found = check(stored(tmp_path, recommend=[*published, *ranked("prism-1", "ml-1m", 0.15)]))
    assert found.figure.startswith("ML-1M +.0500") and "not the rank alone" not in found.text.replace("\n", " ")


def test_hits_on_a_log_count_only_if_both_start_alike(tmp_path: Path) -> None:
    def ranked(model: str, hits: float) -> list[dict[str, Any]]:
        scores = {"NDCG@10": 0.1, "HR@200": hits, "AUC": 0.9}
        result = {"scores": scores, "better": "higher", "metric": "NDCG@10"}
        more = {"settings": ["epochs=1"], "task": "ml-100k-gaps", "result": result, "function": ""}
        return [line(model, seed, None, key=f"{model} {seed}", **more) for seed in range(3)]

    check = next(claim for claim in CLAIMS if claim.slug == "retrieval").check
    text, logs = both(0.01, 33_000_000, 3), [*ranked("gated_delta", 0.5), *ranked("prism-2", 0.8)]
    found = check(stored(tmp_path, text=text, recommend=logs))
    assert "| ml-100k-gaps, HR@200 | .8000 ± .0000 | .5000" in found.more and "HR@200" not in found.text + found.figure
    found = check(stored(tmp_path, text=text, recommend=[*logs, *ranked("prism-1", 0.6)]))
    assert "HR@200 +.20 ± .00" in found.figure
    assert "| ml-100k-gaps, HR@200 | .8000 ± .0000 | .6000" in found.text
