"""The real tau_bench package behind the interface of our own episode (`--environment upstream`)."""

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from paritygate.retail import layout
from paritygate.retail.episode import Episode, Grade, graded
from paritygate.retail.errors import DataError
from paritygate.retail.source import Source, checked
from paritygate.spec.pins import TAU_BENCH

INSTALL = f"pip install --no-deps git+https://github.com/{TAU_BENCH.source}@{TAU_BENCH.revision}"


class _NoClient(ModuleType):
    """Stands where tau_bench.envs.user imports its language-model client, which this project never calls."""

    @staticmethod
    def completion(*_args: Any, **_kwargs: Any) -> Any:
        raise RuntimeError("the language-model client of tau_bench is not used here: the simulator lives in the agent")


@cache
def package() -> ModuleType:
    """The module tau_bench.envs.retail of the installed package, after its data was found as pinned.

    Its import of `litellm` is answered by an empty stand-in, which is taken away again. Raises DataError where the
    package is not installed or holds other data.
    """
    spec = importlib.util.find_spec("tau_bench")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"--environment upstream needs the package tau_bench: {INSTALL}")
    folder = Path(spec.submodule_search_locations[0]) / "envs" / "retail"
    checked(layout.read(folder), folder=folder, place="installed package tau_bench")
    present = "litellm" in sys.modules
    sys.modules.setdefault("litellm", _NoClient("litellm"))
    try:
        return importlib.import_module("tau_bench.envs.retail")
    finally:
        if not present:
            del sys.modules["litellm"]


class UpstreamEpisode(Episode):
    """Upstream's own environment: its tools through its `step`, its hash, its reward."""

    def __init__(self, source: Source, split: str, index: int) -> None:
        super().__init__(source, split, index)
        # "human" is the one user that upstream builds without a client; it is never asked for a word.
        self.env: Any = package().MockRetailDomainEnv(user_strategy="human", task_split=split, task_index=index)
        self._action = importlib.import_module("tau_bench.types").Action
        self._terminating = self.env.terminate_tools

    def _invoke(self, name: str, arguments: Any) -> str:
        if not isinstance(arguments, dict):
            return f"Error: arguments must be an object, not {type(arguments).__name__}"
        self.env.terminate_tools = []  # a transfer would grade at once, and grading leaves the gold state behind
        if name == "respond":
            return f"Unknown action {name}"  # speaking to the user is the agent's, not a tool
        return self.env.step(self._action(name=name, kwargs=arguments)).observation

    def _grade(self, messages: tuple[str, ...]) -> Grade:
        before: str = self.env.get_data_hash()
        self.env.actions += [self._action(name="respond", kwargs={"content": message}) for message in messages]
        self.env.terminate_tools = self._terminating
        reward = float(self.env.calculate_reward().reward)
        grade = graded(self.task, messages, database_ok=before == self.env.get_data_hash())  # now the goal's
        if grade.reward != reward:
            raise DataError(f"{self._place()}: upstream gives {reward}, its own two criteria give {grade.reward}")
        return grade
