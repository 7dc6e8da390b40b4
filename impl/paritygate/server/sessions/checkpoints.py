"""Saved states and sampler weights: safetensors and one JSON file a checkpoint, in a folder that names cannot leave."""

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from paritygate.server.errors import RequestError
from paritygate.server.model.lora import Adapter, LoraSpec, Snapshot, Target
from paritygate.server.model.products import FrozenLinear
from paritygate.server.wire.fields import Fields
from paritygate.spec.strict import parse_json, read_plain

ABANDONED_SECONDS = 3600.0
DAMAGED = 422  # final: the SDK repeats what has a status of 500 for minutes, and no repetition mends a file
RECORD = "checkpoint.json"
LARGEST = 2**64 - 1  # a seed is any integer of 64 bits
Kind = Literal["weights", "sampler_weights", "external_weights"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,255}")


@dataclass(frozen=True)
class Checkpoint:
    """What is known of one saved checkpoint; times are seconds since the epoch, `expires` None for never."""

    run: str
    kind: Kind
    name: str
    base_model: str
    rank: int
    seed: int
    attn: bool
    mlp: bool
    unembed: bool
    steps: int
    created: float
    expires: float | None
    user_metadata: dict[str, str] | None
    size_bytes: int = 0
    run_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        return f"tinker://{self.run}/{self.kind}/{self.name}"

    @property
    def version(self) -> str:
        """Names these weights: an overwritten checkpoint is another version."""
        return f"{self.path}@{self.created!r}"

    @property
    def spec(self) -> LoraSpec:
        return LoraSpec(self.rank, self.seed, self.attn, self.mlp, self.unembed)


