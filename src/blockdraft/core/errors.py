"""Everything that blockdraft raises on purpose.

BlockdraftError
├── ConfigError        bad option or unknown key                              exit 2
├── ModelError         missing tensor, unsupported architecture, wrong pair   exit 2
└── RequestError       bad or unsupported parameter of one request            400
    └── ContextTooLong the prompt does not fit; says both numbers             400

A message names the value, the limit and the remedy, on one line.
"""


class BlockdraftError(Exception):
    """Base of every error that a user can cause or mend."""


class ConfigError(BlockdraftError):
    """An option has a bad value, or is unknown."""


class ModelError(BlockdraftError):
    """A model cannot be found, is broken, is not supported, or does not fit its pair."""


class RequestError(BlockdraftError):
    """A request carries a bad or unsupported parameter."""


class ContextTooLong(RequestError):
    """A prompt leaves no room for a token in the target's context."""
