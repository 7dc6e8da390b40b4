"""Every revision and digest that the project is pinned to, in one table."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pin:
    """One outside source: where it comes from, its revision, and the sha256 of what was read where there is one."""

    source: str
    revision: str
    sha256: str | None = None

    @property
    def token(self) -> str:
        """How a spec writes this pin, e.g. `sierra-research/tau-bench@59a2...`."""
        suffix = f"@sha256:{self.sha256}" if self.sha256 and "==" in self.revision else ""
        return f"{self.revision}{suffix}" if "==" in self.revision else f"{self.source}@{self.revision}"


# The commit's initial database hash is sha256 of str(to_hashable(database)), upstream's own.
TAU_BENCH = Pin("sierra-research/tau-bench", "59a200c6d575d595120f1cb70fea53cef0632f6b")
TAU_BENCH_DATABASE_SHA256 = "5a4b2cb59f4d12dea7e4adff24a7f8fada510ead49372ea4a729a82bbb5f49b5"
# Each part as compact JSON in its own order of keys, which that hash cannot see and observations show.
TAU_BENCH_PARTS_SHA256 = {
    "orders": "cbe3e1dba76ddf6aa063553fb59576f88a0178895ea5660652ec6963145c2630",
    "products": "d863b7582e65e0297dfcc1721b52be4f3329bba72932ba2e4d9b36efed2fb154",
    "users": "87019fb91125aee4121af5727e9f194f6a84598719b8d96d9eec14595dbbdb30",
    "tasks/train": "80f8c54ddfbd38dbee1242373bf49ff5021374b469c1c461eae6d4779b1944b8",
    "tasks/dev": "8158e08f89e67af6008697922e53eb2784289f09307f01ff53183df75fb68eea",
    "tasks/test": "620a05f0f749f53b599fe88e6d1d788ff301669d9b40975eca1f631e7d4df5a4",
    "wiki": "eeeb5e9dba227c2180db4c8611a9f5e3c093c0170691ffaef6a89dd64d50c90c",
    "rules": "83b6ab95beedae6f8c87451c65dda8efb6a895c811ea5a2573e37fb371624cd6",
    "tools": "65aec34638a11915bb164c84957c86f35e6bbd44af6fb52113d57764d728c3eb",
}
# The wheel records no commit, so its own digest stands for one.
COOKBOOK = Pin(
    "tinker-cookbook",
    "tinker-cookbook==0.6.1",
    "48a17bbfcde996c21e00fb90fd8f7f434d1456581b79b34550fca9c0cbd8c0fc",
)
SDPO_OFFICIAL = Pin("lasgroup/SDPO", "0e6d5106abe69f578c63bf38a9394e22905c8773")
# The float64 reference lives in this tree: the token is resolved to its digest when a receipt is written.
TREE_REFERENCE = "tree:reference"

PINS: dict[str, Pin] = {"tau-bench": TAU_BENCH, "tinker-cookbook": COOKBOOK, "sdpo-official": SDPO_OFFICIAL}

_PIN = re.compile(
    r"(?:[\w.-]+/[\w.-]+@[0-9a-f]{40}|[A-Za-z0-9_.-]+==[\w.]+@sha256:[0-9a-f]{64}|tree:reference)(?= \(|;|$)", re.ASCII
)
_REVISION = re.compile(rf"{_PIN.pattern}(?: \([^()]*\))?(?:; {_PIN.pattern}(?: \([^()]*\))?)*", re.ASCII)
_COMMIT_IN_PROSE = re.compile(r"sierra-research/tau-bench(?: GitHub)?@([0-9a-f]{40})\b")


def is_pinned(revision: str) -> bool:
    """Whether a revision is a list of pins (`TOKEN (remark); TOKEN`) and nothing else."""
    return _REVISION.fullmatch(revision) is not None


def unknown_pins(revision: str) -> list[str]:
    """The tokens of a pinned revision that this version has no recorded numbers for."""
    valid = {pin.token for pin in PINS.values()} | {TREE_REFERENCE}
    return [token for token in _PIN.findall(revision) if token not in valid]


def tau_bench_commit(dataset_name: str) -> str | None:
    """The tau-bench commit that a dataset's name is pinned to, or None where it names no commit."""
    match = _COMMIT_IN_PROSE.search(dataset_name)
    return match.group(1) if match else None
