"""What pages say of results is what the results say, and verdicts follow from their numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from prism.lab.statistics import Estimate
from tests.docs.test_pages import ROOT, tool

claims = tool("claims")
import hand_written  # noqa: E402
from criteria import both_ways, judge, judge_equal  # noqa: E402
from evidence import Evidence, is_default, is_prism, is_rule, ranks  # noqa: E402
from verdicts import CLAIMS  # noqa: E402
from wording import number, shown  # noqa: E402


def test_pages_say_what_the_results_say() -> None:
    assert not claims.stale(), "run `python docs/tools/claims.py`"


def test_no_figure_is_written_by_hand() -> None:
    assert not hand_written.by_hand(), "write it from results, say it in words, or see docs/tools/hand_written.py"


def test_every_figure_that_is_allowed_stands_on_its_page() -> None:
    for page, phrases in hand_written.ALLOWED.items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert not [phrase for phrase in phrases if phrase not in text], page


@pytest.mark.parametrize(
    "text",
    [
        "Forward and backward take 2.16 ms.",
        "It is 3.3 times as fast.",
        "It is **22×** as fast.",
        "Memory grows 3.9-fold.",
        "It is 2.5x faster.",
        "A run takes 9 min.",
        "98 percent are right.",
        "The kernel reaches 11.2 TFLOPs.",
        "It takes 0.38 of the time.",
        "It makes 455 thousand\ntokens/s.",
        "The logits err by 6.7 % of their norm.",
        "It keeps 32 MiB.",
        "L = 3 has .2039 ± .0008.",
        "L = 4 has .2157.",
        "It saves 0.15 nats.",
    ],
)
def test_a_hand_written_figure_is_found(text: str) -> None:
    assert len(hand_written.found(text)) >= 1
    assert hand_written.found(f"<!-- claims:x -->\n{text}\n<!-- end -->\n") == []
    assert hand_written.found(text, (" ".join(text.split()),)) == []


@pytest.mark.parametrize(
    "text",
    [
        "16 × 2,048 tokens per step, 118 M parameters, seeds 0, 1, 2",
        "torch 2.11, dropout .2, AdamW 2·10⁻³, betas .9 and .98",
        "`0.57 ms`, $O(10 s)$, [a page](a.md#in-5-minutes)",
        "(8, 4096, 16, 128), heads of 128 × 128, K = 64, L = 2",
        "```sh\nmake demo   # about 5 minutes\n```",
    ],
)
def test_settings_and_sizes_are_no_figures(text: str) -> None:
    assert hand_written.found(text) == []


def test_every_claim_has_its_section() -> None:
    text = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    for claim in CLAIMS:
        section = text.split(f"## {claim.title}\n")[1].split("\n## ")[0]
        assert f"<!-- claims:{claim.slug} -->" in section


def test_a_changed_figure_is_found(tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("<!-- claims:table -->\nold\n<!-- end -->\n", encoding="utf-8")
    assert claims.stale(root=tmp_path) == [page]
    page.write_text(claims.rewritten(page.read_text(encoding="utf-8"), Evidence()), encoding="utf-8")
    assert claims.stale(root=tmp_path) == []
    page.write_text(page.read_text(encoding="utf-8").replace("22 ×", "174 ×"), encoding="utf-8")
    assert claims.stale(root=tmp_path) == [page]


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(ValueError, match="no block 'nosuch'"):
        claims.rewritten("<!-- claims:nosuch -->\n<!-- end -->", Evidence())


def test_without_results_nothing_is_claimed(tmp_path: Path) -> None:
    evidence = Evidence(tmp_path)
    measured = {"speed", "transformer", "gated-delta"}  # these also have figures of earlier runs
    for claim in CLAIMS:
        found = claim.check(evidence)
        if claim.slug not in measured:
            assert found.verdict == "not run yet"
            assert not any(letter.isdigit() for letter in found.figure + found.text)


UP, DOWN, LEVEL, ONE = Estimate(2, 0.4, 3), Estimate(-2, 0.4, 3), Estimate(1, 0.4, 3), Estimate(2, math.nan, 1)


@pytest.mark.parametrize(
    ("gains", "better", "equal"),
    [
        ([], "not run yet", "not run yet"),
        ([UP, UP], "holds", "holds"),
        ([UP, LEVEL], "holds in part", "holds in part"),
        ([UP, DOWN], "holds in part", "holds in part"),
        ([LEVEL], "not seen", "not seen"),  # it may be worse by .8, and 1 % of the score is .1
        ([Estimate(0, 0.02, 3)], "not seen", "holds"),
        ([Estimate(-0.2, 0.01, 3)], "does not hold", "does not hold"),
        ([ONE], "not seen", "not seen"),
        ([DOWN, LEVEL], "does not hold", "not seen"),
        ([DOWN], "does not hold", "does not hold"),
        ([Estimate(-2, 0.1, 2)], "not seen", "not seen"),
    ],
)
def test_verdicts(gains: list[Estimate], better: str, equal: str) -> None:
    assert judge(gains) == better
    assert judge_equal([(gain, 10.0) for gain in gains]) == equal


def test_a_figure_shows_a_loss_that_counts() -> None:
    novels, code = ("novels", Estimate(0.0323, 0.007, 3), 4), ("code", Estimate(0.021, 0.0796, 3), 4)
    lost, level = ("ML-1M", Estimate(-0.0017, 0.0003, 3), 4), ("Beauty", Estimate(-0.0003, 0.0006, 5), 4)
    assert both_ways([novels, code, lost]) == "novels +.0323 ± .0070; ML-1M −.0017 ± .0003"
    assert both_ways([novels, code, level]) == "novels +.0323 ± .0070; code +.0210 ± .0796"


@pytest.mark.parametrize(("gain", "verdict"), [(0.01, "holds in part"), (0.0, "not seen"), (-0.01, "not seen")])
def test_half_of_the_evidence_decides_nothing(tmp_path: Path, gain: float, verdict: str) -> None:
    """Without text, recommenders alone neither prove nor refute that PRISM beats Gated DeltaNet."""
    figures = tmp_path / "figures.json"
    row = [0.2, 0.001, gain, 0.001, gain, 0.001]
    figures.write_text(json.dumps({"recommenders": {"seeds": 3, "rows": {"prism-2": row, "prism-3": row}}}), "utf-8")
    check = next(claim for claim in CLAIMS if claim.slug == "gated-delta").check
    assert check(Evidence(tmp_path, figures)).verdict == verdict


def test_numbers_have_no_leading_zero() -> None:
    assert [number(0.25, 2), number(-0.5, 1, sign=True), number(10.25, 1)] == [".25", "−.5", "10.2"]
    assert number(-0.001, 2) == ".00"
    assert shown(Estimate(0.5, 0.25, 2), 2) == ".50 ± .25"
    assert shown(ONE, 1) == "2.0"
    assert shown(Estimate(math.nan, math.nan, 0)) == ""


def line(rule: str, seed: int, score: float | None, **more: Any) -> dict[str, Any]:
    """A line of a comparison on text."""
    name, _, option = rule.partition(":")
    options = {"key_dim": 8, **({option: True} if option else {})}
    return {
        "key": f"{rule} {seed}",
        "status": "done",
        "task": "novels",
        "rule": rule,
        "phase": "final",
        "seed": seed,
        "state_size": 64,
        "function": "prism.compare.text:train_text",
        "settings": {"model": {"layers": name, "rule_options": {name: options}}},
        "result": {"scores": {"nats": score}, "better": "lower", "metric": "nats a token", "parameters": 10},
        **more,
    }


def write(folder: Path, *lines: dict[str, Any]) -> Evidence:
    (folder / "text.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return Evidence(folder)


def test_lines_of_a_comparison_become_verdicts(tmp_path: Path) -> None:
    evidence = write(
        tmp_path,
        line("prism", 0, 9.0, key="a"),
        line("prism", 0, 3.0, key="a"),  # the last line of a training counts
        line("prism", 1, 3.2),
        line("prism", 2, 9.0, phase="search"),
        line("gated_delta", 0, 3.1),
        line("gated_delta", 1, 3.31),
        line("prism", 3, 3.1),
        line("gated_delta", 3, 3.205),
        line("prism:shared_key", 0, 3.4),
        line("prism:shared_key", 1, None, status="failed", error="no memory"),
        line("prism:shared_key", 2, None, status="started"),
    )
    (pair,) = evidence.pairs(is_default, is_rule("gated_delta"), "text")
    assert pair.first.score().mean == pytest.approx(3.1)
    assert pair.gain.count == 3 and pair.gain.mean == pytest.approx(0.105)  # lower is better: a gain is positive
    (pair,) = evidence.pairs(is_default, is_prism(shared_key=True), "text")
    assert pair.gain.count == 1 and pair.gain.mean == pytest.approx(0.4)
    assert [failed["error"] for failed in evidence.unfinished] == ["no memory", "killed"]
    found = {claim.slug: claim.check(evidence) for claim in CLAIMS}
    assert found["gated-delta"].verdict == "holds in part"  # on text, not on MovieLens-1M
    assert found["gated-delta"].figure.startswith("novels +.1050 ± .0029")
    assert found["shared-keys"].verdict == "not seen"  # one seed
    written = claims.blocks(evidence)
    assert "| `text`, novels | failed | no memory | 1 |" in written["unfinished"]()
    assert "Every search" in written["searches"]()  # prism has final runs too


def test_tables_of_comparisons(tmp_path: Path) -> None:
    lines = [line(rule, seed, 3.0 + seed) for rule in ("prism", "gated_delta") for seed in (0, 1)]
    tasks = [f"task {n}" for n in range(6)]
    settings = {"task": "nine", "model": {"rule": "prism", "options": {}}}
    result = {"scores": {"": 0.5}, "better": "higher", "metric": "accuracy"}
    lines += [
        line("prism", 0, None, key=task, task=task, settings=settings, function="probe", result=result)
        for task in tasks
    ]
    evidence = write(tmp_path, *lines)
    written = claims.blocks(evidence)
    assert "| prism | 3.500 ± .500 | +.000 ± .000 | | |" in written["text"]()
    assert "**novels** (`text`): 0.0 M parameters, 2 seeds.\n" in written["text"]()
    assert "| rule | task 0 | task 1 | task 2 | task 3 |" in written["probes"]()
    assert "| rule | task 4 | task 5 |\n|---|--:|--:|\n| prism | .500 | .500 |" in written["probes"]()


def test_a_table_on_text_says_how_it_was_trained(tmp_path: Path) -> None:
    def trained(rule: str, seed: int, rate: float, parameters: int) -> dict[str, Any]:
        given = line(rule, seed, 3.0, learning_rate=rate, machine={"gpu": "H200"})
        given["settings"] |= {"steps": 1500, "batch": 16, "context": 512, "graph": True}
        given["result"] |= {"tokens": 12_288_000, "validation": 4.0 + seed, "parameters": parameters}
        return given

    one = [trained("prism", 0, 2e-3, 6_100_000), trained("prism", 1, 2e-3, 6_100_000)]
    text = claims.blocks(write(tmp_path, *one, trained("gated_delta", 0, 2e-3, 6_000_000)))["text"]()
    said = "6.0 to 6.1 M parameters, 1 to 2 seeds, 12.3 M tokens (1,500 steps of 16 × 512), learning rate 0.002 for every rule"
    assert f"{said}, CUDA graphs, H200." in text.replace("\n", " ")
    assert "| 4.50 ± .50 |" in text
    text = claims.blocks(write(tmp_path, *one, trained("gated_delta", 0, 1e-3, 6_000_000)))["text"]()
    assert "a learning rate for each rule" in text.replace("\n", " ")


def test_a_search_shows_its_best_validation(tmp_path: Path) -> None:
    results = [{"validation": value, "better": "lower", "scores": {}} for value in (3.5, 3.25, None)]
    lines = [line("prism", 9, None, key=str(i), phase="search", result=result) for i, result in enumerate(results)]
    assert "| prism | 3.250 |" in claims.blocks(write(tmp_path, *lines))["searches"]()
    final = write(tmp_path, *lines, line("prism", 0, 3.0))
    assert "3.25" not in claims.blocks(final)["searches"]()


def test_rules_are_compared_at_equal_places_of_state_size(tmp_path: Path) -> None:
    lines = [
        line(rule, 0, score, key=f"{rule} {size}", state_size=size)
        for rule, size, score in [("prism", 64, 3.0), ("prism", 128, 2.0), ("softmax", 8, 3.5), ("softmax", 16, 2.5)]
    ]
    pairs = write(tmp_path, *lines).pairs(is_default, is_rule("softmax"), "text")
    assert [(pair.first.size, pair.second.size) for pair in pairs] == [(64, 8), (128, 16)]


def test_rules_of_different_state_size_are_no_pair(tmp_path: Path) -> None:
    """PRISM has two sizes, and of the other rule only the larger one was finished."""
    lines = [
        line(rule, 0, 3.0, key=f"{rule} {size}", state_size=size)
        for rule, size in [("prism", 64), ("prism", 128), ("gated_delta", 128)]
    ]
    pairs = write(tmp_path, *lines).pairs(is_default, is_rule("gated_delta"), "text")
    assert [(pair.first.size, pair.second.size) for pair in pairs] == [(128, 128)]


def test_a_finished_training_stays_finished(tmp_path: Path) -> None:
    """Another machine started it too, and was stopped."""
    evidence = write(tmp_path, line("prism", 0, 3.0), line("prism", 0, None, status="stopped", error="killed"))
    assert [group.score().mean for group in evidence.groups] == [3.0] and not evidence.unfinished


def test_the_largest_comparison_decides(tmp_path: Path) -> None:
    (tmp_path / "search").mkdir()
    small = [line("prism", seed, 3.0) for seed in (0, 1, 2)] + [
        line("gated_delta", seed, 2.0 + seed / 9) for seed in (0, 1, 2)
    ]
    (tmp_path / "search" / "results.jsonl").write_text("\n".join(map(json.dumps, small)), encoding="utf-8")
    evidence = write(tmp_path, *[_larger(rule, seed) for rule in ("prism", "gated_delta") for seed in (0, 1, 2)])
    found = next(claim for claim in CLAIMS if claim.slug == "gated-delta").check(evidence)
    assert found.verdict == "holds in part"  # better on text at the larger size; MovieLens-1M is not
    assert found.figure.startswith("novels +.5500 ± .0577")
    assert "| novels, 20 M, nats a token | 2.1000 ± .0577 | 2.6500" in found.text and "−" in found.text


def as_built(rule: str, **options: Any) -> dict[str, Any]:
    """Settings of a model that starts as PRISM does, with its output gate, unless options say otherwise."""
    alike = {"timescales": [1, 1024], "start": "recall", "gate_by": "sigmoid"} if rule == "gated_delta" else {}
    return {"model": {"layers": rule, "rule_options": {rule: {**alike, **options}}}}


def test_ranks_are_compared_with_equal_starts(tmp_path: Path) -> None:
    silu = {"gate_by": "silu"}

    def rank_1(**options: Any) -> dict[str, Any]:
        return {"model": {"layers": "gated_delta", "rule_options": {"gated_delta": options}}}

    runs = {
        "prism": as_built("prism"),
        "silu": as_built("prism", **silu),
        "weights": as_built("prism", start="drawn", **silu),
        "drawn": as_built("prism", steps=2, timescales="drawn", start="drawn", **silu),
        "drawn, sigmoid": as_built("prism", timescales="drawn", start="drawn"),  # no rank 1 starts so
        "alike": as_built("gated_delta"),
        "recall": rank_1(timescales=[1, 1024], start="recall"),
        "spread": rank_1(timescales=[1, 1024]),
        "published": rank_1(),
    }
    evidence = write(tmp_path, *(line(label, 0, 3.0, settings=settings) for label, settings in runs.items()))
    found = [(pair.first.label, pair.second.label) for pair in ranks(evidence, "text")]
    assert found == [("prism", "alike"), ("silu", "recall"), ("weights", "spread"), ("drawn", "published")]
    (pair,) = evidence.pairs(is_default, is_rule("gated_delta"), "text")
    assert pair.first.label == "prism"  # an older start only where the default was not run
    evidence = write(tmp_path, *(line(label, 0, 3.0, settings=runs[label]) for label in ("drawn", "silu", "published")))
    (pair,) = evidence.pairs(is_default, is_rule("gated_delta"), "text")
    assert pair.first.label == "silu"


def test_layers_and_optimizer_tell_rules_apart(tmp_path: Path) -> None:
    plain = as_built("prism", steps=2)
    halves = {"model": {**plain["model"], "layers": "prism(steps=1)+prism"}}
    faster = {**plain, "optimizer": {"groups": ["*=lr:2"]}}
    runs = {"plain": plain, "halves": halves, "faster": faster}
    evidence = write(tmp_path, *(line(label, 0, 3.0, settings=settings) for label, settings in runs.items()))
    assert [group.label for group in evidence.groups if is_default(group)] == ["plain"]
    assert {group.rule for group in evidence.groups} == {"prism"}


@pytest.mark.parametrize(
    ("rank_2", "rare", "verdict"),
    [(2.0, 3.0, "holds"), (2.0, 2.05, "holds in part"), (2.0, 1.9, "does not hold"), (8.5, 8.0, "not seen")],
)
def test_recall_in_text_is_compared_with_its_nats(tmp_path: Path, rank_2: float, rare: float, verdict: str) -> None:
    """Rank 1 has 2.1 nats for 2.0, and `rare` on repeated rare bigrams for `rank_2`."""
    lines = []
    for seed in (0, 1, 2):
        for rule, scores in {"prism": (2.0, rank_2), "gated_delta": (2.1, rare)}.items():
            both = {"nats": scores[0] + seed, "repeated rare bigrams": scores[1] + seed}
            result = {"scores": both, "better": "lower", "metric": "nats"}
            lines.append(line(rule, seed, None, result=result, settings=as_built(rule)))
    found = next(claim for claim in CLAIMS if claim.slug == "retrieval").check(write(tmp_path, *lines))
    assert found.verdict == verdict
    assert "| novels, rare bigrams |" in found.text
    assert ("uniform guess" in found.text) == (rank_2 > 8)  # of 9.01
    assert verdict != "does not hold" or found.figure.startswith("rare bigrams −.10")


def _larger(rule: str, seed: int) -> dict[str, Any]:
    score = 2.0 + 0.1 * seed if rule == "prism" else 2.45 + 0.2 * seed
    result = {"scores": {"nats": score}, "better": "lower", "metric": "nats a token", "parameters": 20_000_000}
    return line(rule, seed, score, result=result)


def test_stored_lines_are_whole() -> None:
    """Every stored result says what it is, how it ended, on which machine and by which command."""
    for path in sorted((ROOT / "experiments" / "results").rglob("*.json*")):
        texts = path.read_text(encoding="utf-8").splitlines() if path.suffix == ".jsonl" else [path.read_text("utf-8")]
        for stored in map(json.loads, texts):
            if path.suffix == ".jsonl":
                assert stored["status"] in ("started", "done", "failed", "stopped"), path.name
            if stored.get("status") != "started":  # only the end of a training knows more
                assert stored["machine"] and stored["command"].startswith(("python ", "prism ")), path.name


def test_speeds_of_drop_ins_are_shown_by_family(tmp_path: Path) -> None:
    drop_ins, evidence = tool("drop_ins"), tool("evidence").Evidence(tmp_path)
    assert drop_ins.cpu(evidence) == drop_ins.gpu(evidence) == "Not measured yet."
    rows = [
        {"family": "mamba2", "pass": kind, "tokens": tokens, "ratio": ratio}
        for kind, tokens, ratio in [("forward", 64, 0.5), ("forward and backward", 64, 0.25), ("decode 16", 1, 0.9)]
    ]
    about = {"machine": {"cpu": "C", "torch": "2.1+cpu"}, "threads": 2, "busy": 1, "transformers": "5"}
    for name in ("dropin", "dropin_busy"):
        (tmp_path / f"{name}.json").write_text(json.dumps({**about, "results": rows}))
    text = " ".join(drop_ins.cpu(evidence).split())
    assert "| `mamba2` | 0.50 | 0.25 | 0.90 |" in text and "at 64 tokens: `mamba2` 0.50 and 0.25." in text
