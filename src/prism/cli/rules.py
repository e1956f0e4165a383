"""`prism rules`: one table of all rules, read off the registry."""

from __future__ import annotations

import torch
from rich.console import Console
from rich.table import Table

from prism import rules as registry


def rules(width: int = 1024, heads: int = 4) -> None:
    """Print every rule: objective, forgetting, write rank, transition, forms, state size.

    Args:
        width: width of the layer for which state sizes are given.
        heads: number of heads.
    """
    table = Table(title=f"Rules at width {width} with {heads} heads (defaults)", header_style="bold")
    for column in ("rule", "objective", "forgetting", "transition", "forms"):
        table.add_column(column, overflow="fold")
    for column in ("write rank", "state size"):
        table.add_column(column, justify="right")
    for name in registry.names():
        kind = registry.get(name)
        with torch.device("meta"):  # sizes need no weights
            rule = kind.build(width, heads)
        size = f"{rule.state_size:,}" if kind.constant_state else f"{rule.state_size:,} a token"
        table.add_row(
            name, kind.objective.text, kind.forgetting, kind.transition, _forms(kind.forms), str(rule.write_rank), size
        )
    Console().print(table)
    print("forms: Recurrent, Parallel, Chunkwise, Scan")
    print("state size: numbers a sequence keeps in memory in one layer, whatever its length")


def _forms(forms: tuple[str, ...]) -> str:
    return " ".join(form[0].upper() for form in forms)
