"""The recommender's model: items in, scores out, and all data about items saved with the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from prism.models import PrismConfig, PrismForCausalLM
from prism.recommend.config import PrismRecConfig, hstu, sasrec
from prism.recommend.losses import full_softmax
from prism.recommend.model import GAP_BUCKETS, PrismForRecommendation, gap_bucket
from prism.rules.prism import Prism

ITEMS = 30


def model(layers: str = "prism", seed: int = 0, **settings: Any) -> PrismForRecommendation:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "initializer_range": 0.4}
    return PrismForRecommendation(PrismRecConfig(ITEMS, layers=layers, **{**sizes, **settings})).eval()


def histories(rows: int = 3, length: int = 7) -> Tensor:
    return torch.randint(1, ITEMS + 1, (rows, length), generator=torch.Generator().manual_seed(1))


def test_scores_are_products_with_the_items_vectors() -> None:
    recommender, items = model(), histories()
    hidden = recommender(items).hidden
    scores = recommender.scores(hidden)
    assert scores.shape == (3, 7, ITEMS + 1)
    assert bool((scores[..., 0] == -torch.inf).all())
    torch.testing.assert_close(scores[..., 1:], (hidden @ recommender.item_vectors().T)[..., 1:])
    assert torch.equal(recommender.item_vectors(), recommender.model.embed_tokens.weight)


@pytest.mark.parametrize("layers", ["prism", "prism+softmax", "mom"])
def test_padding_changes_nothing(layers: str) -> None:
    recommender, items = model(layers), histories()
    alone = recommender(items).hidden
    padded = torch.cat([items, torch.zeros(3, 4, dtype=torch.long)], 1)
    torch.testing.assert_close(recommender(padded, padded > 0).hidden[:, :7], alone)
    torch.testing.assert_close(recommender(padded).hidden[:, :7], alone)  # causal: last padding needs no mask
    left = torch.cat([torch.zeros(3, 4, dtype=torch.long), items], 1)
    torch.testing.assert_close(recommender(left, left > 0).hidden[:, 4:], alone)


def test_a_state_goes_on() -> None:
    recommender, items = model("prism+softmax"), histories()
    whole = recommender(items).hidden
    first = recommender(items[:, :5], use_cache=True)
    second = recommender(items[:, 5:], past_key_values=first.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([first.hidden, second.hidden], 1), whole)
    assert second.past_key_values.tokens == 7
    assert recommender(items).past_key_values is None


def test_features_are_part_of_an_item_in_and_out() -> None:
    features = {"brand": np.arange(ITEMS + 1) % 3, "genre": np.arange(ITEMS + 1) % 5}
    recommender, items = model(item_features={"brand": 3, "genre": 5}), histories()
    recommender.describe_items(features=features)
    brand, genre = (embedding.weight for embedding in recommender.feature_embeddings)
    own = recommender.model.embed_tokens.weight
    torch.testing.assert_close(recommender.item_vectors()[7], own[7] + brand[1] + genre[2])
    plain = model()
    with torch.no_grad():
        plain.model.load_state_dict(recommender.model.state_dict())
        plain.model.embed_tokens.weight.copy_(recommender.item_vectors())
    torch.testing.assert_close(recommender(items).hidden, plain(items).hidden)


def test_vectors_are_scaled_on_the_way_in_only() -> None:
    recommender, plain, items = model(embedding_scale=4.0), model(), histories()
    with torch.no_grad():
        plain.model.embed_tokens.weight *= 4
    torch.testing.assert_close(recommender(items).hidden, plain(items).hidden)
    assert torch.equal(recommender.item_vectors(), plain.item_vectors() / 4)


def test_gaps_are_heard() -> None:
    recommender, items = model(time_gaps=True), histories()
    gaps = torch.rand(3, 7) * 1e5
    changed = gaps.clone()
    changed[:, 4] *= 100
    first, second = recommender(items, gaps=gaps).hidden, recommender(items, gaps=changed).hidden
    assert torch.equal(first[:, :4], second[:, :4])
    assert not bool(torch.isclose(first[:, 4], second[:, 4]).all(-1).any())
    with pytest.raises(ValueError, match="gaps must be given"):
        recommender(items)


def test_gap_buckets_grow_with_the_logarithm() -> None:
    gaps = torch.tensor([-5.0, 0.0, 0.4, 0.5, 1.0, 3.0, 3600.0, 86400.0, 2.0**31, 1e30])
    assert gap_bucket(gaps).tolist() == [0, 0, 0, 1, 2, 4, 23, 32, 62, GAP_BUCKETS - 1]


def test_everything_is_saved(tmp_path: Path) -> None:
    recommender, items = (
        model("prism*2+softmax", time_gaps=True, item_features={"brand": 4}, max_length=77),
        histories(),
    )
    recommender.describe_items(torch.arange(ITEMS + 1), {"brand": torch.arange(ITEMS + 1) % 4})
    recommender.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is PrismForRecommendation
    assert again.config == AutoConfig.from_pretrained(tmp_path)
    assert again.config.layer_plan == recommender.config.layer_plan
    assert again.config.max_length == 77 and again.config.num_items == ITEMS and again.config.vocab_size == ITEMS + 1
    assert torch.equal(again.item_counts, torch.arange(ITEMS + 1))
    gaps = torch.rand(3, 7) * 100
    assert torch.equal(again(items, gaps=gaps).hidden, recommender(items, gaps=gaps).hidden)


@pytest.mark.parametrize(
    ("layers", "given", "found"),
    [
        ("prism*2+softmax", {}, {"prism": {"gate_by": "silu"}}),
        ("prism(steps=3)", {"prism": {"rank": 4}}, {"prism": {"gate_by": "silu", "rank": 4}}),
        ("prism", {"prism": {"gate_by": "sigmoid"}}, {"prism": {"gate_by": "sigmoid"}}),
        ("prism(preset=paper)", {}, {}),
        ("kda+gated_delta", {}, {}),
        ("titans(mini_batch=1)", {}, {"titans": {"base_lr": 1.0}}),
        ("titans", {"titans": {"mini_batch": 1, "base_lr": 0.2}}, {"titans": {"mini_batch": 1, "base_lr": 0.2}}),
        ("titans(mini_batch=1, momentum=false)+titans(mini_batch=1)", {}, {}),
    ],
)
def test_a_configuration_says_what_recommenders_were_measured_with(layers: str, given: Any, found: Any) -> None:
    made = PrismRecConfig(5, 16, 2, layers, rule_options=given)
    assert made.rule_options == found and PrismRecConfig(**made.to_dict()).rule_options == found
    rules = [layer.mixer.rule for layer in PrismForRecommendation(made).model.layers]
    gate = found.get("prism", {}).get("gate_by", "silu")
    assert {rule.gate_by for rule in rules if type(rule) is Prism} <= {gate}


def test_features_keep_their_codes_whatever_their_names_and_order(tmp_path: Path) -> None:
    """config.json sorts names; and what a column is called must not matter to torch."""
    counts = {"type": 5, "a.b": 3, "items": 2}
    recommender, items = model(item_features=counts), histories()
    codes = {name: torch.arange(ITEMS + 1) % count for name, count in counts.items()}
    recommender.describe_items(features=codes)
    recommender.save_pretrained(tmp_path)
    again = PrismForRecommendation.from_pretrained(tmp_path)
    assert torch.equal(again(items).hidden, recommender(items).hidden)
    assert torch.equal(again.item_vectors(), recommender.item_vectors())
    again.describe_items(features=codes)
    assert torch.equal(again.item_vectors(), recommender.item_vectors())


def test_lists_vectors_and_users_add_what_they_say(tmp_path: Path) -> None:
    """Against sums over single items: the mean of a list's embeddings, a map of vectors, users as a first event."""
    sizes: dict[str, Any] = {
        "item_lists": {"tags": (4, 2)},
        "item_vectors": {"text": 3},
        "user_features": {"land": (3, 1)},
    }
    recommender, items = model(**sizes), histories()
    codes = torch.randint(0, 4, (ITEMS + 1, 2))
    codes[1], codes[2] = torch.tensor([0, 0]), torch.tensor([3, 0])
    given = {"tags": codes, "text": torch.randn(ITEMS + 1, 3)}
    recommender.describe_items(features=given)
    vectors = recommender.item_vectors()
    for item in range(1, ITEMS + 1):
        tags = [recommender.list_embeddings[0].weight[code] for code in codes[item].tolist() if code]
        expected = recommender.model.embed_tokens.weight[item] + recommender.vector_maps[0](given["text"][item])
        expected = expected + (sum(tags) / len(tags) if tags else 0.0)
        torch.testing.assert_close(vectors[item], expected)
    torch.testing.assert_close(recommender.item_vectors(items), vectors[items])

    land = torch.tensor([[2], [1], [0]])
    known = recommender(items, profiles=land).hidden
    assert known.shape == (3, 7, 16) and not torch.equal(known[:2], recommender(items).hidden[:2])
    torch.testing.assert_close(known[2], recommender(items).hidden[2])
    start = recommender(items[:, :3], profiles=land, use_cache=True)
    after = recommender(items[:, 3:], past_key_values=start.past_key_values, use_cache=True)
    torch.testing.assert_close(torch.cat([start.hidden, after.hidden], 1), known, atol=1e-5, rtol=1e-4)
    recommender.save_pretrained(tmp_path)
    again = PrismForRecommendation.from_pretrained(tmp_path)
    assert torch.equal(again.item_vectors(), vectors)
    for features, message in (
        ({"tags": codes}, "lacks 'text'"),
        ({**given, "tags": codes[:, :1]}, "longest list"),
        ({**given, "text": given["text"] * torch.nan}, "finite numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            recommender.describe_items(features=features)
    with pytest.raises(ValueError, match="profiles must be"):
        recommender(items, profiles=land[:, :0])


def test_items_without_an_id_have_their_features_only() -> None:
    recommender = model(item_features={"brand": 3}, id_dropout=0.5)
    recommender.describe_items(features={"brand": torch.arange(ITEMS + 1) % 3})
    whole, brands = recommender.item_vectors(), recommender.feature_embeddings[0].weight[torch.arange(ITEMS + 1) % 3]
    recommender.train()
    torch.manual_seed(0)
    recommender(histories())
    now = recommender.item_vectors()
    alone = (now == brands).all(1)
    assert 0 < int(alone.sum()) < ITEMS + 1 and torch.equal(now[~alone], whole[~alone])
    assert torch.equal(recommender.eval().item_vectors(), whole)


def test_dropout_is_for_training_only() -> None:
    recommender, items = model(dropout=0.5), histories()
    exact = model()
    assert torch.equal(recommender(items).hidden, exact(items).hidden)
    recommender.train()
    assert not torch.equal(recommender(items).hidden, recommender(items).hidden)


def test_a_model_without_feed_forward_layers() -> None:
    recommender = model(intermediate_size=0)
    assert not [name for name, _ in recommender.named_parameters() if "mlp" in name]
    assert recommender(histories()).hidden.shape == (3, 7, 16)


def test_language_models_do_not_notice() -> None:
    """Same names, same first weights: dropout has none, and draws nothing where it drops nothing."""
    config = PrismConfig(hidden_size=16, num_heads=2, layers="prism")
    torch.manual_seed(0)
    plain = PrismForCausalLM(config)
    parts = {name.split(".")[3] for name in plain.state_dict() if name.startswith("model.layers.0.")}
    assert parts == {"mixer_norm", "mixer", "mlp_norm", "mlp"}
    torch.manual_seed(0)
    dropping = PrismForCausalLM(PrismConfig(hidden_size=16, num_heads=2, layers="prism", dropout=0.3))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), dropping.parameters(), strict=True))
    before = torch.get_rng_state()
    plain.train()(torch.zeros(1, 3, dtype=torch.long))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("preset", [sasrec, hstu])
