"""How a program that does one thing ends."""

import pytest

from shared.command import exit_status
from shared.errors import ConfigError, LockstepError, PeerLost


@pytest.mark.parametrize("error, status", [(None, 0), (LockstepError("no room"), 1), (PeerLost("no room"), 1), (ConfigError("no room"), 2)])
def test_what_goes_wrong_is_one_line_and_a_status(error: LockstepError | None, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        if error is not None:
            raise error

    assert exit_status("thing", work) == status
    assert capsys.readouterr().err == ("thing: no room\n" if status else "")


def test_a_defect_is_none_of_its_business() -> None:
    with pytest.raises(ZeroDivisionError):
        exit_status("thing", lambda: print(1 / 0))
