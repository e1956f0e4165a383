"""Train and evaluate RecTools' SASRec, EASE or ALS, for recommend.py: needs a Python with rectools[torch] (and numpy < 2).

    python benchmarks/rectools_sasrec.py ml-100k.inter '{"model": "sasrec", "epochs": 20, …}'

The protocol is that of recommend.py: each user's last event is the test event, the one before it is for validation and not
trained on, items that a user has seen are left out of the ranking, and all others are ranked. Prints one line of JSON.
With "same" in the settings SASRec is defined as ours is (rectools_same.py); with "weights" it starts from the initial weights
of a model of ours, trains on all users at once, then gets that model's last weights: both times the scores are compared.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
import time

import numpy as np
import pandas as pd
import torch
from implicit.als import AlternatingLeastSquares
from pytorch_lightning import seed_everything
from rectools import Columns
from rectools.dataset import Dataset, IdMap, Interactions
from rectools.models import EASEModel, ImplicitALSWrapperModel, SASRecModel

from recommend import passed
from rectools_same import Training, largest_difference, load, same_model


def read_events(path: str) -> pd.DataFrame:
    """Events in order with user_id, item_id and timestamp, of a .inter file or of lines "user item" in order; also .xz."""
    with (lzma.open if path.endswith(".xz") else open)(path, "rt") as file:
        if ".inter" in path:
            events = pd.read_csv(file, sep="\t").rename(columns=lambda name: name.split(":")[0])
        else:
            events = pd.read_csv(file, sep=" ", names=["user_id", "item_id"])
            events["timestamp"] = range(len(events))
    return events.sort_values(["user_id", "timestamp"], kind="stable")


def make_model(settings: dict) -> SASRecModel | EASEModel | ImplicitALSWrapperModel:
    if settings["model"] == "ease":
        return EASEModel(regularization=settings["ease_regularization"])
    if settings["model"] == "als":
        names = ("factors", "regularization", "alpha", "iterations")
        options = {name: settings[f"als_{name}"] for name in names}
        return ImplicitALSWrapperModel(AlternatingLeastSquares(**options, random_state=settings["seed"]))
    common = {
        "n_blocks": settings["layers"],
        "n_heads": settings["heads"],
        "n_factors": settings["width"],
        "dropout_rate": settings["dropout"],
        "session_max_len": settings["length"],
        "loss": "softmax",
        "lr": settings["lr"],
        "batch_size": 10**9 if settings.get("weights") else settings["batch"],
        "epochs": settings["epochs"],
    }
    return same_model(settings, common) if settings["same"] else SASRecModel(**common)


def main(path: str, settings: dict) -> dict:
    torch.set_num_threads(settings["threads"])
    seed_everything(settings["seed"])
    started = time.perf_counter()
    events = read_events(path)
    events[Columns.Datetime] = pd.to_datetime(events["timestamp"], unit="s")
    events[Columns.Weight] = 1.0
    left = events.groupby("user_id").cumcount(ascending=False)
    columns = [Columns.User, Columns.Item, Columns.Weight, Columns.Datetime]
    last = 0 if settings["part"] == "test" else 1
    train, known = events.loc[left >= 2, columns], events.loc[left > last, columns]
    test = events.loc[left == last, columns]
    read = time.perf_counter()

    if settings["model"] != "sasrec":  # EASE and ALS refuse items that were not in training
        known = known[known[Columns.Item].isin(train[Columns.Item])]
    model = make_model(settings)
    learned = Dataset.construct(train)
    if settings["same"]:  # the catalogue is that of the whole log
        items = IdMap.from_values(events[Columns.Item])
        learned = Dataset(learned.user_id_map, items, Interactions.from_raw(train, learned.user_id_map, items))
    saved = dict(np.load(settings["weights"])) if settings.get("weights") else None
    if saved is not None:
        Training.start = lambda _: load(model, saved, "first")
    model.fit(learned)
    trained = time.perf_counter()
    users = test[Columns.User].unique()
    # EASE and ALS know items by their numbers, which must stay those of training.
    given = Dataset.construct(known)
    if settings["model"] != "sasrec":
        events = Interactions.from_raw(known, learned.user_id_map, learned.item_id_map)
        given = Dataset(learned.user_id_map, learned.item_id_map, events)
    apart = {}
    if saved is not None:
        apart = {"trained_alike": largest_difference(model, given, users, saved)}
        load(model, saved, "last")
        apart |= {"same_weights": largest_difference(model, given, users, saved)}
        apart |= {"largest_score": float(np.abs(saved["scores"][:, 1:]).max())}
    lists = model.recommend(users, given, k=10, filter_viewed=True, on_unsupported_targets="ignore")
    hits = lists.merge(test[[Columns.User, Columns.Item]], on=[Columns.User, Columns.Item])
    ranked = time.perf_counter()
    return {
        "seconds": passed(started, read, trained, ranked),
        "seconds_per_epoch": (trained - read) / settings["epochs"],
        **apart,
        "HR@10": len(hits) / len(users),
        "NDCG@10": sum(1 / math.log2(1 + rank) for rank in hits[Columns.Rank]) / len(users),
        "users": len(users),
        "parameters": sum(p.numel() for p in model.torch_model.parameters()) if settings["model"] == "sasrec" else None,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
