"""Tokenizers, renderers and one embedded tiny server for the agent's tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from paritygate.agent import prompt, renderer
from paritygate.backend.vocabulary import offline
from paritygate.server import Running, start
from paritygate.server.model.sources import resolve
from tests.agent.fakes import TOOLS


@pytest.fixture(scope="session")
def tiny() -> Iterator[Running]:
    """The embedded server with the tiny model, in this process."""
    server = start("tiny")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """The tiny model's tokenizer: ChatML's three control tokens, bytes, and little else."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(resolve("tiny").folder))


@pytest.fixture(scope="session")
def renderers(tiny_tokenizer: Any) -> dict[str, renderer.Renderer]:
    """Every renderer that has a vocabulary here, by name; Qwen3's runs on that of Qwen3.5, which has its tokens too."""
    qwen = offline("Qwen/Qwen3.5-4B")
    return {
        "chatml": renderer.load("chatml", tiny_tokenizer),
        "qwen3.5": renderer.load("auto", qwen),
        "qwen3": renderer.load("qwen3", qwen),
        "qwen3-thinking": renderer.load("qwen3", qwen, thinking=True),
        "qwen3.5-thinking": renderer.load("qwen3.5", qwen, thinking=True),
    }


@pytest.fixture(scope="session")
def contexts() -> dict[str, prompt.Context]:
    """A full and a compact context over a few tools."""
    return {"full": prompt.full("Be kind to customers.", TOOLS), "compact": prompt.compact(TOOLS)}
