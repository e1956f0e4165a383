"""Train a Mixer in a plain torch loop: recall the token seen two steps ago.

python examples/training_loop.py --rule prism --steps 200
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import prism

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rule", default="prism", help="one of prism.rules.names()")
parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
arguments = parser.parse_args()

torch.manual_seed(0)
VOCABULARY, WIDTH, TOKENS, DELAY = 16, 64, 48, 2

embed = nn.Embedding(VOCABULARY, WIDTH)
mixer = prism.Mixer(arguments.rule, width=WIDTH, heads=2)
head = nn.Linear(WIDTH, VOCABULARY)
model = nn.ModuleList([embed, mixer, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

for step in range(1, arguments.steps + 1):
    tokens = torch.randint(VOCABULARY, (32, TOKENS))
    y, _ = mixer(embed(tokens))  # [B, T, width]; the state is not needed here
    logits = head(y)[:, DELAY:]
    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, :-DELAY].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 1 or step % 50 == 0 or step == arguments.steps:
        print(f"step {step:4}   loss {loss.item():.3f}")
