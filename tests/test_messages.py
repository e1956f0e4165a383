"""What is said to people: suggestions for names that are close, and none for others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism.cli.flags import _flags, parse_settings
from prism.language.settings import Settings
from prism.messages import did_you_mean
from prism.recommend.settings import RecSettings

FLAGS = sorted({*_flags(Settings()), *_flags(RecSettings())})


@given(flag=st.sampled_from(FLAGS), place=st.integers(0, 40))
def test_a_flag_with_a_letter_doubled_is_suggested(flag: str, place: int) -> None:
    name = flag.rpartition(".")[2].lstrip("-")
    at = len(flag) - 1 - place % len(name)
    wrong = flag[:at] + flag[at] + flag[at:]
    assert did_you_mean(wrong, FLAGS, str) == f" (did you mean {flag}?)"


@pytest.mark.parametrize("flag", ["--bogus", "--data.bogus", "--x", "--model.zzz", "--"])
def test_nothing_is_suggested_for_a_flag_that_is_close_to_none(flag: str) -> None:
    assert did_you_mean(flag, FLAGS, str) == ""


def test_the_command_suggests_only_what_is_close() -> None:
    def refusal(flag: str) -> str:
        with pytest.raises(ValueError) as caught:
            parse_settings([flag, "3"], "lm", Settings(), lambda name: Settings())
        return str(caught.value)

    assert refusal("--bogus") == "unknown setting --bogus; --help lists them all"
    assert (
        refusal("--batch.mikro") == "unknown setting --batch.mikro (did you mean --batch.micro?); --help lists them all"
    )
