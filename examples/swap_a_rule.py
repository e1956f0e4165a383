"""One model, several memories: change the rule, keep everything else.

python examples/swap_a_rule.py --rules linear gated_delta prism "prism*3+softmax"
"""

import argparse
from pathlib import Path

import torch

from prism.models import PrismConfig, PrismForCausalLM

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rules", nargs="+", default=["linear", "mamba2", "gated_delta", "prism", "prism*3+softmax"])
parser.add_argument("--steps", type=int, default=30, help="optimizer steps for each")
arguments = parser.parse_args()

text = Path(__file__).read_text(encoding="utf-8")
tokens = torch.tensor([list(text.encode())])[:, :1024].view(4, -1)  # this very file, as bytes

for layers in arguments.rules:
    torch.manual_seed(0)
    model = PrismForCausalLM(PrismConfig(256, hidden_size=64, num_heads=2, layers=layers, num_hidden_layers=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(arguments.steps):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    size = sum(p.numel() for p in model.parameters())
    growing = "" if model.config.constant_state else ", a state that grows with the context"
    print(f"{layers:16} {size:9,} parameters, loss {loss.item():.3f}{growing}")
