"""The one error type whose message is meant for the person who started the run."""


class InputError(ValueError):
    """Input that cannot be used; the message is one line: what, why and what to do."""
