"""The nine probes: answers are what plain Python reads from the tokens, in both modes; ceilings and baselines hold."""

import itertools
import math
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism.lab.tasks import nine_paper
from prism.lab.tasks.nine import KINDS, NineProbes
from prism.lab.tasks.nine_released import best_answer
from prism.lab.tasks.task import IGNORE

SEEDS = st.integers(0, 2**32)
UNCERTAIN = ("variable_tracking", "mux", "silence_gate")


def rows(task: NineProbes, count: int, seed: int) -> list[tuple[list[int], int]]:
    """The tokens and the answer of every sequence."""
    inputs, targets = task.sample(count, torch.Generator().manual_seed(seed))
    assert inputs.shape == targets.shape == (count, task.tokens)
    assert inputs.min() >= 0 and inputs.max() < task.vocabulary
    assert (targets[:, :-1] == IGNORE).all() and (targets[:, -1] >= 0).all()
    return list(zip(inputs.tolist(), targets[:, -1].tolist(), strict=True))


def read_paper(task: NineProbes, tokens: list[int]) -> tuple[int, list[range]]:
    """The answer from the definition, and the places that items and query take."""
    n, size = task.operations, len(tokens)
    keys = range(10, 10 + task.vocabulary // 4)
    body, query = tokens[:-2], tokens[-1]
    if task.kind == "mqar":
        starts = [i for i, token in enumerate(body) if token in keys]
        return {tokens[i]: tokens[i + 1] for i in starts}[query], [range(i, i + 2) for i in starts]
    if task.kind == "poly_recall":
        starts = [i for i, token in enumerate(tokens[:-3]) if 3 <= token <= 9]
        values = {(tokens[i], tokens[i + 1]): tokens[i + 2] for i in starts}
        assert len(set(values.values())) == len(values) == 2 * n and tokens[-3] == 1
        return values[tokens[-2], query], [range(i, i + 3) for i in starts]
    if task.kind == "variable_tracking":
        starts, known, uses = [i for i, token in enumerate(body) if token == 9], dict[int, int](), Counter[int]()
        for i in starts:
            uses[tokens[i + 2]] += 1
            known[tokens[i + 1]] = known.get(tokens[i + 2], tokens[i + 2])
        assert len(known) == len(uses) == 2 * n and query not in uses
        return known[query], [range(i, i + 3) for i in starts]
    if task.kind == "silence_gate":
        starts = [i for i, token in enumerate(body) if token in (3, 4)]
        gates = {tokens[i + 1]: tokens[i + 2] if tokens[i] == 3 else 0 for i in starts}
        assert len(gates) == n
        return gates[query], [range(i, i + 3) for i in starts]
    end = tokens.index(2)
    assert tokens.count(2) == 1 and query == 1 and end < size - 1
    count = {"local_xor": 2, "palindrome": 3, "mux": n + 1}.get(task.kind, n)
    pattern, place = tokens[end - count : end], [range(end - count, end + 1)]
    if task.kind == "parity":
        return pattern.count(11) % 2, place
    if task.kind == "local_xor":
        return (pattern[0] ^ pattern[1]) & 1, place
    if task.kind == "modulo_add":
        return 10 + sum(digit - 10 for digit in pattern) % 10, place
    if task.kind == "palindrome":
        assert len(set(pattern)) == 2
        return int(pattern == pattern[::-1]), place
    return pattern[1 + pattern[0] - 3], place


SETTINGS = st.sampled_from(KINDS).flatmap(
    lambda kind: st.builds(
        NineProbes,
        st.just(kind),
        length=st.integers(40, 60),
        ids=st.integers(24, 80),
        n_ops=st.none() if kind in ("local_xor", "palindrome") else st.integers(1, 3),
        distance=st.none() | st.integers(0, 10),
    )
)


@settings(max_examples=150)
@given(SETTINGS, SEEDS)
def test_paper_answers_follow_from_the_tokens(task: NineProbes, seed: int) -> None:
    noise = range(10 + task.vocabulary // 4 * 2, task.vocabulary)
    for tokens, answer in rows(task, 5, seed):
        found, places = read_paper(task, tokens)
        assert found == answer
        query = task.tokens - (1 if 2 in tokens else 3 if task.kind == "poly_recall" else 2)
        assert tokens[query] == 1
        taken = [place for part in places for place in part]
        assert len(set(taken)) == len(taken)
        assert all(tokens[i] in noise for i in range(query) if i not in taken)
        if task.distance is not None:
            assert max(taken) == query - 1 - task.distance


@pytest.mark.parametrize("kind", KINDS)
def test_paper_items_are_anywhere(kind: str) -> None:
    """Every place is used, the first as often as the last."""
    task = NineProbes(kind, length=20 if kind == "variable_tracking" else 16)
    used: Counter[int] = Counter()
    for tokens, _ in rows(task, 4000, 0):
        used.update(place for part in read_paper(task, tokens)[1] for place in part)
    room = task.tokens - {"mqar": 2, "poly_recall": 3, "variable_tracking": 2, "silence_gate": 2}.get(kind, 1)
    assert sorted(used) == list(range(room))
    assert used[0] == pytest.approx(used[room - 1], rel=0.25)


def read_released(task: NineProbes, tokens: list[int]) -> list[int]:
    """All answers that the tokens allow, from the definition; several where noise imitates the pattern."""
    n, size, V, query = task.operations, len(tokens), task.vocabulary, tokens[-1]
    if task.kind == "mqar":
        return [tokens[i + 1] for i in range(0, size // 2, 2) if tokens[i] == query]
    if task.kind == "variable_tracking":
        return [tokens[i + 1] for i in range(size - 10) if tokens[i] == query]
    if task.kind == "silence_gate":
        starts = [i for i in range(size - 5) if tokens[i] in (1, 2) and tokens[i + 1] == query]
        return [tokens[i + 2] if tokens[i] == 1 else 0 for i in starts if 4 <= tokens[i + 2] < V - 5]
    if task.kind == "mux":
        starts = [i for i in range(size - 10) if tokens[i] in (3, 4) and tokens[i + 3] == 2]
        starts = [i for i in starts if 5 <= tokens[i + 1] < V // 2 <= tokens[i + 2]]
        return [tokens[i + 1] if tokens[i] == 3 else tokens[i + 2] for i in starts]
    mark = {"poly_recall": 2, "parity": 3, "local_xor": 2, "modulo_add": V - 2, "palindrome": 3}[task.kind]
    assert tokens.count(mark) == 1
    at = tokens.index(mark)
    if task.kind == "poly_recall":
        return [tokens[i + 1] for i in range(at + 1, at + 1 + 2 * n, 2) if tokens[i] == query]
    if task.kind == "parity":
        return [sum(tokens[at - n : at]) % 2]
    if task.kind == "local_xor":
        return [3 if tokens[at - 1] % 2 != tokens[at - 2] % 2 else 4]
    if task.kind == "modulo_add":
        return [(tokens[at - 1] + tokens[at - 2]) % 16]
    return [int(tokens[at - 4] in tokens[at - 2 : at])]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "variable_tracking"])
@settings(max_examples=20)
@given(seed=SEEDS, ids=st.integers(24, 64), more=st.integers(0, 3))
def test_released_answers_are_in_the_tokens(kind: str, seed: int, ids: int, more: int) -> None:
    n_ops = 1 + more if kind in ("mqar", "poly_recall", "parity") else None
    task = NineProbes(kind, "released", length=40 + more, ids=ids, n_ops=n_ops)
    for tokens, answer in rows(task, 5, seed):
        possible = read_released(task, tokens)
        assert answer in possible
        assert len(possible) == 1 or kind in UNCERTAIN


@pytest.mark.parametrize(
    ("kind", "mark", "first", "last"),
    [
        ("parity", 3, 3, 18),
        ("local_xor", 2, 2, 17),
        ("modulo_add", 30, 2, 20),
        ("palindrome", 3, 4, 22),
        ("poly_recall", 2, 0, 14),
        ("mux", 2, 3, 16),
        ("silence_gate", 1, 0, 18),
    ],
)
def test_released_patterns_are_anywhere(kind: str, mark: int, first: int, last: int) -> None:
    """The marker (or trigger) is at every place that the released ranges allow, equally often."""
    used: Counter[int] = Counter()
    for tokens, _ in rows(NineProbes(kind, "released", length=24), 6000, 0):
        if tokens.count(mark) == 1:
            used[tokens.index(mark)] += 1
    if kind in UNCERTAIN:  # noise has the marker too, in front and behind
        used = Counter({place: count for place, count in used.items() if first <= place <= last})
    assert sorted(used) == list(range(first, last + 1))
    assert min(used.values()) > 0.7 * max(used.values())


def test_palindromes_differ_from_others_at_either_end() -> None:
    shapes: Counter[tuple[bool, bool]] = Counter()
    for tokens, answer in rows(NineProbes("palindrome"), 2000, 0):
        a, b, c = tokens[tokens.index(2) - 3 : tokens.index(2)]
        shapes[a == b, b == c] += 1
        assert answer == (a == c)
    assert shapes[False, False] == pytest.approx(1000, abs=100)
    assert shapes[True, False] == pytest.approx(500, abs=80) and shapes[False, True] == pytest.approx(500, abs=80)


def test_released_noise_hides_answers_as_often_as_published() -> None:
    """Patterns by chance: about 3.7 % for mux, 15.6 % for the gate; 2.6 % of the writes are overwritten."""
    counts: dict[str, list[bool]] = {kind: [] for kind in UNCERTAIN}
    for kind in UNCERTAIN:
        task = NineProbes(kind, "released")
        for tokens, answer in rows(task, 4000, 0):
            possible = read_released(task, tokens)
            counts[kind].append(answer not in possible if kind == "variable_tracking" else len(possible) > 1)
    shares = {kind: sum(found) / len(found) for kind, found in counts.items()}
    assert shares["mux"] == pytest.approx(0.037, abs=0.01)
    assert shares["silence_gate"] == pytest.approx(0.156, abs=0.02)
    assert shares["variable_tracking"] == pytest.approx(0.024, abs=0.01)  # a little less: noise may show the value


def test_released_recall_is_ambiguous_without_positions() -> None:
    """Values may be keys: a reader that takes any occurrence of the key is right in 95.5 % of the cases."""
    shares = []
    for tokens, answer in rows(NineProbes("mqar", "released"), 4000, 0):
        after = [tokens[i + 1] for i in range(len(tokens) - 2) if tokens[i] == tokens[-1]]
        shares.append(after.count(answer) / len(after))
    assert sum(shares) / len(shares) == pytest.approx(0.955, abs=0.01)


def write_slowly(n: int, length: int, ids: range, choose: Any) -> tuple[list[int], int]:
    """Released variable tracking in plain Python, write by write."""
    tokens = [choose(ids) for _ in range(length)]
    keys: list[int] = []
    while len(keys) < 3:
        keys.append(choose([token for token in ids if token not in keys]))
    places: list[int] = []
    while len(places) < n:
        places.append(choose([i for i in range(length - 10) if i not in places]))
    state: dict[int, int] = {}
    for i in sorted(places):
        key, value = choose(keys), choose(ids)
        tokens[i], tokens[i + 1], state[key] = key, value, value
    asked = choose(list(state))
    tokens[-2:] = [1, asked]
    return tokens, state[asked]


def test_released_variables_are_drawn_as_defined() -> None:
    """Fast and slow generators agree in how often each occurrence of the asked key, from the end, has the answer."""
    generator = torch.Generator().manual_seed(1)
    task = NineProbes("variable_tracking", "released", length=30)

    def choose(options: Any) -> int:
        return int(options[int(torch.randint(len(options), (), generator=generator))])

    slow = [write_slowly(3, 30, range(10, 32), choose) for _ in range(1500)]
    shares = []
    for drawn in (slow, rows(task, 4000, 2)):
        found = [(read_released(task, tokens)[::-1], answer) for tokens, answer in drawn]
        after = [sum(len(possible) > i and possible[i] == answer for possible, answer in found) for i in range(3)]
        several = sum(len(possible) > 2 for possible, _ in found)
        shares.append([number / len(found) for number in (*after, several)])
    assert shares[0] == pytest.approx(shares[1], abs=0.05)


def chances(tokens: list[int], n: int, ids: int) -> dict[int, float]:
    """The exact chance of every answer of released variable tracking, from all ways to draw these tokens."""
    length, found = len(tokens), dict[int, float]()
    for places in itertools.combinations(range(length - 10), n):
        keys = [tokens[i] for i in places]
        if tokens[-1] not in keys:
            continue
        different = len(set(keys))
        weight = math.perm(3, different) / 3**n / math.perm(ids, different) / different
        last = max(i for i in places if tokens[i] == tokens[-1])
        if last + 1 in places:  # its value was overwritten: it may be any
            for value in range(10, 10 + ids):
                found[value] = found.get(value, 0.0) + weight / ids
        else:
            found[tokens[last + 1]] = found.get(tokens[last + 1], 0.0) + weight
    total = sum(found.values())
    return {value: weight / total for value, weight in found.items()}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_best_answer_to_variable_tracking_is_nearly_bayes(n: int) -> None:
    task = NineProbes("variable_tracking", "released", length=26, n_ops=n)
    drawn = rows(task, 150, 0)
    answers = best_answer(task.kind, torch.tensor([tokens for tokens, _ in drawn]), 32, n).tolist()
    exact = [chances(tokens, n, 22) for tokens, _ in drawn]
    lost = [max(chance.values()) - chance[answer] for chance, answer in zip(exact, answers, strict=True)]
    assert min(lost) >= 0 and sum(lost) / len(lost) < 0.002


@pytest.mark.parametrize(
    ("kind", "ids", "published"),
    [
        ("variable_tracking", 32, 0.47),
        ("mux", 32, 0.982),
        ("silence_gate", 32, 0.940),
        ("mux", 64, 0.994),
        ("silence_gate", 64, 0.981),
    ],
)
def test_ceilings_are_those_of_a_slow_oracle(kind: str, ids: int, published: float) -> None:
    task = NineProbes(kind, "released", ids=ids)
    assert task.ceiling() == pytest.approx(published, abs=0.006)
    if kind != "variable_tracking":  # all possible patterns are equally likely
        found = [(Counter(read_released(task, tokens)), answer) for tokens, answer in rows(task, 3000, 1)]
        likeliest = [max(possible.values()) / possible.total() for possible, _ in found]
        assert sum(likeliest) / 3000 == pytest.approx(task.ceiling(), abs=0.005)
    assert NineProbes(kind).ceiling() == 1


@pytest.mark.parametrize("mode", ["paper", "released"])
@pytest.mark.parametrize("kind", KINDS)
def test_baseline_is_the_best_guess(kind: str, mode: str) -> None:
    """The majority answer; in mode `paper` at least any id of the sequence that could be the answer, found by counting."""
    for ids in (None, 48):
        task = NineProbes(kind, mode, length=40, ids=ids)
        inputs, targets = task.sample(20_000, torch.Generator().manual_seed(0))
        answers = targets[:, -1]
        best = float((answers.bincount() / 20_000).max())
        if mode == "paper" and kind in ("mqar", "poly_recall", "variable_tracking", "mux"):
            block = nine_paper.ids(task.vocabulary)
            first = nine_paper.DATA if kind == "mux" else block.values
            shown = (inputs >= first) & (inputs < block.noise)
            right = shown & (inputs == answers[:, None])
            best = max(best, float((right.sum(1) / shown.sum(1)).mean()))
        assert best == pytest.approx(task.baseline(), abs=0.01)
        assert float(task.score(targets, targets).mean()) == 1


def test_lengths_and_ids_are_the_published_ones() -> None:
    for kind in KINDS:
        paper, released = NineProbes(kind), NineProbes(kind, "released")
        assert (paper.vocabulary, paper.tokens) == (64, 128)
        memory = kind in ("mqar", "poly_recall", "variable_tracking")
        assert (released.vocabulary, released.tokens) == (32, 64 if memory else 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "xor"}, "kind must be one of mqar, poly_recall"),
        ({"mode": "clean"}, "mode must be 'paper' or 'released', got 'clean'"),
        ({"ids": 20}, "ids must be ≥ 24, got 20"),
        ({"ids": 0}, "ids must be ≥ 24, got 0"),
        ({"length": 0}, "length must be ≥ 6 for these settings, got 0"),
        ({"kind": "variable_tracking", "mode": "released", "n_ops": 11}, "n_ops must be 1 … 10 for kind"),
        ({"length": 5}, "length must be ≥ 6 for these settings, got 5"),
        ({"length": 15, "distance": 10}, "length must be ≥ 16 for these settings, got 15"),
        ({"length": 9, "mode": "released"}, "length must be ≥ 10 for these settings, got 9"),
        ({"distance": -1}, "distance must be ≥ 0, got -1"),
        ({"mode": "released", "distance": 3}, "distance cannot be set in mode 'released', got 3: use mode 'paper'"),
        ({"kind": "palindrome", "n_ops": 3}, "n_ops cannot be set for kind 'palindrome' in mode 'paper', got 3"),
        (
            {"kind": "mux", "n_ops": 2, "mode": "released"},
            "n_ops cannot be set for kind 'mux' in mode 'released', got 2",
        ),
        ({"n_ops": 17}, "n_ops must be 1 … 16 for kind 'mqar' and 64 ids, got 17"),
        ({"n_ops": 0}, "n_ops must be 1 … 16 for kind 'mqar' and 64 ids, got 0"),
        ({"kind": "poly_recall", "n_ops": 8}, "n_ops must be 1 … 7 for kind 'poly_recall' and 64 ids, got 8"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        NineProbes(**settings)


@pytest.mark.parametrize("mode", ["paper", "released"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_least_length_is_enough(kind: str, mode: str) -> None:
    with pytest.raises(ValueError, match="length must be ≥") as error:
        NineProbes(kind, mode, length=1)
    found = re.search(r"≥ (\d+)", str(error.value))
    assert found is not None
    task = NineProbes(kind, mode, length=int(found[1]))
    for tokens, answer in rows(task, 20, 0):
        if mode == "paper":
            assert read_paper(task, tokens)[0] == answer
        elif kind != "variable_tracking":
            assert answer in read_released(task, tokens)