def test_presets_learn_a_cycle(preset: Any) -> None:
    torch.manual_seed(0)
    recommender = PrismForRecommendation(preset(ITEMS, hidden_size=16, dropout=0.1))
    items = (torch.arange(12) + torch.randint(0, ITEMS, (32, 1))) % ITEMS + 1
    optimizer = torch.optim.AdamW(recommender.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        loss = (
            full_softmax(recommender(items[:, :-1]).hidden, recommender.item_vectors(), items[:, 1:])
            / items[:, 1:].numel()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(recommender.parameters(), 1.0)
        optimizer.step()
    recommender.eval()
    best = recommender.scores(recommender(items[:, :-1]).hidden).argmax(-1)
    assert (best == items[:, 1:]).float().mean().item() > 0.9


def test_bad_input_is_named() -> None:
    recommender = model(item_features={"brand": 3})
    codes = torch.zeros(ITEMS + 1, dtype=torch.long)
    for call, words in (
        (lambda: PrismRecConfig(0), "num_items must be an integer"),
        (lambda: PrismRecConfig(5, vocab_size=5), "num_items \\+ 1"),
        (lambda: PrismRecConfig(5, tie_word_embeddings=False), "one vector"),
        (lambda: PrismRecConfig(5, item_features={"brand": 0}), "item_features\\['brand'\\]"),
        (lambda: PrismRecConfig(5, dropout=1.0), "dropout must be"),
        (lambda: recommender(torch.zeros(3, 4)), "items must be integers"),
        (lambda: recommender.describe_items(), "lacks 'brand'"),
        (lambda: recommender.describe_items(features={"brand": codes + 3}), "codes 0 … 2"),
        (lambda: recommender.describe_items(codes[:4], {"brand": codes}), "shape \\[num_items \\+ 1\\]"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
