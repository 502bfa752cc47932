"""The lines of the engines on stdout."""

import logging

import pytest

from kfp_ddp.core.log import log


def test_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    log.info("100 % of {images}")
    log.warning("the disk is slow")
    assert capsys.readouterr().out == "100 % of {images}\nwarning: the disk is slow\n"


def test_a_notebook_can_silence_them(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger("kfp_ddp").setLevel("ERROR")
    try:
        log.warning("the disk is slow")
    finally:
        log.setLevel("INFO")
    assert capsys.readouterr().out == ""
