"""From a pandas DataFrame to recommendations, and to user states that follow new events.

python examples/recommend_pandas.py --users 300 --epochs 5
"""

import argparse

import numpy as np
import pandas as pd

from prism import Recommender

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--users", type=int, default=300)
parser.add_argument("--epochs", type=int, default=5)
arguments = parser.parse_args()

# Everyone walks through the catalogue in their own steps; one event in ten is random.
random, items, length = np.random.default_rng(0), 40, 12
walk = random.integers(items, size=(arguments.users, 1)) + random.integers(1, 4, (arguments.users, 1)) * np.arange(
    length
)
noise = random.random(walk.shape) < 0.1
walk = np.where(noise, random.integers(items, size=walk.shape), walk % items)
events = pd.DataFrame(
    {
        "customer": np.repeat([f"c{n}" for n in range(arguments.users)], length),
        "product": [f"p{n}" for n in walk.ravel()],
        "when": np.tile(np.arange(length), arguments.users),
    }
)

recommender = Recommender.fit(
    events,
    user="customer",  # the names of your columns
    item="product",
    time="when",
    epochs=arguments.epochs,
    model={"hidden_size": 32},
)
print("c0 did  ", list(events[events["customer"] == "c0"]["product"]))
print("c0 next ", recommender.recommend(users=["c0"], k=5).items[0])
print(recommender.recommend(users=["c0", "c1"], k=2).frame)  # pandas again, with the same column names
print("like p2 ", recommender.similar_items("p2", k=5).items[0])

# A new user: pass a history, or keep a state and update it with one event at a time.
print("2, 4, 6 ", recommender.recommend(sequences=[["p2", "p4", "p6"]], k=5).items[0])
states = recommender.start(1)
for item in ("p2", "p4", "p6"):
    states = recommender.observe(states, [item])
print("streamed", recommender.recommend(states, k=5).items[0])  # a state knows what was seen
print(f"a user's state takes {states.nbytes:,} bytes, however long the history")
