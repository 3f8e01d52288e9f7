"""Fixtures every test file may use: tiny synthetic pairs, made in seconds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tiny_pair import TinyPair


@dataclass(frozen=True)
class Pair:
    """Paths of a target and its draft."""

    target: Path
    draft: Path


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory) -> Pair:
    """Proposals are accepted often, not always."""
    return Pair(*TinyPair(rigged=True).write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory) -> Pair:
    """Random weights: hardly a proposal is accepted, and text depends on the whole context."""
    return Pair(*TinyPair(seed=2, matrices="IQ4_XS", head="Q6_K").write(tmp_path_factory.mktemp("random")))
