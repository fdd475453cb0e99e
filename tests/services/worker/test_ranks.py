"""What the end of a rank means for its group."""

import pytest

from services.worker.messages import Ended, Failed
from services.worker.ranks import GroupFailed, fault
from shared.errors import ConfigError, LockstepError


@pytest.mark.parametrize(
    "said, kind, words",
    [
        (Failed("dtype: int4 is none", config=True), ConfigError, "dtype: int4 is none"),
        (Failed("out of memory", config=False), GroupFailed, "rank 1: out of memory"),
        (Ended("by SIGKILL"), GroupFailed, "rank 1 ended by SIGKILL"),
    ],
)
def test_a_setting_that_does_not_fit_is_told_from_a_fault(said: Failed | Ended, kind: type[LockstepError], words: str) -> None:
    error = fault("1", said)
    assert type(error) is kind
    assert str(error) == words
