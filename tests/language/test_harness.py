"""lm-eval's tasks from files made here, in the schema of the published ones."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest
import torch

from prism.language.generate import open_model
from prism.language.harness import find_data, run_tasks
from tests.tiny_lm import save_lm

LAMBADA = [{"text": "He gave the ball to her and she threw the ball"}, {"text": "It rained on the roof of the house"}]
PIQA = [
    {"goal": "open a jar", "sol1": "turn the lid", "sol2": "paint the lid", "label": 0},
    {"goal": "dry a shirt", "sol1": "dig it in", "sol2": "hang it up", "label": 1},
]
HELLASWAG = [
    {
        "ind": 0,
        "activity_label": "Baking",
        "ctx_a": "A man mixes flour.",
        "ctx_b": "he",
        "ctx": "A man mixes flour. he",
        "endings": ["bakes bread.", "swims away.", "reads [title] aloud.", "sings."],
        "source_id": "x",
        "split": "val",
        "split_type": "indomain",
        "label": label,
    }
    for label in ("0", "1", "1")
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    for name, rows in (("lambada", LAMBADA), ("hellaswag", HELLASWAG)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "piqa.jsonl.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, PIQA)).encode()))
    return tmp_path


def test_lambada_piqa_and_hellaswag_run_on_a_saved_model(
    data: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = save_lm(tmp_path_factory.mktemp("model"))
    lm = open_model(folder)

    def nats(context: str, continuation: str) -> float:
        before, after = (lm.tokenizer.encode([text])[0].tolist() for text in (context, continuation))
        with torch.no_grad():
            logits = lm.model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1]
        return -logits.log_softmax(-1)[torch.arange(len(after)), after].sum().item()

    results = run_tasks(lm, folder, ["lambada_openai", "piqa", "hellaswag"], data, batch=2)

    splits = [row["text"].rsplit(" ", 1) for row in LAMBADA]
    expected = math.exp(sum(nats(context, f" {word}") for context, word in splits) / len(splits))
    assert results["lambada_openai"]["perplexity"] == pytest.approx(expected, rel=1e-3)
    chosen = [
        min((0, 1), key=lambda i, row=row: nats(f"Question: {row['goal']}\nAnswer:", f" {row[f'sol{i + 1}']}"))
        for row in PIQA
    ]
    right = [answer == row["label"] for answer, row in zip(chosen, PIQA, strict=True)]
    assert results["piqa"]["acc"] == sum(right) / len(right)
    endings = ["bakes bread.", "swims away.", "reads. aloud.", "sings."]  # what lm-eval makes of the rows
    best = min(range(4), key=lambda i: nats("Baking: A man mixes flour. He", f" {endings[i]}"))
    assert results["hellaswag"]["acc"] == pytest.approx(sum(int(row["label"]) == best for row in HELLASWAG) / 3)
    assert [results[task]["rows"] for task in results] == [2, 2, 3]
    assert run_tasks(lm, folder, ["hellaswag"], data, limit=1)["hellaswag"]["rows"] == 1


def test_a_task_finds_its_file(data: Path) -> None:
    assert find_data(data, "lambada_openai").name == "lambada.jsonl"
    assert find_data(data, "piqa").name == "piqa.jsonl.xz"
    (data / "lambada_openai.jsonl").write_text("")
    assert find_data(data, "lambada_openai").name == "lambada_openai.jsonl"
    with pytest.raises(FileNotFoundError, match=r"has no data for the task sciq: it needs a file sciq\.jsonl"):
        find_data(data, "sciq")
    with pytest.raises(FileNotFoundError, match="there is no data folder"):
        find_data(data / "nowhere", "sciq")


def test_tasks_that_lm_eval_does_not_have(data: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs the extra eval")
    (data / "nonsense.jsonl").write_text("{}")
    folder = save_lm(tmp_path / "lm")
    with pytest.raises(ValueError, match="lm-eval has no task 'nonsense' that is defined in one file"):
        run_tasks(open_model(folder), folder, ["nonsense"], data)


def test_without_the_extra_one_sentence_says_so(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    folder = save_lm(tmp_path / "lm")
    with pytest.raises(ImportError, match=r'need the extra eval: pip install "\.\[eval\]"'):
        run_tasks(open_model(folder), folder, ["piqa"], data)
