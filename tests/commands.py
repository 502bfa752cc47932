"""Commands of the program, in the process of the test."""

import json
from typing import Any

from click.testing import CliRunner, Result

from kfp_ddp.cli import app
from kfp_ddp.core.errors import InputError


def call(*words: object) -> Result:
    """Return how a command ended."""
    return CliRunner().invoke(app, [str(word) for word in words])


def output(*words: object) -> str:
    """Return what a successful command prints."""
    result = call(*words)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*words: object) -> Any:
    """Return the JSON that a successful command prints."""
    return json.loads(output(*words, "--json"))


def refused(*words: object) -> str:
    """Return the error of a command with invalid input."""
    result = call(*words)
    assert isinstance(result.exception, InputError), result.output
    assert result.exception.exit_code == 2
    return str(result.exception)