class Store:
    """The state folder of one server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.spilled = folder / f".spilled-{os.getpid()}"
        for left in folder.glob(".spilled-*"):  # by servers that were killed
            if not _alive(left.name.removeprefix(".spilled-")):
                shutil.rmtree(left, ignore_errors=True)

    def parse(self, path: str) -> tuple[str, Kind, str]:
        """Split tinker://RUN/weights|sampler_weights/NAME; RequestError for anything else."""
        parts = path.removeprefix("tinker://").split("/")
        if not path.startswith("tinker://") or len(parts) != 3 or not _RUN.fullmatch(parts[0]):
            raise RequestError(
                f"{path!r} is not of the form tinker://RUN/weights/NAME or tinker://RUN/sampler_weights/NAME"
            )
        kind = parts[1]
        if kind not in ("weights", "sampler_weights", "external_weights"):
            raise RequestError(f"{path!r}: {kind!r} is neither weights nor sampler_weights nor external_weights")
        return parts[0], kind, check_name(parts[2])

    def save(
        self,
        adapter: Adapter,
        run: str,
        kind: Kind,
        name: str,
        base_model: str,
        *,
        ttl_seconds: int | None,
        overwrite: bool,
        user_metadata: dict[str, str] | None,
        run_metadata: dict[str, str] | None = None,
        export: Callable[[Path, Adapter], None] | None = None,
    ) -> Checkpoint:
        """Write a checkpoint whole or not at all; a state also holds Adam's moments and step count.

        `run_metadata` is that of the training run, `export` writes the files of external weights.
        """
        folder = self._folder(run, kind, check_name(name))
        if folder.exists() and not overwrite:
            raise RequestError(
                f"a checkpoint named {name!r} exists in {run}/{kind}; pass overwrite=True or another name"
            )
        now, spec, scratch = time.time(), adapter.spec, None
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            scratch = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder.parent))
            if export is not None:
                export(scratch, adapter)
            else:
                named = {n: p.detach().contiguous() for n, p in adapter.parameters()}
                save_file(named, scratch / "adapter.safetensors")
            if kind == "weights" and adapter.moments:
                save_file(_moments(adapter), scratch / "optimizer.safetensors")
            size = sum(f.stat().st_size for f in scratch.iterdir())
            expires = None if ttl_seconds is None else now + ttl_seconds
            checkpoint = Checkpoint(
                run, kind, name, base_model, spec.rank, spec.seed, spec.attn, spec.mlp, spec.unembed, adapter.steps,
                now, expires, user_metadata, size, run_metadata,
            )  # fmt: skip
            (scratch / RECORD).write_text(_record(checkpoint))
            if folder.exists():
                shutil.rmtree(_old(folder), ignore_errors=True)
                os.replace(folder, _old(folder))
            os.replace(scratch, folder)
            shutil.rmtree(_old(folder), ignore_errors=True)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"checkpoint {run}/{kind}/{name} could not be written ({error})", 507) from error
        finally:
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        return checkpoint

    def writer(
        self,
        body: Fields,
        run: str,
        kind: Kind,
        base_model: str,
        seq: int | None,
        *,
        run_metadata: dict[str, str] | None,
        export: Callable[[Path, Adapter], None] | None = None,
    ) -> Callable[[Adapter], Checkpoint]:
        """Check the fields of a save request; returns what writes the checkpoint when its turn comes."""
        name = body.optional_text("path")
        name = check_name(name) if name is not None else f"{seq or 0:06d}"
        ttl = body.optional_integer("ttl_seconds", low=1, high=315_576_000)
        overwrite = body.flag("overwrite", kind == "sampler_weights")
        metadata = body.strings("user_metadata")

        def write(adapter: Adapter) -> Checkpoint:
            return self.save(
                adapter, run, kind, name, base_model, ttl_seconds=ttl, overwrite=overwrite, user_metadata=metadata,
                run_metadata=run_metadata, export=export,
            )  # fmt: skip

        return write

    def find(self, path: str) -> Checkpoint:
        """The checkpoint of that path; RequestError: none or expired (404), or its record cannot be read (422)."""
        run, kind, name = self.parse(path)
        if not self._folder(run, kind, name).exists():
            with contextlib.suppress(OSError):  # a server was killed while it overwrote this checkpoint
                os.replace(_old(self._folder(run, kind, name)), self._folder(run, kind, name))
        file = self._folder(run, kind, name) / RECORD
        try:
            # Where it lies decides its name: somebody may have renamed or copied the folder.
            data: dict[str, Any] = dict(parse_json(read_plain(file), LARGEST))
            data.update(run=run, kind=kind, name=name)
            checkpoint = Checkpoint(**data)
            _check(checkpoint)
        except (FileNotFoundError, NotADirectoryError):
            raise RequestError(f"there is no checkpoint {path}", 404) from None
        except (ValueError, TypeError, OSError) as error:
            raise RequestError(f"checkpoint {path} cannot be read: {error}", DAMAGED) from error
        if checkpoint.expires is not None and checkpoint.expires <= time.time():
            shutil.rmtree(file.parent, ignore_errors=True)
            raise RequestError(f"checkpoint {path} has expired", 404)
        return checkpoint

    def load_into(self, adapter: Adapter, checkpoint: Checkpoint, *, optimizer: bool) -> None:
        """Set an adapter of the same shape to a saved state; without `optimizer` Adam starts anew."""
        if checkpoint.kind == "external_weights":
            raise RequestError(f"{checkpoint.path} is an export for other programs; load a saved state instead")
        weights = self._tensors(checkpoint, "adapter.safetensors")
        named = dict(adapter.parameters())
        if {n: t.shape for n, t in weights.items()} != {n: p.shape for n, p in named.items()}:
            raise RequestError(
                f"checkpoint {checkpoint.path} (rank {checkpoint.rank}) does not fit this model (rank "
                f"{adapter.spec.rank}) or its trained layers: create the client from the state instead"
            )
        moments: dict[str, Tensor] = {}
        if optimizer and checkpoint.kind != "weights":
            raise RequestError(f"{checkpoint.path} holds sampler weights, which have no optimizer state")
        if optimizer and checkpoint.steps:
            moments = self._tensors(checkpoint, "optimizer.safetensors")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])
                parameter.grad = None
        adapter.steps = checkpoint.steps if optimizer else 0
        adapter.moments = {n: (moments[f"{n}.m"], moments[f"{n}.v"]) for n in named if f"{n}.m" in moments}

    def snapshot(self, checkpoint: Checkpoint, targets: list[Target]) -> Snapshot:
        """Frozen weights of a checkpoint."""
        adapter = Adapter(checkpoint.spec, targets)
        self.load_into(adapter, checkpoint, optimizer=False)
        return adapter.freeze(checkpoint.version)

    def listed(self, run: str | None = None) -> list[Checkpoint]:
        """Every live checkpoint, oldest first."""
        pattern = f"*/*/*/{RECORD}"
        checkpoints: list[Checkpoint] = []
        for file in self.folder.glob(pattern):
            name, kind, folder = file.parent.name, file.parent.parent.name, file.parent.parent.parent.name
            if name.startswith(".") or (run is not None and folder != run):
                continue
            try:
                checkpoints.append(self.find(f"tinker://{folder}/{kind}/{name}"))
            except RequestError:
                continue
        return sorted(checkpoints, key=lambda c: c.created)

    def sweep(self) -> None:
        """Delete what has expired, and what killed servers had begun to save."""
        self.listed()
        for scratch in self.folder.glob("*/*/.saving-*"):
            with contextlib.suppress(OSError):
                if time.time() - scratch.stat().st_mtime > ABANDONED_SECONDS:
                    shutil.rmtree(scratch)

    def spill(self, snapshot: Snapshot, name: str) -> Path:
        """Write frozen weights to a scratch file that `unspill` reads back."""
        path = self.spilled / f"{name}.safetensors"
        path.parent.mkdir(exist_ok=True)
        tensors: dict[str, Tensor] = {}
        for target, (a, b, scale) in snapshot.pairs.items():
            tensors |= {
                f"{target}|A": a.weight.contiguous(),
                f"{target}|B": b.weight.contiguous(),
                f"{target}|scale": torch.tensor(scale, dtype=torch.double),
            }
        save_file(tensors, path)
        return path

    def unspill(self, path: Path, version: str) -> Snapshot:
        """Read spilled weights and delete their file; RequestError (422) if they are gone."""
        try:
            tensors = load_file(path)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"this sampler's weights, moved to {path}, cannot be read ({error})", DAMAGED) from error
        path.unlink(missing_ok=True)
        names = [name.removesuffix("|A") for name in tensors if name.endswith("|A")]
        pairs = {
            n: (FrozenLinear(tensors[f"{n}|A"]), FrozenLinear(tensors[f"{n}|B"]), float(tensors[f"{n}|scale"]))
            for n in names
        }
        return Snapshot(version, pairs)

    def files(self, checkpoint: Checkpoint) -> dict[str, Path]:
        """The files of a checkpoint that are for other programs, by name."""
        folder = self._folder(checkpoint.run, checkpoint.kind, checkpoint.name)
        return {file.name: file for file in sorted(folder.iterdir()) if file.name != RECORD}

    def set_ttl(self, path: str, seconds: int | None) -> None:
        """Let a checkpoint expire `seconds` from now, or never; RequestError (507) where that cannot be written."""
        checkpoint = self.find(path)
        changed = replace(checkpoint, expires=None if seconds is None else time.time() + seconds)
        folder = self._folder(checkpoint.run, checkpoint.kind, checkpoint.name)
        try:
            with tempfile.NamedTemporaryFile("w", dir=folder.parent, prefix=".ttl-", delete=False) as file:
                file.write(_record(changed))
            os.replace(file.name, folder / RECORD)
        except OSError as error:
            raise RequestError(f"the time to live of {path} could not be written ({error})", 507) from error

    def delete(self, path: str) -> None:
        checkpoint = self.find(path)
        shutil.rmtree(self._folder(checkpoint.run, checkpoint.kind, checkpoint.name))

    def _folder(self, run: str, kind: Kind, name: str) -> Path:
        return self.folder / run / kind / name

    def _tensors(self, checkpoint: Checkpoint, file: str) -> dict[str, Tensor]:
        path = self._folder(checkpoint.run, checkpoint.kind, checkpoint.name) / file
        try:
            with safe_open(path, "pt"):
                pass
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise RequestError(f"checkpoint {checkpoint.path}: {file} cannot be read ({error})", DAMAGED) from error


