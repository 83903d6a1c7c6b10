"""Switches the check of annotations off, since users do not have it."""

import jaxtyping
import pytest


@pytest.fixture(autouse=True, scope="module")
def unchecked_annotations():
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", before)
