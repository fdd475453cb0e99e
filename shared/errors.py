"""The errors of Lockstep; each part adds its own below these.

    LockstepError
    |-- ConfigError            a setting, a model or a machine that does not fit: told in one line at start
    |-- ProtocolError          a peer that does not keep to the contract
    `-- PeerLost               a peer that went away or fell silent

Who catches one knows by its class what to do; who reads one knows by its message.
"""


class LockstepError(Exception):
    """The base of every error that Lockstep raises on purpose; the message says what was got and what to do."""

    exit_status = 1  # of a program that ends over it


class ConfigError(LockstepError):
    """A setting, a model or a machine that does not fit. Ends the process at start."""

    exit_status = 2


class ProtocolError(LockstepError):
    """A peer that does not keep to the contract."""


class PeerLost(LockstepError):
    """A peer that went away or fell silent."""