def check_name(name: str) -> str:
    """A checkpoint's name: letters, digits, dots, dashes, underscores; so that it cannot leave its folder."""
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"checkpoint name {name!r}: use 1 to 128 letters, digits, dots, dashes or underscores, the first a letter "
            "or a digit"
        )
    return name


def _old(folder: Path) -> Path:
    """Where a checkpoint stands aside while it is overwritten."""
    return folder.parent / f".old-{folder.name}"


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError, OverflowError):
        return False
    except PermissionError:
        pass  # somebody else's
    return True


_TYPES: dict[str, tuple[type, ...]] = {
    "base_model": (str,), "rank": (int,), "seed": (int,), "attn": (bool,), "mlp": (bool,), "unembed": (bool,),
    "steps": (int,), "created": (float,), "expires": (float, type(None)), "user_metadata": (dict, type(None)),
    "size_bytes": (int,), "run_metadata": (dict, type(None)),
}  # fmt: skip


def _record(checkpoint: Checkpoint) -> str:
    return json.dumps(asdict(checkpoint), indent=1) + "\n"


def _check(checkpoint: Checkpoint) -> None:
    """TypeError unless every field has its type: the file may be anybody's."""
    for name, types in _TYPES.items():
        value = getattr(checkpoint, name)
        if type(value) not in types:
            raise TypeError(f"{name} is {value!r}")


def _moments(adapter: Adapter) -> dict[str, Tensor]:
    tensors: dict[str, Any] = {}
    for name, (m, v) in adapter.moments.items():
        tensors[f"{name}.m"], tensors[f"{name}.v"] = m.contiguous(), v.contiguous()
    return tensors
