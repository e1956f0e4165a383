"""Generation: choosing tokens, stopping, and resuming without a difference."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from prism.language.generate import LanguageModel, Sampling, Session, open_model
from prism.language.tokenizer import train_bpe
from prism.models import PrismForCausalLM
from prism.models.loading import config_sha256
from tests.tiny_lm import save_lm

GREEDY = Sampling(temperature=0)
SAMPLINGS = [GREEDY, Sampling(1.0), Sampling(1.3, top_k=20), Sampling(0.9, top_p=0.8), Sampling(1.1, 50, 0.9)]
HYBRIDS = ("prism*2", "prism+softmax", "gated_delta+sliding_window", "rwkv7+mamba2")


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    return open_model(save_lm(tmp_path_factory.mktemp("lm")))


def written(session: Session, tokens: int, sampling: Sampling) -> str:
    return "".join(session.write(tokens, sampling))


@pytest.mark.parametrize("layers", HYBRIDS)
@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
def test_saved_and_continued_equals_uninterrupted(layers: str, sampling: Sampling, tmp_path: Path) -> None:
    """Text, logits and random state, bit for bit, wherever it stopped: also inside a character."""
    lm = open_model(save_lm(tmp_path / "lm", layers))
    whole = Session(lm, seed=3)
    whole.read("naïve 🙂")
    expected = written(whole, 40, sampling) + whole.text.flush()
    assert len(set(expected)) > 8, "a model that always says the same proves nothing"
    for cut in (0, 1, 13, 39):
        first = Session(lm, seed=3)
        first.read("naïve 🙂")
        before = written(first, cut, sampling)
        first.save(tmp_path / "state.safetensors")
        second = Session.load(tmp_path / "state.safetensors", lm)
        assert before + written(second, 40 - cut, sampling) + second.text.flush() == expected
        assert torch.equal(second.logits, whole.logits)
        assert torch.equal(second.random.get_state(), whole.random.get_state())


def test_a_prompt_after_a_saved_state_is_the_text_read_on(lm: LanguageModel, tmp_path: Path) -> None:
    whole, first = Session(lm), Session(lm)
    whole.read("one two ")
    whole.read("three")
    first.read("one two ")
    first.save(tmp_path / "state.safetensors")
    second = Session.load(tmp_path / "state.safetensors", lm)
    second.read("three")
    assert written(second, 20, GREEDY) == written(whole, 20, GREEDY)
    alone = Session(lm)
    alone.read("three")
    assert written(alone, 20, GREEDY) != written(whole, 20, GREEDY), "the state must matter"


@pytest.mark.parametrize("layers", ["prism*2", "prism+softmax"])
def test_greedy_is_what_transformers_generates(layers: str, tmp_path: Path) -> None:
    lm = open_model(save_lm(tmp_path, layers))
    prompt = torch.tensor([list(b"hello there")])
    padding = list(range(lm.tokenizer.size, lm.model.config.vocab_size))
    ids = lm.model.generate(prompt, do_sample=False, max_new_tokens=30, suppress_tokens=padding, pad_token_id=0)
    expected = lm.tokenizer.decode([token for token in ids[0, prompt.shape[1] :].tolist() if token != lm.tokenizer.end])
    session = Session(lm)
    session.read("hello there")
    assert written(session, 30, GREEDY) + session.text.flush() == expected
    assert len(set(expected)) > 5


def test_the_state_does_not_grow(lm: LanguageModel) -> None:
    session = Session(lm)
    session.read("a")
    size = session.nbytes
    session.read("b" * 3000)
    assert session.nbytes == size > 0


def test_the_end_token_ends_the_text_and_more_may_follow(lm: LanguageModel, tmp_path: Path) -> None:
    session = Session(lm)
    session.read("abc")
    session.logits[lm.tokenizer.end] = 1e6
    assert written(session, 10, GREEDY) == written(session, 10, GREEDY) == ""
    assert session.ended
    session.save(tmp_path / "state.safetensors")
    session = Session.load(tmp_path / "state.safetensors", lm)
    assert written(session, 10, Sampling(1.0)) == "", "an uninterrupted run would have stopped too"
    session.read("def")
    unbroken = Session(lm)
    unbroken.read("abc")
    unbroken.read("def")
    assert written(session, 5, GREEDY) == written(unbroken, 5, GREEDY) != ""


def test_rows_of_the_embedding_that_are_no_token_are_never_written(lm: LanguageModel) -> None:
    session = Session(lm)
    session.read("abc")
    session.logits[lm.tokenizer.size :] = 1e6
    for sampling in SAMPLINGS:
        assert sampling.choose(session.logits[: lm.tokenizer.size], session.random) < lm.tokenizer.size
    written(session, 1, Sampling(1.0))
    assert session.reader.last < lm.tokenizer.size


def test_a_document_after_an_end_token_starts_afresh(lm: LanguageModel) -> None:
    fresh, after_another = Session(lm), Session(lm)
    after_another.read("another document")
    for session in (fresh, after_another):
        session.logits = session.reader.read_all(torch.tensor([lm.tokenizer.end]))
        session.read("text")
    assert torch.equal(fresh.logits, after_another.logits)


def test_without_a_prompt_a_document_starts(lm: LanguageModel) -> None:
    session, primed = Session(lm), Session(lm)
    primed.logits = primed.reader.read_all(torch.tensor([lm.tokenizer.end]))
    assert written(session, 12, GREEDY) == written(primed, 12, GREEDY) != ""


@given(st.integers(0, 5), st.sampled_from(SAMPLINGS[1:]))
@settings(max_examples=15)
def test_drawn_tokens_obey_the_filters(seed: int, sampling: Sampling) -> None:
    logits = 3 * torch.randn(60, generator=torch.Generator().manual_seed(seed))
    order = logits.argsort(descending=True)
    weights = (logits / sampling.temperature).softmax(-1)
    allowed = set(order[: sampling.top_k or 60].tolist())
    if sampling.top_p is not None:
        kept = torch.tensor([i in allowed for i in range(60)])
        weights = torch.where(kept, weights, 0.0)
        before = (weights[order] / weights.sum()).cumsum(0) - weights[order] / weights.sum()
        allowed &= set(order[before < sampling.top_p + 1e-6].tolist())
    random = torch.Generator().manual_seed(seed)
    drawn = {sampling.choose(logits, random) for _ in range(200)}
    assert drawn <= allowed
    assert len(drawn) > 1


def test_seeds_decide_what_is_drawn(lm: LanguageModel) -> None:
    texts = []
    for seed in (1, 1, 2):
        session = Session(lm, seed)
        session.read("abc")
        texts.append(written(session, 20, Sampling(1.0)))
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"temperature": -1}, "temperature must be at least 0"),
        ({"temperature": float("nan")}, "temperature must be at least 0"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 1.5}, "top_p must be above 0 and at most 1"),
        ({"temperature": 0, "top_k": 3}, "need a temperature above 0"),
    ],
)
def test_bad_sampling(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**arguments)


def test_a_state_of_another_model_is_refused(lm: LanguageModel, tmp_path: Path) -> None:
    session = Session(lm)
    session.read("abc")
    session.save(tmp_path / "state.safetensors")
    other = open_model(save_lm(tmp_path / "other", "prism*3"))
    with pytest.raises(ValueError, match=r"made by a model with another configuration .* not by other"):
        Session.load(tmp_path / "state.safetensors", other)
    twin = open_model(save_lm(tmp_path / "twin", seed=1))
    with pytest.raises(ValueError, match="made by a model with other weights"):
        Session.load(tmp_path / "state.safetensors", twin)
    merged = open_model(save_lm(tmp_path / "merged"))
    with torch.no_grad():  # what merging an adapter does: matrices change alone
        merged.model.model.layers[1].mixer.rule.out.weight += 0.01
    with pytest.raises(ValueError, match="made by a model with other weights"):
        Session.load(tmp_path / "state.safetensors", merged)
    moved = open_model(save_lm(tmp_path / "moved"))
    assert torch.equal(Session.load(tmp_path / "state.safetensors", moved).logits, session.logits)


def test_what_is_no_state_is_refused(lm: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    with pytest.raises(FileNotFoundError, match="there is no state file"):
        Session.load(path, lm)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is not a saved state"):
        Session.load(path, lm)
    session = Session(lm)
    with pytest.raises(ValueError, match="nothing has been read or written"):
        session.save(path)
    session.read("abc")
    session.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match="is not a saved state"):
        Session.load(path, lm)
    with pytest.raises(ValueError, match="is not a saved state of the kind"):
        Session.load(next(Path(lm.model.config._name_or_path).glob("*.safetensors")), lm)


def test_a_state_file_says_what_it_belongs_to(lm: LanguageModel, tmp_path: Path) -> None:
    session = Session(lm)
    session.read("abc")
    session.save(tmp_path / "state.safetensors")
    with safe_open(tmp_path / "state.safetensors", "pt") as file:
        assert file.metadata()["config_sha256"] == config_sha256(lm.model)
        assert file.get_tensor("state.tokens").item() == 3


class TestOpening:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="there is no model folder"):
            open_model(tmp_path / "nowhere")

    def test_pickles(self, tmp_path: Path) -> None:
        save_lm(tmp_path)
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
        with pytest.raises(ValueError, match="pickle"):
            open_model(tmp_path)
        (tmp_path / "weights.pt").write_bytes(b"")
        with pytest.raises(ValueError, match="pickle"):
            open_model(tmp_path / "weights.pt")

    def test_no_model(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="does not open as a model"):
            open_model(tmp_path)
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(ValueError, match="give the folder that holds it"):
            open_model(tmp_path / "model.safetensors")

    def test_another_kind_of_model(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
        with pytest.raises(
            ValueError, match=r"holds no PRISM language model: .* is 'gpt2', not 'prism'; `prism convert`"
        ):
            open_model(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "prism_rec"}')
        with pytest.raises(ValueError, match=r"holds no PRISM language model: .*; it is a PRISM recommender$"):
            open_model(tmp_path)

    @pytest.mark.parametrize(("layers", "message"), [("prism*3", "lacks weights"), ("prism", "has unknown weights")])
    def test_weights_of_another_model(self, layers: str, message: str, tmp_path: Path) -> None:
        save_lm(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        del config["num_hidden_layers"]
        (tmp_path / "config.json").write_text(json.dumps({**config, "layers": layers}))
        with pytest.raises(ValueError, match=message):
            open_model(tmp_path)

    def test_weights_of_other_shapes(self, tmp_path: Path) -> None:
        save_lm(tmp_path)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
        with pytest.raises(ValueError, match="does not open as a model"):
            open_model(tmp_path)

    def test_a_tokenizer_with_more_tokens_than_the_model(self, tmp_path: Path) -> None:
        save_lm(tmp_path)
        definition = train_bpe(["the cat sat on the mat and on the other mat " * 3], 290).definition
        (tmp_path / "tokenizer.json").write_text(definition)
        (tmp_path / "tokenizer_config.json").unlink()
        with pytest.raises(ValueError, match=r"tokenizer in .* has \d+ tokens, but the model only 264"):
            open_model(tmp_path)

    def test_no_tokenizer(self, tmp_path: Path) -> None:
        save_lm(tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
            open_model(tmp_path)

    def test_a_device_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="device 'cuda:99' cannot be used here"):
            open_model(save_lm(tmp_path), "cuda:99")


@pytest.mark.parametrize(("value", "named"), [(float("nan"), "NaN"), (float("inf"), "infinite numbers")])
def test_weights_that_are_not_finite_are_named_as_such(tmp_path: Path, value: float, named: str) -> None:
    model = PrismForCausalLM.from_pretrained(save_lm(tmp_path))
    with torch.no_grad():
        model.model.layers[0].mixer.rule.out.weight[0, 0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"the weights of the model in {tmp_path} hold {named} \(model\.layers\.0\."):
        open_model(tmp_path)
