"""Last words, against one passage at a time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from prism.language.generate import LanguageModel, open_model
from prism.language.lambada import lambada, read_passages
from tests.tiny_lm import save_lm

PASSAGES = ["the cat sat on the mat", "a b", "it said nothing, and it said nothing\nto the dog", "über die Brücke 🙂"]


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return open_model(save_lm(tmp_path_factory.mktemp("lm"), "prism+softmax"), "cpu")


@torch.no_grad()
def alone(lm: LanguageModel, passage: str, longest: int) -> tuple[list[int], list[int], float]:
    """Most likely tokens at the places of the last word, the word's tokens, and their nats."""
    before, _, word = passage.rpartition(" ")
    start = [lm.tokenizer.end, *lm.tokenizer.encode([before])[0].tolist()[-longest:]]
    answer = lm.tokenizer.encode([" " + word])[0].tolist()
    logits = lm.model(torch.tensor([start + answer[:-1]]), use_cache=False).logits[0, len(start) - 1 :]
    nats = torch.nn.functional.cross_entropy(logits, torch.tensor(answer), reduction="sum")
    return logits.argmax(-1).tolist(), answer, float(nats)


@pytest.mark.parametrize(("batch", "longest"), [(1, 100), (3, 100), (8, 5)])
def test_a_batch_equals_each_passage_alone(lm: LanguageModel, batch: int, longest: int) -> None:
    expected = [alone(lm, passage, longest) for passage in PASSAGES]
    found = lambada(lm.model, lm.tokenizer, PASSAGES, batch, longest)
    right = sum(said == answer for said, answer, _ in expected) / len(PASSAGES)
    assert found["accuracy"] == right
    assert found["rows"] == len(PASSAGES)
    assert math.log(found["word_perplexity"]) == pytest.approx(
        sum(nats for *_, nats in expected) / len(PASSAGES), rel=1e-4
    )


def test_an_answer_counts_only_if_every_token_is_right(lm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that always says " ab": right for that word, wrong for one that shares its beginning or end."""

    def logits(model: object, hidden: torch.Tensor) -> torch.Tensor:
        said = torch.tensor([ord(" "), ord("a"), ord("b")])
        return torch.nn.functional.one_hot(said, 270).float()

    monkeypatch.setattr("prism.language.lambada.head_logits", logits)
    answers = {word: lambada(lm.model, lm.tokenizer, [f"say {word}"])["accuracy"] for word in ("ab", "ac", "xb")}
    assert answers == {"ab": 1.0, "ac": 0.0, "xb": 0.0}


def test_a_file_without_a_last_word_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"text": "two words"}) + "\n" + json.dumps({"text": "word"}) + "\n")
    with pytest.raises(ValueError, match="row 2 has no last word"):
        read_passages(path)
    assert read_passages(path, 1) == ["two words"]
