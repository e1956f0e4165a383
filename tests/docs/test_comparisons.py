"""Tables of comparisons name what they compare with, and no run decides a question that it was not made for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_claims import CLAIMS, Evidence, as_built, claims, line, write
from tests.docs.test_pages import tool

import task_comparisons  # isort: skip  # after test_claims, which makes docs/tools importable
import text_comparisons  # isort: skip
import verdicts  # isort: skip
from evidence import is_prism, is_rule, largest, ranks, ranks_with  # isort: skip
from verdicts import shows_no_difference  # isort: skip


def finding(slug: str, evidence: Evidence) -> Any:
    return next(claim for claim in CLAIMS if claim.slug == slug).check(evidence)


@pytest.mark.parametrize(
    ("file", "task", "rule", "least", "most"),
    [
        ("tracking", "parity", "delta [-1,1]", 0.99, 1.0),
        ("tracking", "parity", "delta [0,1]", -1.0, 0.1),
        ("zoology", "512 tokens, 64 pairs", "delta", 0.99, 1.0),
        ("tracking", "S3, curriculum", "delta_product 2 [-1,1]", 0.99, 1.0),
        ("tracking", "S3, curriculum", "delta_product 2 [0,1]", 0.0, 0.01),
    ],
)
def test_published_facts_reproduce(file: str, task: str, rule: str, least: float, most: float) -> None:
    """Of every seed: so the probes can be trusted."""
    (group,) = [g for g in Evidence().groups if (g.file, g.task, g.label) == (file, task, rule)]
    assert all(least <= score <= most for score in group.values().values()), group.values()


def test_pictures_show_the_stored_figures() -> None:
    figures = tool("figures")
    drawn = json.loads(figures.DRAWN.read_text(encoding="utf-8"))
    assert drawn == figures.hashes(figures.inputs(Evidence())), "run `python docs/tools/figures.py`"


def test_other_learning_rates_decide_no_claim(tmp_path: Path) -> None:
    def run(file: str, rule: str, nats: float, rate: float, seed: int = 0) -> dict[str, Any]:
        task = "novels" if file == "text" else f"novels, rate {rate:g}"
        given = line(
            rule, seed, nats, key=f"{rule} {rate} {seed}", learning_rate=rate, task=task, settings=as_built(rule)
        )
        given["settings"] |= {"steps": 1000, "batch": 32, "context": 1024}
        given["result"] |= {"validation": nats, "tokens": 33_000_000}
        return given

    rates = [run("text_rates", "prism", 2.9, 3e-3), run("text_rates", "gated_delta", 2.0, 3e-3)]
    (tmp_path / "text_rates.jsonl").write_text("\n".join(map(json.dumps, rates)))
    evidence = write(
        tmp_path,
        *(
            run("text", rule, nats, 1.5e-3, seed)
            for rule, nats in [("prism", 3.0), ("gated_delta", 3.1)]
            for seed in (0, 1)
        ),
    )
    assert [(pair.first.file, pair.gain.count) for pair in ranks(evidence, "text")] == [("text", 2)]
    assert "rate" not in claims.on_text(evidence) and "rate 0.003" not in claims.blocks(evidence)["text"]()
    said = text_comparisons.rates(evidence)
    assert "| corpus and rule | 0.0015 | 0.003 |" in said
    assert "| novels, gated_delta | 3.100 | 2.000 |" in said and "1 seed each. They are lowest at 0.003." in " ".join(
        said.split()
    )


def test_final_runs_at_two_learning_rates_are_refused(tmp_path: Path) -> None:
    """The later one of a seed would replace the other, and a mean would have both."""
    lines = [line("prism", seed, 3.0, key=str(rate), learning_rate=rate) for seed, rate in ((0, 1e-3), (1, 2e-3))]
    with pytest.raises(ValueError, match="final runs of prism on novels at two learning rates"):
        _ = write(tmp_path, *lines).groups


def test_enough_seeds_come_before_size(tmp_path: Path) -> None:
    """A larger model with two seeds does not overturn three seeds of a smaller one."""

    def run(rule: str, seed: int, nats: float, parameters: int) -> dict[str, Any]:
        given = line(
            rule, seed, nats, key=f"{rule} {seed} {parameters}", settings=as_built(rule), state_size=parameters
        )
        given["result"]["parameters"] = parameters
        return given

    small = [
        run(rule, seed, nats + seed, 10) for rule, nats in (("prism", 3.0), ("gated_delta", 3.1)) for seed in range(3)
    ]
    large = [
        run(rule, seed, nats + seed, 99) for rule, nats in (("prism", 2.2), ("gated_delta", 2.1)) for seed in range(2)
    ]
    pairs = ranks(write(tmp_path, *small, *large), "text")
    assert [pair.first.parameters for pair in largest(pairs)] == [10]
    large = [
        run(rule, seed, nats + seed, 99) for rule, nats in (("prism", 2.2), ("gated_delta", 2.1)) for seed in range(3)
    ]
    pairs = ranks(write(tmp_path, *small, *large), "text")
    assert [pair.first.parameters for pair in largest(pairs)] == [99]


def test_a_choice_is_compared_with_the_prism_that_starts_alike(tmp_path: Path) -> None:
    silu = {"gate_by": "silu"}
    drawn = {"timescales": "drawn", "start": "drawn"}
    runs = {
        "default": (as_built("prism", steps=2), 3.0),
        "three": (as_built("prism", steps=3), 3.02),
        "drawn, sigmoid": (as_built("prism", **drawn), 3.3),
        "silu": (as_built("prism", **silu), 3.1),
        "long": (as_built("prism", timescales=[1, 4096], **silu), 3.09),
        "weights": (as_built("prism", start="drawn", **silu), 3.2),
        "short": (as_built("prism", start="drawn", timescales=[4, 256], **silu), 3.21),
        "old": (as_built("prism", steps=2, **drawn, **silu), 3.3),
        "old three": (as_built("prism", steps=3, **drawn, **silu), 3.25),
        "paper": (as_built("prism", preset="paper"), 3.4),
    }
    lines = []
    for label, (settings, nats) in runs.items():
        lines.append(line(label, 0, nats, settings=settings))
        lines[-1]["result"]["validation"] = nats
    evidence = write(tmp_path, *lines)
    assert [group.label for group in evidence.groups if is_prism()(group)] == ["default"]  # not with three writes
    tables = text_comparisons.choices(evidence).split("**novels**")[1:]
    found = [
        (part.split("*")[1], [row.split(" | ")[:2] for row in part.splitlines() if row.startswith("| ")][1:])
        for part in tables
    ]
    assert found == [
        ("default", [["| three", "−.020"], ["| silu", "−.100"], ["| drawn, sigmoid", "−.300"]]),
        ("silu", [["| long", "+.010"], ["| weights", "−.100"], ["| old", "−.200"]]),
        ("weights", [["| short", "−.010"]]),
        ("old", [["| old three", "+.050"], ["| paper", "−.100"]]),
    ]


def test_a_rival_leads_if_it_is_better_on_every_corpus(tmp_path: Path) -> None:
    """With few seeds: if each of them is better than every seed of PRISM."""

    def runs(label: str, rule: str, nats: list[float], task: str, **options: Any) -> list[dict[str, Any]]:
        settings = as_built(rule, **options)
        found = [
            line(label, seed, value, key=f"{label} {task} {seed}", task=task, settings=settings)
            for seed, value in enumerate(nats)
        ]
        for one in found:
            one["result"] |= {"parameters": 30_000_000, "tokens": 33_000_000}
        return found

    start = {"timescales": [1, 1024], "start": "recall"}
    ours = [*runs("prism 2", "prism", [3.00, 3.02], "novels"), *runs("prism 2", "prism", [2.00, 2.02], "code")]
    kda = [*runs("kda, ours", "kda", [2.99], "novels", **start), *runs("kda, ours", "kda", [1.9], "code", **start)]
    # Better than one seed of PRISM and not than the other; and on one corpus alone.
    gdn2 = [*runs("gdn2, ours", "gdn2", [3.01], "novels", **start), *runs("gdn2, ours", "gdn2", [1.9], "code", **start)]
    delta = runs("product, ours", "delta_product", [2.9], "novels", **start)
    published = [*runs("kda", "kda", [2.0], "novels"), *runs("kda", "kda", [1.0], "code")]
    assert text_comparisons.rivals(write(tmp_path, *ours, *published)) == "No run of this is in the repository yet."
    evidence = write(tmp_path, *ours, *kda, *gdn2, *delta, *published)
    assert [*text_comparisons.ahead(evidence)] == ["kda, ours"]
    said = " ".join(text_comparisons.rivals(evidence).split())
    assert "**Better than PRISM on every corpus, with the same start: kda.**" in said
    assert "| novels, 33 M tokens, product, ours | 2.900 | 3.010 ± .010 | +.100 | 1 |" in said
    assert claims.channels(evidence) == ""
    both = runs("both", "prism", [2.95, 2.97], "novels", forget="channel")
    worse = runs("kda, ours", "kda", [3.1], "novels", **start)
    evidence = write(tmp_path, *ours, *both, *worse, *kda[1:])
    said = claims.channels(evidence)
    assert '`forget="channel"` saves .050 ± .000 nats a token on novels (30 M parameters, 33 M tokens, 2 seeds)' in said
    assert "kda" not in said
    alike = {"timescales": [1, 1024], "start": "recall", "gate_by": "sigmoid", "forget": "channel"}
    simpler = runs("rank 1", "gated_delta", [2.97, 2.99], "novels", **alike)
    said = claims.channels(write(tmp_path, *ours, *both, *simpler))
    assert "Rank 1 with them saves .030 ± .000 nats a token on novels" in said, "the control of the rank"
    evidence = write(tmp_path, *ours, *both, *worse, *kda[1:])
    assert text_comparisons.ahead(evidence) == {} and "no rule is better than PRISM" in text_comparisons.rivals(
        evidence
    )


def test_ranks_are_compared_with_equal_gates(tmp_path: Path) -> None:
    """Rank 1 with another gate, or another start, is no rank 1 of a PRISM with SiLU as its gate."""
    gate, drawn = {"gate_by": "silu"}, {"timescales": "drawn", "start": "drawn"}
    recalls = {"timescales": [1, 1024], "start": "recall"}

    def runs(label: str, rule: str, nats: list[float], **options: Any) -> list[dict[str, Any]]:
        settings = {"model": {"layers": rule, "rule_options": {rule: options}}}
        return [line(label, seed, value, key=f"{label} {seed}", settings=settings) for seed, value in enumerate(nats)]

    ours = runs("prism 2, SiLU", "prism", [3.00, 3.02, 3.01], **gate)
    others = [
        *runs("gated_delta, sigmoid", "gated_delta", [3.5] * 3, gate_by="sigmoid", **recalls),
        *runs("gated_delta", "gated_delta", [3.6] * 3),
        *runs("gated_delta, drawn", "gated_delta", [3.6] * 3, **drawn),
    ]
    assert verdicts.with_gates(write(tmp_path, *ours, *others)) == ""
    evidence = write(tmp_path, *ours, *others, *runs("alike", "gated_delta", [3.05, 3.06, 3.07], **recalls))
    assert [pair.second.label for pair in ranks_with(evidence, **gate)] == ["alike"]
    said = " ".join(verdicts.with_gates(evidence).split())
    assert "SiLU as output gate, rank 2 is significantly better on 1 of 1 ([table]" in said
    channel = {"forget": "channel", "gate_by": "sigmoid"}
    ours = runs("channels", "prism", [3.00, 3.02, 3.01], forget="channel")
    alike = runs("alike", "gated_delta", [3.05, 3.06, 3.07], **recalls, **channel)
    said = " ".join(verdicts.with_gates(write(tmp_path, *ours, *alike)).split())
    assert "decays per channel, rank 2 is significantly better on 1 of 1:" in said
    assert "3.0100 ± .0058 | 3.0600 ± .0058 | +.0500 ± .0058 | 3 |" in said


def probe(rule: str, score: float, task: str, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A line of a synthetic task with two pairs a token, in which one of 16 values is right."""
    alike = {"timescales": [1, 1024], "gate_by": "sigmoid"} if rule == "gated_delta" else {}
    settings = {
        "task": "multi_pair",
        "task_options": {"pairs_per_token": 2},
        "model": {"rule": rule, "options": alike},
    }
    result = {
        "scores": {"": score},
        "better": "higher",
        "metric": "accuracy",
        "baseline": {"": 0.0625},
        "ceiling": {"": 1.0},
    }
    return line(
        rule,
        seed,
        None,
        key=f"{rule} {task} {seed}",
        task=task,
        function="probe",
        settings=settings,
        result=result | more,
    )


