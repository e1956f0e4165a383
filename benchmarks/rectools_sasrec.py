"""Train and evaluate RecTools' SASRec, for recommend.py: needs an interpreter with rectools[torch] (and numpy < 2).

    python benchmarks/rectools_sasrec.py ml-100k.inter '{"epochs": 20, …}'

The protocol is that of recommend.py: each user's last event is the test event, the one before it is for validation and not
trained on, items that a user has seen are left out of the ranking, and all others are ranked. Prints one line of JSON.
"""

from __future__ import annotations

import json
import math
import sys
import time

import pandas as pd
import torch
from pytorch_lightning import seed_everything
from rectools import Columns
from rectools.dataset import Dataset
from rectools.models import SASRecModel


def main(path: str, settings: dict) -> dict:
    torch.set_num_threads(settings["threads"])
    seed_everything(settings["seed"])
    started = time.perf_counter()
    events = pd.read_csv(path, sep="\t").rename(columns=lambda name: name.split(":")[0])
    events = events.sort_values(["user_id", "timestamp"], kind="stable")
    events[Columns.Datetime] = pd.to_datetime(events["timestamp"], unit="s")
    events[Columns.Weight] = 1.0
    left = events.groupby("user_id").cumcount(ascending=False)
    columns = [Columns.User, Columns.Item, Columns.Weight, Columns.Datetime]
    train, known, test = events.loc[left >= 2, columns], events.loc[left >= 1, columns], events.loc[left == 0, columns]
    read = time.perf_counter()

    model = SASRecModel(
        n_blocks=settings["layers"],
        n_heads=settings["heads"],
        n_factors=settings["width"],
        dropout_rate=settings["dropout"],
        session_max_len=settings["length"],
        loss="softmax",
        lr=settings["lr"],
        batch_size=settings["batch"],
        epochs=settings["epochs"],
    )
    model.fit(Dataset.construct(train))
    trained = time.perf_counter()
    users = test[Columns.User].unique()
    lists = model.recommend(users, Dataset.construct(known), k=10, filter_viewed=True, on_unsupported_targets="ignore")
    hits = lists.merge(test[[Columns.User, Columns.Item]], on=[Columns.User, Columns.Item])
    ranked = time.perf_counter()
    return {
        "seconds": {
            "read": read - started,
            "train": trained - read,
            "evaluate": ranked - trained,
            "all": ranked - started,
        },
        "seconds_per_epoch": (trained - read) / settings["epochs"],
        "HR@10": len(hits) / len(users),
        "NDCG@10": sum(1 / math.log2(1 + rank) for rank in hits[Columns.Rank]) / len(users),
        "users": len(users),
        "parameters": sum(p.numel() for p in model.torch_model.parameters()),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], json.loads(sys.argv[2]))))
