"""The log is truncated on resume, survives an incomplete last line, and reports when it cannot be written."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism.train.run import Log, read_log


def test_a_resumed_log_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with Log(tmp_path, 0) as log:
        for step in range(1, 6):
            log.write(step, loss=float(step))
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a kill in the middle of a line
    assert len(read_log(tmp_path / "log.jsonl")) == 5
    with Log(tmp_path, 3) as log:
        log.write(4, loss=4.5)
    assert [(record["step"], record["loss"]) for record in read_log(tmp_path / "log.jsonl")] == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, 4.5),
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_reported_in_one_sentence(tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    log._file = open("/dev/full", "w")  # noqa: SIM115  (the log closes it)
    with pytest.raises(OSError, match=r"log\.jsonl could not be written \(No space left on device\)"), log:
        log.write(1, loss=1.0)


def test_tensorboard_events_are_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Log(tmp_path, 0, ["tensorboard"]) as log:
        log.write(1, loss=2.0, note=None)
        log.write(2, loss=1.0)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.0), (2, 1.0)]
