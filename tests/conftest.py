"""Fixtures every test file may use: tiny synthetic pairs, made in seconds, and the CPU with and without our kernels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest
from refusing import Refusing
from tiny_pair import TinyPair

from pyllama_dflash.ggml import Backend, choose_device


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


@pytest.fixture(scope="module")
def kernels():
    """The CPU backend."""
    opened = Backend(choose_device("cpu")[0], threads=1)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def composed():
    """The CPU backend, as if it had no kernel of ours."""
    opened = Refusing(choose_device("cpu")[0])
    yield opened
    opened.close()


@pytest.fixture
def save(tmp_path):
    """Writes bytes to a file and returns its path."""

    def write(content: bytes) -> Path:
        path = tmp_path / "file.gguf"
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def no_open_descriptors():
    """The test leaves no file open."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    assert set(os.listdir("/proc/self/fd")) <= before