def test_steps_until_a_task_is_solved(tmp_path: Path) -> None:
    def solved(rule: str, seed: int, steps: int, score: float) -> dict[str, Any]:
        result = {"scores": {"": score}, "validation": score, "better": "higher", "metric": "accuracy", "steps": steps}
        settings = {"task": "multi_pair", "stop_at": 0.99, "model": {"rule": rule, "options": {}}}
        return line(rule, seed, None, task="2 pairs", function="probe", result=result, settings=settings)

    lines = [solved("prism", 0, 400, 1.0), solved("prism", 1, 600, 0.99), solved("delta", 0, 900, 0.5)]
    write(tmp_path, *lines, solved("delta", 1, 800, 1.0))
    (tmp_path / "text.jsonl").rename(tmp_path / "pairs.jsonl")
    found = task_comparisons.learning(Evidence(tmp_path))
    assert "| prism | 500 ± 100 |" in found and "| delta | 1 of 2 (.75 ± .25) |" in found
    assert "Steps until .990 of the answers" in found
    (pair,) = Evidence(tmp_path).pairs(is_rule("prism"), is_rule("delta"), "recall")
    assert not pair.solved
    (tmp_path / "pairs.jsonl").unlink()
    (pair,) = write(tmp_path, *lines[:2], solved("delta", 1, 800, 1.0)).pairs(
        is_rule("prism"), is_rule("delta"), "recall"
    )
    assert pair.solved
    assert task_comparisons.learning(Evidence(tmp_path / "empty")) == "No run of this is in the repository yet."


