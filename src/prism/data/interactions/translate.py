"""A log in the terms of a catalogue that was made from another."""

from __future__ import annotations

import numpy as np

from prism.data.interactions.histories import Histories
from prism.data.interactions.ids import Catalogue
from prism.data.interactions.prepared import Prepared


def translate(log: Prepared, catalogue: Catalogue) -> Prepared:
    """The log's events with the catalogue's numbers. Events whose item the catalogue lacks are left out and counted."""
    known = catalogue.rows(log.catalogue.items)
    items = np.concatenate([[-1], known])[log.histories.items]
    kept = items > 0
    if not kept.any():
        raise ValueError("the log has no event whose item the model knows")
    before = np.concatenate([[0], np.cumsum(kept)])
    times = log.histories.times
    histories = Histories(before[log.histories.offsets], items[kept], None if times is None else times[kept])
    lost = {"events_of_unknown_items": int((~kept).sum()), "unknown_items": int((known < 0).sum())}
    notes = [*log.manifest.get("notes", [])]
    if lost["unknown_items"]:
        notes.append(
            f"{lost['events_of_unknown_items']:,} events of {lost['unknown_items']:,} items that the model does not know "
            "are left out"
        )
    counts = {**log.manifest.get("counts", {}), **lost, "events": int(kept.sum()), "items": len(catalogue)}
    manifest = {**log.manifest, "counts": counts, "notes": notes}
    manifest.pop("digest", None)
    return Prepared(histories, catalogue, log.users, manifest)