def test_what_readme_says_of_facts_in_a_token(tmp_path: Path) -> None:
    def runs(rule: str, scores: list[float], facts: int, **options: Any) -> list[dict[str, Any]]:
        model = {"rule": rule, "options": options, "conv_size": 1}
        settings = {"task": "multi_pair", "task_options": {"pairs_per_token": facts}, "model": model}
        return [
            line(
                f"{rule} {options}",
                seed,
                score,
                key=f"{rule} {options} {facts} {seed}",
                task=f"{facts}",
                settings=settings,
            )
            for seed, score in enumerate(scores)
        ]

    def of(*lines: list[dict[str, Any]]) -> Evidence:
        (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(one) for some in lines for one in some))
        return Evidence(tmp_path)

    alike = {"timescales": [1, 1024], "gate_by": "sigmoid"}
    ours, few = (runs("prism", scores, 4, steps=2, rank=32) for scores in ([0.99, 1.0, 0.98], [0.99, 1.0]))
    theirs, shared = (
        runs("gated_delta", [0.25] * 3, 4, **alike),
        runs("prism", [0.3] * 3, 4, steps=2, rank=32, shared_key=True),
    )
    assert task_comparisons.facts_sentence(of(ours)) == "" and task_comparisons.facts_sentence(of(few, theirs)) == ""
    said = task_comparisons.facts_sentence(of(ours, theirs, runs("gated_delta", [1.0], 2, **alike)))
    assert said == (
        "Where a token carries four facts, rank 2 with full keys recalls .99 ± .01 of them and rank 1 .25 ± .00, a"
        " guess among them (3 seeds)."
    )
    assert "along one key, rank 2's maps give .30 ± .00" in task_comparisons.facts_sentence(of(ours, theirs, shared))
    better = runs("gated_delta", [0.5] * 3, 4, **alike)
    assert "guess" not in task_comparisons.facts_sentence(of(ours, better))
    table = task_comparisons.facts_table(of(ours, theirs, runs("gated_delta", [1.0], 2, **alike)))
    assert "| facts in a token | 2 | 4 |" in table and "| rank 1 | 1.00, 1/1 | .25 ± .00, 0/3 |" in table
    assert "| rank 2, maps of rank 32 | | .99 ± .01, 3/3 |" in table


@pytest.mark.parametrize(
    ("ours", "theirs", "counts"), [(0.49, 0.50, False), (0.6, 0.5, True), (0.06, 0.07, False), (0.995, 1.0, False)]
)
def test_guessing_among_the_pairs_of_a_token_is_not_learning(
    tmp_path: Path, ours: float, theirs: float, counts: bool
) -> None:
    evidence = write(tmp_path, probe("prism", ours, "two"), probe("gated_delta", theirs, "two"))
    (pair,) = evidence.pairs(
        is_rule("prism"), is_rule("gated_delta", timescales=[1, 1024], gate_by="sigmoid"), "recall"
    )
    assert shows_no_difference(pair) is not counts


def test_tasks_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """A task that does not count is named with its comparison."""
    texts = [
        line(rule, seed, nats + seed, settings=as_built(rule))
        for rule, nats in (("prism", 3.0), ("gated_delta", 3.1))
        for seed in range(3)
    ]
    for one in texts:
        one["result"]["scores"]["repeated rare bigrams"] = 2.0
    evidence = write(tmp_path, *texts, probe("prism", 0.49, "two"), probe("gated_delta", 0.5, "two"))
    assert "do not count: two (`text`)." in finding("retrieval", evidence).text


def test_scores_stand_next_to_oracle_and_guess(tmp_path: Path) -> None:
    evidence = write(tmp_path, probe("prism", 0.5, "two"), probe("prism", 0.25, "four", metric="sequence accuracy"))
    said = task_comparisons.probes(evidence)
    assert "**`text`**, accuracy (two), sequence accuracy (four), up to 1 seeds; settings are not stored:" in said
    assert "| prism | .500 | .250 |\n| *ceiling* | 1.000 | 1.000 |\n| *baseline* | .062 | .062 |" in said


@pytest.mark.parametrize(
    ("alone", "verdict"),
    [([0.7, 0.72, 0.71], "holds"), ([0.01, 0.02, 0.01], "not seen"), ([0.99, 0.98, 0.99], "not seen")],
)
def test_attention_restores_only_what_a_memory_that_learned_has_lost(
    tmp_path: Path, alone: list[float], verdict: str
) -> None:
    runs = {"prism+softmax": [0.98, 0.99, 0.985], "prism+prism": alone}
    lines = [
        line(
            stack,
            seed,
            None,
            task="hybrid recall",
            function="",
            settings={"task": "hybrid"},
            result={"scores": {"length 256": score, "length 512": score}, "better": "higher", "metric": "accuracy"},
        )
        for stack, scores in runs.items()
        for seed, score in enumerate(scores)
    ]
    found = verdicts.hybrid(write(tmp_path, *lines))
    assert found.verdict == verdict
    assert ("did not learn" in found.text) == (alone[0] < 0.5)
